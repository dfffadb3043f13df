"""What made an answer, and the proof of it: right for every way that a row takes, and wrong as soon as anything is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.cli.app import main
from gristmill.commit.documents import Success
from gristmill.commit.publication import published
from gristmill.errors import BadKey, BadSource, PlanChanged
from gristmill.files.document import seal, unseal

COMPAT = Path(__file__).parents[1] / "compat" / "0.1.0"
ROWS, BAD = 60, 7  # rows of two files; each row whose number is BAD modulo 20 is dead


def double(batch):
    return {"twice": [2.0 * n if n % 20 != BAD else ValueError("seven") for n in batch["n"].tolist()]}


def fixed(batch):
    return {"twice": [2.0 * n for n in batch["n"].tolist()]}


def vectors(batch):
    return {"v": [[float(n), 0.0] if n % 20 != BAD else ValueError("seven") for n in batch["n"].tolist()]}


def some(row):
    return [row] if row["n"] < 3 else []


def twins(row):
    return [{"n": row["n"], "m": 0}, {"n": row["n"], "m": 1}]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Two files of rows, whose number `n` tells where each is."""
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    for half in (0, 1):
        write(half)


def write(half, folder="in", step=ROWS // 2):
    numbers = list(range(half * step, (half + 1) * step))
    langs = ["de" if n % 3 else "en" for n in numbers]
    pq.write_table(pa.table({"n": numbers, "lang": langs}), f"{folder}/{half}.parquet")


def scored(sink="out", model=double, source="in/", **options):
    sets = {"keep": ["n", "lang"], **{k: options.pop(k) for k in list(options) if k in gm.Sink.__dataclass_fields__}}
    options = {"shard_rows": 10, "gates": {"min_ok": 0.5}, "workers": 0, **options}
    verbs = {name: options.pop(name) for name in ("append", "restart") if name in options}
    with pytest.warns() if model is not fixed else pytest.MonkeyPatch.context():
        return gm.Job(source, model, gm.sink(sink, **sets), **options).run(**verbs)


def whence(proof):
    """The file and position that a proof names; None where it names several."""
    (one,) = proof.inputs if len(proof.inputs) == 1 else [None]
    return None if one is None or one.position is None else (Path(one.path).name, one.position)


def place(n):
    return f"{n // (ROWS // 2)}.parquet", n % (ROWS // 2)


ALIVE = [n for n in range(ROWS) if n % 20 != BAD]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"row_id": "id"},
        {"key": ["n"], "row_id": "id"},
        {"merge": True},
        {"files": 2},
        {"format": "jsonl"},
        {"partition_by": ["lang"], "row_id": "id"},
        {"sort_by": ["lang", "n"], "row_id": "id"},
        {"files": 1, "sort_by": ["lang", "n"], "row_id": "id"},
    ],
    ids=str,
)
@pytest.mark.few(5)
def test_each_row_is_traced_to_its_place_in_the_source(options):
    """By its number as the key, and by the place in the source: file, position and answer are the right ones."""
    scored(**options)
    for n in ALIVE[::9]:
        found = gm.prove("out", n, key="n")
        assert found.ok, str(found)
        assert (found.row["n"], found.row["twice"]) == (n, 2.0 * n)
        if not (options.get("key") and "sort_by" in options):
            assert whence(found) == place(n)
        file, position = place(n)
        again = gm.prove("out", f"in/{file}:{position}")
        assert again.ok and whence(again) == place(n)
        assert again.row == found.row
    assert gm.prove("out", f"in/{place(ALIVE[5])[0]}:{place(ALIVE[5])[1]}", source=True).ok


def test_rows_by_id_by_several_columns_and_beside_vectors():
    """A row_id is a key of its own, several columns are a tuple; of npy files the columns beside vectors are shown."""
    scored(row_id="id")
    wanted = gm.read("out").to_table().to_pylist()[11]
    found = gm.prove("out", wanted["id"])
    assert found.ok and found.row == wanted and whence(found) == place(wanted["n"])
    found = gm.prove("out", ("de", 13), key=["lang", "n"])
    assert found.ok and whence(found) == place(13)
    scored("npy", vectors, format="npy")
    found = gm.prove("npy", 13, key="n")
    assert found.ok and found.file.endswith(".npy") and whence(found) == place(13) and found.row["n"] == 13


def test_dead_rows_are_proved_by_their_place():
    """Their letter is shown, and its file is what the receipt commits."""
    scored()
    found = gm.prove("out", f"1.parquet:{47 - ROWS // 2}")
    assert found.ok and found.outcome == "dead" and found.row["error"] == "ValueError"
    assert json.loads(found.row["payload"])["n"] == 47
    with pytest.raises(BadKey, match=r"has no row 47: .* named by FILE:POSITION"):
        gm.prove("out", 47, key="n")
    with pytest.raises(BadKey, match="no row_id and no key"):
        gm.prove("out", 13)


