"""Faults of inputs, answers, job files and terminals, end to end: 8 to 16, 27, 37 to 40."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import oracles
import processes
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import victims

import gristmill as gm
from gristmill.driver.run import retry_dead
from gristmill.job.specs import SklearnModel


def test_fault_08_a_truncated_parquet_file(numbers: str, quick: Path) -> None:
    """It is named before a model is loaded; on_bad_file skip counts it and scores the rest."""
    whole = Path(numbers, "1.parquet").read_bytes()
    Path(numbers, "1.parquet").write_bytes(whole[: len(whole) // 2])
    marker = str(quick / "loaded")
    with pytest.raises(gm.BadSource, match=r"1\.parquet"):
        jobs.run(numbers, str(quick / "out"), "Loaded", {"marker": marker}, workers=0)
    assert not os.path.exists(marker)
    source = gm.source(numbers, on_bad_file="skip")
    report = jobs.run(source, str(quick / "out"), "scored", workers=0)
    assert report.rows_ok == 100
    assert any("1.parquet" in note for note in report.notes)
    again = jobs.run(source, str(quick / "out"), "scored", workers=0)
    for told in (report, again):
        assert re.search(r"^skipped +1 +not read: .*1\.parquet: truncated", str(told), re.MULTILINE)
    told = gm.status(str(quick / "out"))
    assert "1.parquet: truncated" in told["skipped"][0]
    assert any("1.parquet: truncated" in line for line in gm.verify(str(quick / "out")).lines)
    shown = subprocess.run([sys.executable, "-m", "gristmill", "status", str(quick / "out")], capture_output=True)
    assert b"1.parquet: truncated" in shown.stdout
    assert "1.parquet: truncated" in json.loads(Path(quick, "out", "_SUCCESS").read_text())["skipped"][0]


def test_fault_08_a_page_that_is_corrupt(numbers: str, quick: Path) -> None:
    """A Parquet file whose footer is right and whose data is not: the run stops and names the file."""
    path = Path(numbers, "1.parquet")
    data = bytearray(path.read_bytes())
    data[8:200] = os.urandom(192)
    path.write_bytes(data)
    with pytest.raises(gm.GristmillError, match=r"1\.parquet") as failed:
        jobs.run(numbers, str(quick / "out"), "scored", workers=0, shard_rows=50)
    assert failed.value.exit_code in (1, 2)
    assert not list(Path(quick, "out").glob("*.parquet"))


@pytest.mark.long
def test_fault_08_a_page_that_is_corrupt_is_got_past(numbers: str, quick: Path) -> None:
    """The way on that the error names: the rows that cannot be decoded are dead letters, all others are scored."""
    path, out = Path(numbers, "1.parquet"), str(quick / "out")
    rows = pq.read_table(path)
    pq.write_table(rows, path, row_group_size=50, compression="snappy", use_dictionary=False, write_page_checksum=True)
    chunk = pq.read_metadata(path).row_group(1).column(0)
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset + 40 : chunk.data_page_offset + 60] = b"\xff" * 20
    path.write_bytes(data)
    with pytest.raises(gm.RunFailed, match=r"1\.parquet: row group 1 .*on_bad_file='skip'"):
        jobs.run(numbers, out, "scored", workers=0, shard_rows=20)
    source = gm.source(numbers, on_bad_file="skip")
    with pytest.raises(gm.GateFailed, match="accept"):
        jobs.run(source, out, "scored", workers=0, shard_rows=20, gates={"min_ok": 0.9})
    report = jobs.run(source, out, "scored", workers=0, shard_rows=20, verbs={"accept": True}, gates={"min_ok": 0.9})
    assert (report.rows_in, report.rows_ok, report.rows_dead) == (200, 150, 50)
    assert report.shards_resumed
    letters = gm.dead(out).to_pylist()
    assert sorted((x["source"], x["position"], x["error"]) for x in letters) == [
        (str(path), n, "Damaged") for n in range(50, 100)
    ]
    whole = pq.read_table(numbers + "/0.parquet")["id"].to_pylist() + rows["id"].to_pylist()[:50]
    assert sorted(gm.read(out).to_table()["id"].to_pylist()) == sorted(whole)
    job = jobs.job(source, out, "scored")
    assert job.run().state == "nothing to do"
    assert gm.verify(out, source=True).ok
    assert gm.retry_dead(job).rows_dead == 50


def test_fault_09_a_bad_line_of_jsonl(quick: Path) -> None:
    """Lines that are no JSON, or no UTF-8, are dead letters with file and offset, raw bytes as base64."""
    lines = [json.dumps({"id": i, "x": float(i)}).encode() for i in range(50)]
    lines[7], lines[20] = b'{"id": 7, "x":', b'{"id": 20, "x": "\xff\xfe"}'
    (quick / "in.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    root = str(quick / "out")
    report = jobs.run(str(quick / "in.jsonl"), root, "scored", workers=0)
    assert (report.rows_in, report.rows_ok, report.rows_dead) == (50, 48, 2)
    letters = gm.dead(root).to_pylist()
    offsets = [sum(len(line) + 1 for line in lines[:n]) for n in (7, 20)]
    assert sorted(x["position"] for x in letters) == offsets
    assert all("in.jsonl" in x["message"] for x in letters)
    assert "base64" in letters[0]["payload"]


@pytest.mark.parametrize(("on_null", "ok", "dead", "filtered"), [("keep", 4, 0, 0), (None, 4, 0, 0)])
def test_fault_10_null_and_empty_texts_reach_a_function_as_they_are(
    quick: Path, on_null: str | None, ok: int, dead: int, filtered: int
) -> None:
    """A function is given nulls as None and empty texts as empty: never the string "None"."""
    pq.write_table(pa.table({"id": [0, 1, 2, 3], "text": ["ab", None, "", "None"]}), quick / "in.parquet")
    options: dict[str, Any] = {} if on_null is None else {"on_null": on_null}
    report = jobs.run(str(quick / "in.parquet"), str(quick / "out"), "lengths", workers=0, **options)
    assert (report.rows_ok, report.rows_dead, report.rows_filtered) == (ok, dead, filtered)
    assert report.read().to_table()["n"].to_pylist() == [2, -1, 0, 4]


@pytest.mark.long
def test_fault_11_a_row_of_100_megabytes(quick: Path) -> None:
    """It is scored like any other row, beside small ones."""
    texts = ["a" * 10, "b" * 100_000_000, "c"]
    pq.write_table(pa.table({"id": [0, 1, 2], "text": texts}), quick / "in.parquet")
    report = jobs.run(str(quick / "in.parquet"), str(quick / "out"), "lengths", workers=1)
    assert report.read().to_table()["n"].to_pylist() == [10, 100_000_000, 1]


def test_fault_12_no_rows_at_all(quick: Path) -> None:
    """A source without rows fails its gate unless that is allowed; an empty file beside others is nothing special."""
    pq.write_table(victims.table(0), quick / "empty.parquet")
    with pytest.raises(gm.GateFailed, match="no rows") as failed:
        jobs.run(str(quick / "empty.parquet"), str(quick / "out"), "scored", workers=0)
    assert failed.value.exit_code == 3
    report = jobs.run(
        str(quick / "empty.parquet"), str(quick / "out"), "scored", workers=0, gates=gm.Gates(allow_empty=True)
    )
    assert (report.rows_in, report.rows_ok) == (0, 0)
    folder = quick / "in"
    victims.write_input(str(folder), 20)
    pq.write_table(victims.table(0), folder / "00.parquet")
    assert jobs.run(str(folder), str(quick / "out2"), "scored", workers=0).rows_ok == 20


def test_fault_13_types_that_differ_between_files(numbers: str, quick: Path) -> None:
    """Drift between files is told before anything runs, with file and column."""
    pq.write_table(pa.table({"id": [1], "x": ["text"]}), Path(numbers, "2.parquet"))
    with pytest.raises(gm.BadSource, match=r"(?s)2\.parquet.*x|x.*2\.parquet"):
        jobs.run(numbers, str(quick / "out"), "scored", workers=0)


def test_fault_14_ids_that_are_null_or_the_same(quick: Path) -> None:
    """Every row is scored, whatever the user's own ids are."""
    pq.write_table(
        pa.table({"key": [1, 1, None, None, 2], "id": [0, 1, 2, 3, 4], "x": [1.0] * 5}), quick / "in.parquet"
    )
    report = jobs.run(str(quick / "in.parquet"), str(quick / "out"), "scored", workers=0, keep=["key", "id"])
    assert report.read().to_table()["key"].to_pylist() == [1, 1, None, None, 2]