def test_appended_and_retried_rows_name_the_run_that_scored_them():
    """Three generations in one root: each row is proved by its own, and retried ones by the retry and its code."""
    job = scored()
    of_first = published(str(Path("out").resolve())).body
    first = of_first.root
    time.sleep(max(0.0, 1.1 - time.time() % 1))  # times of publishing are in seconds
    write(2)
    scored(append=True)
    assert gm.prove("out", 65, key="n").run.generation == 2
    assert gm.prove("out", 65, key="n").run.published > of_first.published
    assert gm.prove("out", 13, key="n").run.published == of_first.published
    retry = gm.Job("in/", fixed, gm.sink("out", keep=["n", "lang"]), shard_rows=10, gates={"min_ok": 0.5}, workers=0)
    gm.retry_dead(retry, accept_code_change=True)
    assert gm.verify("out").ok and job.rows_dead == 3
    body = published(str(Path("out").resolve())).body
    assert [s.generation for s in body.sealed] == [1, 2, 3] and body.root != first
    for n, generation in ((13, 1), (65, 2), (47, 3), (87, 3)):
        found = gm.prove("out", n, key="n")
        assert found.ok, str(found)
        assert found.run.generation == generation
        assert whence(found) == (f"{n // 30}.parquet", n % 30)
        file, position = whence(found)
        assert gm.prove("out", f"{file}:{position}").row == found.row
    assert gm.prove("out", 47, key="n").code != gm.prove("out", 13, key="n").code


def test_rows_that_steps_made_are_traced_by_their_id():
    """A copy of a row has its place; without an id the ranges that the shard read are shown, and a note says why."""
    scored("ids", fixed, steps=[gm.flat_map(twins)], row_id="id", keep=["n", "m"])
    for row in gm.read("ids").to_table().to_pylist()[::31]:
        found = gm.prove("ids", row["id"])
        assert found.ok and whence(found) == place(row["n"])
    scored("none", fixed, steps=[gm.flat_map(twins)], keep=["n", "m"])
    found = gm.prove("none", (13, 1), key=["n", "m"])
    assert found.ok and whence(found) is None
    assert found.inputs[0].ranges == ((10, 20),) and "steps may have made" in found.notes[0]


def test_positions_in_text_are_known_if_the_source_is_read():
    """Records of CSV begin at bytes: without the source the range is told, with it the byte."""
    Path("rows.csv").write_text("n,lang\n" + "".join(f"{n},de\n" for n in range(30)))
    scored(source="rows.csv")
    found = gm.prove("out", 13, key="n")
    assert found.ok and whence(found) is None and "--source" in found.notes[0]
    found = gm.prove("out", 13, key="n", source=True)
    assert found.ok and whence(found) == ("rows.csv", Path("rows.csv").read_text().index("13,de"))
    assert gm.prove("out", f"rows.csv:{whence(found)[1]}", source=True).row["n"] == 13


# ---------------------------------------------------------------- what was changed


def first(pattern):
    return sorted(Path("out").glob(pattern))[0]


def resealed(path, change):
    """A document with other content, and the checksum of that."""
    body = unseal(path.read_bytes(), str(path))
    change(body)
    path.unlink()  # no other name of the file is written to
    path.write_bytes(seal(body))


def of_part(**values):
    def change(body):
        body["parts"][0].update(values)

    return change


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(bytes(data))


CHANGES = {
    "receipt": lambda: resealed(first("_gristmill/g0001-*/receipts/0000001.json"), lambda b: b.update(nonce="other")),
    "another receipt": lambda: resealed(
        first("_gristmill/g0001-*/receipts/0000004.json"), lambda b: b["errors"].update(Other=1)
    ),
    "part of a receipt": lambda: resealed(first("_gristmill/g0001-*/receipts/0000001.json"), of_part(sha256="0" * 64)),
    "model of the plan": lambda: resealed(
        first("_gristmill/g0001-*/plan.json"), lambda b: b["model"].update(name="a better one")
    ),
    "root": lambda: (
        resealed(first("_gristmill/published/*.json"), lambda b: b.update(root="0" * 64)),
        shutil.copy(first("_gristmill/published/*.json"), "out/_SUCCESS"),
    ),
    "_SUCCESS": lambda: resealed(Path("out/_SUCCESS"), lambda b: b.update(rows_ok=1)),
    "part": lambda: flip(first("part-0000001.g1.parquet")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_was_changed_is_no_proof(what, capsys):
    """With checksums that fit: exit 4, and a line says what is wrong; `verify` finds it, too."""
    scored()
    assert main(["prove", "out", "--row", "13", "--key", "n"]) == 0
    capsys.readouterr()
    CHANGES[what]()
    assert main(["prove", "out", "--row", "13", "--key", "n"]) == 4
    told = capsys.readouterr()
    assert "WRONG" in told.out or "nothing can be proved" in told.err
    assert not gm.verify("out").ok


def test_what_is_damaged_is_no_proof(capsys):
    """Documents that do not read back, or are gone: exit 4, naming them."""
    for what in ("receipts/0000001.json", "plan.json"):
        scored()
        path = first(f"_gristmill/g0001-*/{what}")
        path.write_bytes(path.read_bytes()[:-30])
        assert main(["prove", "out", "--row", "13", "--key", "n"]) == 4, what
        told = capsys.readouterr()
        assert "WRONG" in told.out or "cannot be read" in told.err
        shutil.rmtree("out")


def test_a_root_that_was_kept_elsewhere_unmasks_a_whole_other_result():
    """A result that was made again, all of whose digests fit, has another root than the one that was kept."""
    scored()
    root = published(str(Path("out").resolve())).body.root
    assert gm.prove("out", 13, key="n", root=root.upper()).ok
    shutil.rmtree("out")
    scored(model=fixed)
    found = gm.prove("out", 13, key="n", root=root)
    assert not found.ok
    assert [c.what for c in found.checks if not c.ok] == ["root"]
    assert gm.prove("out", 13, key="n").ok


def test_a_source_that_was_changed_is_told(capsys):
    """`--source` reads what the shard read: another value is no proof, and neither is a file that is gone."""
    scored()
    table = pq.read_table("in/0.parquet")
    pq.write_table(table.set_column(0, "n", pa.array([*range(29), 99])), "in/0.parquet")
    assert gm.prove("out", 13, key="n").ok
    assert gm.prove("out", 13, key="n", source=True).ok  # what this shard read of it is there
    assert main(["prove", "out", "--row", "0.parquet:25", "--source"]) == 4
    assert "does not hold what shard 2" in capsys.readouterr().out
    Path("in/0.parquet").unlink()
    assert not gm.prove("out", 13, key="n", source=True).ok


def test_the_proof_as_json_leads_to_the_root_by_itself(capsys):
    """Whoever has the receipt's digest climbs to the root by the hashes in the JSON, with nothing of ours."""
    from hashlib import sha256

    scored()
    capsys.readouterr()
    assert main(["prove", "out", "--row", "13", "--key", "n", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)

    def climb(leaf, steps):
        at = sha256(b"\0" + leaf.encode()).digest()
        for step in steps:
            other = bytes.fromhex(step["hash"])
            at = sha256(b"\1" + (at + other if step["side"] == "right" else other + at)).digest()
        return at.hex()

    path = told["path"]
    own = path["generation"]
    assert climb(path["receipt"], path["receipt_steps"]) == climb(path["plan"], path["plan_steps"]) == own["root"]
    top = f"generation {own['generation']} {own['leaves']} {own['root']}"
    assert climb(top, path["generation_steps"]) == told["root"]
    receipt = first(f"_gristmill/g0001-*/receipts/{told['shard']:07d}.json")
    assert path["receipt"] == f"shard {told['shard']} {json.loads(receipt.read_text())['checksum']}"


# ---------------------------------------------------------------- results of other versions and runs


def test_results_without_a_root_are_read_and_verified_and_not_proved(monkeypatch):
    """An earlier version's sink has none: everything is shown and compared, and exit 4 says that nothing is proved."""
    kept = Path("kept").resolve()
    shutil.copytree(COMPAT, kept, copy_function=shutil.copy)
    monkeypatch.chdir(kept)
    assert published(str(kept / "sinks" / "parquet")).body.root is None
    assert gm.verify("sinks/parquet").ok
    some = gm.read("sinks/parquet").to_table().to_pylist()[3]
    found = gm.prove("sinks/parquet", some["n"], key="n")
    assert [c.told for c in found.checks if not c.ok] == ["the result has none: it was published by an earlier version"]
    assert found.row == some and found.root is None


def test_an_append_to_a_result_without_a_root_has_one_over_both():
    """The generations of an earlier version are read again, once."""
    scored()
    for path in (first("_gristmill/published/*.json"), Path("out/_SUCCESS")):
        resealed(path, lambda body: (body.pop("root"), body.pop("sealed")))
    assert gm.verify("out").ok and not gm.prove("out", 13, key="n").ok
    write(2)
    scored(append=True)
    assert gm.verify("out").ok
    assert gm.prove("out", 13, key="n").ok and gm.prove("out", 65, key="n").ok


def test_a_run_that_was_killed_and_resumed_has_the_root_of_all_its_shards(tmp_path):
    """Receipts of both runs are under one root."""
    script = (
        "import os, gristmill as gm\n"
        "def late(batch):\n"
        "    if 42 in batch['n'].tolist() and not os.path.exists('again'):\n"
        "        open('again', 'w').close(); os.kill(os.getpid(), 9)\n"
        "    return {'twice': [2.0 * n for n in batch['n'].tolist()]}\n"
        "gm.Job('in/', late, gm.sink('out', keep=['n']), shard_rows=10, workers=0).run()\n"
    )
    Path("run.py").write_text(script)
    assert subprocess.run([sys.executable, "run.py"], capture_output=True).returncode == -9
    assert not Path("out/_SUCCESS").exists()
    subprocess.run([sys.executable, "run.py"], check=True, capture_output=True)
    assert gm.verify("out").ok
    for n in (3, 42, 59):
        assert gm.prove("out", n, key="n").ok


def test_a_result_that_is_reduced_or_indexed_later_keeps_its_root():
    """What is made of the rows is not part of it."""
    scored()
    root = published(str(Path("out").resolve())).body.root
    scored(index=["n"])
    body = published(str(Path("out").resolve())).body
    assert body.index is not None and body.root == root
    assert gm.prove("out", 13, key="n").ok and gm.verify("out").ok


def test_the_result_before_the_latest_is_proved_as_long_as_it_stands(capsys):
    """`SINK@1` after a restart; with the next but one its files are gone, which is told."""
    scored()
    scored(restart=True, model=fixed)
    assert gm.prove("out@1", 13, key="n").ok and gm.prove("out/@1", 13, key="n").run.generation == 1
    with pytest.raises(BadKey):
        gm.prove("out@1", 47, key="n")
    assert gm.prove("out@2", 47, key="n").ok
    scored(restart=True)
    with pytest.raises(BadSource, match="the files of generation 1 are gone"):
        gm.prove("out@1", 13, key="n")
    with pytest.raises(BadSource, match="generation 9: there are 1, 2, 3"):
        gm.prove("out@9", 13, key="n")


def test_a_result_record_of_a_later_format_is_no_older_one():
    """The fields of the root are optional, so that earlier formats read: none is written where there is none."""
    scored()
    body = json.loads(Path("out/_SUCCESS").read_text())
    assert body["root"] and body["sealed"][0]["leaves"] == 7
    body.pop("checksum")
    assert Success.load(seal({k: v for k, v in body.items() if k not in ("root", "sealed")}), "x").root is None


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ({"where": "n < 3"}, {}),
        ({}, {"steps": [gm.filter("n < 3")]}),
        ({}, {"steps": [gm.flat_map(some)]}),
        ({}, {"on_null": "skip", "model": gm.model(fixed, takes={"n": "int64", "lang": "string not null"})}),
    ],
    ids=["where", "filter", "flat_map", "skip"],
)
def test_a_row_that_may_have_been_left_out_is_not_proved(source, options, capsys):
    """`FILE:POSITION` of a row that has no answer proves nothing: it is unknown, or none where ids tell that."""
    pq.write_table(pa.table({"n": range(8), "lang": [None if n == 5 else "de" for n in range(8)]}), "in.parquet")
    how = {"model": fixed, "shard_rows": 50, "workers": 0, "gates": {"min_ok": 0}, **options}
    model = how.pop("model")
    for sink in (gm.sink("plain", keep=["n"]), gm.sink("ids", keep=["n"], row_id="id")):
        gm.Job(gm.source("in.parquet", **source), model, sink, **how).run()
    found = gm.prove("plain", "in.parquet:5")
    assert (found.ok, found.outcome, found.row) == (False, "unknown", None)
    assert "row: it is one of the " in str(found) and str(found).endswith("NOT proved")
    assert main(["prove", "plain", "--row", "in.parquet:5"]) == 4
    if "flat_map" not in str(options):
        with pytest.raises(BadKey, match="has no row"):
            gm.prove("ids", "in.parquet:5")
    there = gm.prove("ids", "in.parquet:1")
    assert there.ok and there.outcome == "answer" and there.row["n"] == 1


def test_only_rows_that_are_there_are_found():
    """Two rows of one key, and a position beyond the file, are told."""
    scored()
    with pytest.raises(BadKey, match="several rows have lang = "):
        gm.prove("out", "de", key="lang")
    with pytest.raises(BadKey, match="has no row"):
        gm.prove("out", "0.parquet:99")
    assert issubclass(PlanChanged, Exception)