@pytest.mark.parametrize("how", ["few", "many", "none", "generator"])
def test_fault_15_answers_that_are_not_one_row_for_each(numbers: str, quick: Path, how: str) -> None:
    """The job stops and names the function: nothing is zipped short, and nothing bisected."""
    with pytest.raises(gm.BadOutput, match="wrong") as failed:
        jobs.run(numbers, str(quick / "out"), "wrong", {"how": how}, workers=0)
    assert failed.value.exit_code == 1
    if how in ("few", "many"):
        assert any(word.strip(":,").isdigit() for word in str(failed.value).split())
    assert processes.receipts_in(str(quick / "out")) == 0


def test_fault_16_nan_is_a_dead_letter(numbers: str, quick: Path) -> None:
    """A NaN answer is a dead letter by default, and kept where that is asked for."""
    root = str(quick / "out")
    report = jobs.run(numbers, root, "wrong", {"how": "nan"}, workers=0)
    assert (report.rows_ok, oracles.dead_ids(root)) == (199, [5])
    assert jobs.run(numbers, str(quick / "kept"), "wrong", {"how": "nan"}, workers=0, on_nan="keep").rows_ok == 200


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.few(3)
def test_fault_16_nan_among_whole_numbers_is_a_dead_letter(
    quick: Path, monkeypatch: pytest.MonkeyPatch, value: float, fails: bool
) -> None:
    """As numpy has a missing one: also in a batch whose types the first rows do not have, of a run and of a retry; if
    such rows are to be kept, no type holds both.
    """
    (quick / "in").mkdir()
    pq.write_table(pa.table({"k": range(1, 30)}), quick / "in" / "a.parquet")

    def counted(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if os.environ.get("DOWN") and {10, 12} & set(batch["k"].tolist()):
            raise ValueError("down")
        missing = batch["k"] % 10 == 0
        return {"n": np.where(missing, value, 5) if missing.any() else batch["k"] * 2}

    if fails:
        monkeypatch.setenv("DOWN", "1")
    sink = gm.sink(str(quick / "out"), keep=["k"])
    options = {"workers": 0, "batch_rows": 4, "gates": gm.Gates(min_ok=0)}
    job = gm.Job(str(quick / "in"), counted, sink, **options)
    job.run()
    assert gm.read(str(quick / "out")).schema.field("n").type == pa.int64()
    monkeypatch.delenv("DOWN", raising=False)
    if fails:
        assert gm.retry_dead(job).rows_ok == 27
    assert {r["position"] for r in gm.dead(str(quick / "out")).to_pylist()} == {9, 19}
    assert {r["error"] for r in gm.dead(str(quick / "out")).to_pylist()} == {"NaN" if value != value else "Infinite"}
    assert gm.read(str(quick / "out")).to_table().num_rows == 27
    with pytest.raises(gm.BadOutput, match="returned other types than before"):
        gm.Job(str(quick / "in"), counted, gm.sink(str(quick / "kept")), on_nan="keep", **options).run()


@pytest.mark.parametrize("how", ["dtype", "width"])
def test_fault_16_answers_of_another_type_or_width(numbers: str, quick: Path, how: str) -> None:
    """Answers that change their type on the way stop the job; nothing is cast with loss."""
    with pytest.raises(gm.GristmillError, match=r"other types|does not fit|width|differ") as failed:
        jobs.run(numbers, str(quick / "out"), "wrong", {"how": how}, workers=0, shard_rows=100, batch_rows=50)
    assert failed.value.exit_code == 1


def test_fault_27_a_source_file_changes_during_the_run(numbers: str, quick: Path) -> None:
    """The shard that read it fails, exit 4; the planned file put back, at another time, the run goes on."""
    root, path = str(quick / "out"), os.path.join(numbers, "1.parquet")
    before, other = Path(path).read_bytes(), quick / "other"
    pq.write_table(victims.table(100, 1100), other)
    args = {"folder": numbers, "name": "1.parquet", "by": str(other), "at": 150, "marker": str(quick / "touched")}
    with pytest.raises(gm.SourceChanged, match=r"1\.parquet") as failed:
        jobs.run(numbers, root, "rewrites", args, workers=1, shard_rows=20)
    assert failed.value.exit_code == 4
    with pytest.raises(gm.PlanChanged, match=r"1\.parquet"):
        jobs.run(numbers, root, "rewrites", args, workers=1, shard_rows=20)
    Path(path).write_bytes(before)
    assert jobs.run(numbers, root, "rewrites", args, workers=1, shard_rows=20).rows_ok == 200
    oracles.nothing_lost_nothing_twice(root, list(range(200)))


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BOMB, "too large|too many|nested|alias"),
        ("source: in\nmodle: {call: 'victims:scored'}\nsink: out\n", "modle"),
        ("source: in\nmodel: {call: 'victims:scored'}\nsink: out\nrunning: {batch_rows: many}\n", "batch_rows"),
        (
            "source: in\nmodel: {call: 'victims:scored'}\nsink: {uri: out, partition_by: ['../up']}\n",
            r"partition_by is '\.\./up'",
        ),
        ("source: in\nmodel: {call: 'victims:scored', output: '..'}\nsink: out\n", r"output is '\.\.'"),
        (
            "source: in\nmodel: {call: 'victims:scored'}\nsink: !!python/object/apply:os.system ['touch owned']\n",
            "tag|python",
        ),
    ],
)
def test_fault_37_job_files_that_mean_harm_or_are_wrong(quick: Path, text: str, says: str) -> None:
    """YAML bombs, unknown keys, wrong types and tags: one clear message, exit 2, nothing is run."""
    (quick / "job.yaml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "gristmill", "run", "job.yaml"], cwd=quick, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert re.search(says, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(quick)) == ["job.yaml"]


def test_fault_37_a_source_of_links(quick: Path) -> None:
    """A link to a file that is read adds nothing, one to a folder above is no endless loop, a dangling one is named."""
    victims.write_input(str(quick / "in"), 20)
    (quick / "in" / "again").symlink_to(quick / "in")
    (quick / "in" / "link.parquet").symlink_to(quick / "in" / "0.parquet")
    report = jobs.run(str(quick / "in"), str(quick / "out"), "scored", workers=0)
    assert report.rows_in == 20, "two files of 10 rows, each once, whatever names lead to it"
    (quick / "in" / "lost.parquet").symlink_to(quick / "nowhere.parquet")
    with pytest.raises(gm.BadSource, match=r"lost\.parquet"):
        jobs.run(str(quick / "in"), str(quick / "out2"), "scored", workers=0)


def test_fault_37_a_published_name_that_is_a_link(numbers: str, quick: Path) -> None:
    """A link planted under a name that will be published is not written through: what it points at stays as it is."""
    precious = quick / "precious"
    precious.write_text("mine")
    (quick / "out").mkdir()
    (quick / "out" / "part-0000000.g1.parquet").symlink_to(precious)
    with pytest.raises(gm.BadJob, match=r"part-0000000\.g1\.parquet"):
        jobs.run(numbers, str(quick / "out"), "scored", workers=0)
    assert precious.read_text() == "mine"


def test_fault_38_a_model_that_is_a_pickle(numbers: str, quick: Path) -> None:
    """It is not opened, unless allowed and pinned by the sha256 of its bytes."""

    class Harm:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(quick / "owned"),))

    path = quick / "model.pkl"
    path.write_bytes(pickle.dumps(Harm()))
    sink = gm.sink(str(quick / "out"), keep=["id"])
    pinned = {"allow_pickle": True, "sha256": hashlib.sha256(b"another").hexdigest()}
    for options in ({}, {"allow_pickle": True}, pinned):
        with pytest.raises(gm.BadJob, match=r"pickle|sha256"):
            gm.Job(numbers, SklearnModel(str(path), features=("x",), **options), sink, workers=0).run()
    assert not (quick / "owned").exists()


def test_fault_39_secrets(quick: Path) -> None:
    """A secret of a job file is nowhere in the sink or in what is printed, although the function raises it."""
    victims.write_input(str(quick / "in"), 20)
    (quick / "usercode.py").write_text(
        "def score(batch, token):\n"
        "    print('using', token)\n"
        "    if 3 in batch['id']:\n        raise ValueError('refused: ' + token)\n"
        "    return {'y': batch['x']}\n"
    )
    (quick / "job.yaml").write_text(
        "source: in\nmodel: {call: 'usercode:score', args: {token: '${env:TOKEN}'}}\nsink: {uri: out, keep: [id]}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "gristmill", "run", "job.yaml"], cwd=quick, capture_output=True, text=True, timeout=60,
        env={**os.environ, "TOKEN": "hunter2-hunter2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert gm.dead(str(quick / "out")).num_rows == 1
    assert "hunter2" not in done.stdout + done.stderr
    for path in (quick / "out").rglob("*"):
        assert path.is_dir() or b"hunter2" not in path.read_bytes(), path


WITH_TOKEN = """
import os
def score(batch, token):
    fixed = os.path.exists("fixed")
    return [
        x if fixed or x % 10 else ValueError(f"refused {token} at {x}") for x in batch["x"].tolist()
    ]
def split(row):
    return [{"x": 10 * row["x"], "text": row["text"]}, {"x": 10 * row["x"] + 1, "text": row["text"]}]
"""


@pytest.mark.parametrize("token", ["data", "copy", "1000", "null", 'q"uo\\te'])
def test_secrets_leave_what_identifies_a_row(quick: Path, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    """A secret that also stands in a path, a position or a name of a field is out of texts, and nothing else changes:
    the dead letters are JSON, say which rows they are, and are scored again once.
    """
    monkeypatch.chdir(quick)
    monkeypatch.setenv("TOKEN", token)
    monkeypatch.syspath_prepend(str(quick))
    module = f"withtoken{abs(hash(token))}"
    Path(f"{module}.py").write_text(WITH_TOKEN)
    os.mkdir("data")
    pq.write_table(pa.table({"x": range(1001), "text": [f"is {token}"] * 1001}), "data/a.parquet")
    Path("job.yaml").write_text(
        f"source: data\nsteps: [{{flat_map: '{module}:split'}}]\n"
        f"model: {{call: '{module}:score', args: {{token: '${{env:TOKEN}}'}}}}\n"
        "sink: {uri: out, keep: [x]}\ngates: {min_ok: 0}\nengine: {workers: 0}\n"
    )
    job = gm.load_job("job.yaml")
    with pytest.warns(gm.GristmillWarning):
        assert job.run().rows_dead == 1001
    lines = [json.loads(line) for path in Path("out/_dead").iterdir() for line in path.read_text().splitlines()]
    assert {(row["source"], row["position"], row["copy"]) for row in lines} == {
        (str(quick / "data/a.parquet"), n, "0") for n in range(1001)
    }
    for row in lines:
        assert row["payload"]["x"] == 10 * row["position"]
        if len(token) >= 4:
            assert token not in row["message"] + row["traceback"] + row["payload"]["text"]
    Path("fixed").touch()
    report = retry_dead(job.spec)
    assert (report.rows_ok, report.rows_dead) == (2002, 0)
    assert sorted(gm.read("out").to_table().column("x").to_pylist()) == sorted(
        10 * n + k for n in range(1001) for k in (0, 1)
    )
    assert gm.verify("out").ok


def test_secrets_leave_a_report_as_it_is(quick: Path) -> None:
    """A secret that is also the name of a field or a state leaves the report of --json whole."""
    victims.write_input(str(quick / "in"), 20)
    (quick / "usercode.py").write_text("def score(batch, a, b):\n    return {'y': batch['x']}\n")
    (quick / "job.yaml").write_text(
        "source: in\nmodel: {call: 'usercode:score', args: {a: '${env:A}', b: '${env:B}'}}\nsink: out\n"
    )
    for progress in ("off", "json"):
        done = subprocess.run(
            [sys.executable, "-m", "gristmill", "run", "job.yaml", "--json", "--restart", "--progress", progress],
            cwd=quick, capture_output=True, text=True, timeout=60, env={**os.environ, "A": "rows_ok", "B": "done"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["state"], report["rows_ok"]) == ("done", 20)
        if progress == "json":
            assert json.loads(done.stderr.splitlines()[-1])["state"] == "done"


def test_fault_40_a_pipe_that_is_closed(numbers: str, quick: Path) -> None:
    """Output into a closed pipe, or to no terminal: plain lines, no traceback, and the job is done all the same."""
    line = [
        sys.executable,
        "-m",
        "gristmill",
        "apply",
        numbers,
        str(quick / "out"),
        "--fn",
        "victims:scored",
        "--keep",
        "id",
    ]
    running = subprocess.Popen(line, cwd=processes.HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None and running.stderr is not None
    running.stdout.close()
    printed = running.stderr.read()
    running.stderr.close()
    running.wait(60)
    assert "Traceback" not in printed
    assert "\x1b[" not in printed
    oracles.nothing_lost_nothing_twice(str(quick / "out"), list(range(200)))


def test_fault_40_a_terminal_20_columns_wide(numbers: str, quick: Path) -> None:
    """A real terminal of width 20: the job is done, and no line is wider but the one that is there to be copied."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    line = [sys.executable, "-m", "gristmill", "apply", numbers, str(quick / "out"), "--fn", "victims:scored"]
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    running = subprocess.Popen(
        [*line, "--keep", "id"], cwd=processes.HERE, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 65_536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        shown += data
    os.close(ours)
    assert running.wait(60) == 0, shown.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "Traceback" not in text
    assert "200" in text
    drawn = [part for line in text.replace("\r\n", "\n").split("\n") for part in line.split("\r")]
    assert [part for part in drawn if len(part) > 20 and "gm.read(" not in part] == []
    oracles.nothing_lost_nothing_twice(str(quick / "out"), list(range(200)))


def test_values_that_none_of_the_first_rows_had(tmp_path: Path) -> None:
    """A post step whose column has no type by the first rows is told what gives it one, and that works."""
    pq.write_table(pa.table({"k": range(200), "v": [None] * 150 + [1.5] * 50}), tmp_path / "in.parquet")

    def doubled(batch: dict[str, np.ndarray]) -> dict[str, list[float | None]]:
        return {"late": [None if np.isnan(v) else v * 2 for v in batch["v"]]}

    def typed(batch: dict[str, np.ndarray]) -> dict[str, pa.Array]:
        return {"late": pa.array(doubled(batch)["late"], pa.float64())}

    made = gm.model(lambda b: {"y": b["k"]}), gm.sink(str(tmp_path / "out"))
    options = {"workers": 0, "shard_rows": 50, "gates": gm.Gates(max_nulls=1)}
    with pytest.raises(
        gm.BadOutput, match=r"'late' has values, which none of the first rows had.*pa\.array\(values, pa"
    ):
        gm.Job(str(tmp_path / "in.parquet"), *made, post=[doubled], **options).run()
    gm.Job(str(tmp_path / "in.parquet"), *made, post=[typed], **options).run(restart=True)
    assert gm.read(str(tmp_path / "out")).to_table()["late"].to_pylist() == [None] * 150 + [3.0] * 50


@pytest.mark.parametrize("where", ["model", "post"])
@pytest.mark.parametrize("how", ["restart", "update"])
def test_a_night_whose_first_rows_lack_a_column(tmp_path: Path, where: str, how: str) -> None:
    """Where all rows are scored anew, a column that the first ones lack has the type that the result gave it."""

    def late(batch: dict[str, np.ndarray], times: int = 2) -> dict[str, list[float | None]]:
        return {"late": [None if np.isnan(v) else v * times for v in batch["v"]]}

    def job(times: int) -> gm.Job:
        model = (
            gm.model(late, times=times)
            if where == "model"
            else gm.model(lambda b, times: {"n": b["k"] * times}, times=times)
        )
        return gm.Job(
            str(tmp_path / "in"), model, gm.sink(str(tmp_path / "out"), keep=["k"]), workers=0, shard_rows=50,
            gates=gm.Gates(max_nulls=1), post=[late] if where == "post" else [],
            **({"update": {"key": ["k"]}} if how == "update" else {}),
        )  # fmt: skip

    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"k": range(100), "v": [1.5] * 100}), tmp_path / "in" / "m.parquet")
    job(2).run()
    values = pa.array([None] * 150 + [2.5] * 50, pa.float64())
    pq.write_table(pa.table({"k": range(100, 300), "v": values}), tmp_path / "in" / "a.parquet")
    times = 2 if where == "post" else 3
    job(3).run(restart=how == "restart")
    read = gm.read(str(tmp_path / "out")).to_table().sort_by("k")
    assert read["late"].to_pylist() == [1.5 * times] * 100 + [None] * 150 + [2.5 * times] * 50
