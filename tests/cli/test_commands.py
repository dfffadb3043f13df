"""Commands as a person runs them: what they print, what they leave, and the exit codes of the contract."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm

Folder = Any  # conftest.Folder


def figure(out: str, label: str) -> int:
    """A figure of a report, by the name of its line."""
    line = next(line for line in out.splitlines() if line.strip().startswith(label))
    return int(line.strip()[len(label) :].split()[0].replace(",", ""))


# ---------------------------------------------------------------- the main way


def test_a_job_from_command_to_files(folder: Folder) -> None:
    """apply, its report, its rows; and again: nothing to do, exit 0."""
    done = folder.apply("double", "out", "--arg", "factor=3")
    assert done.code == 0, done.err
    assert figure(done.out, "rows in") == figure(done.out, "ok") == 60 and "gm.read('out')" in done.out
    assert "running: 0 of 60 rows" in done.err
    table = gm.read(str(folder.path / "out")).to_table()
    assert table.column_names == ["id", "score"] and table["score"].to_pylist() == [3.0 * i for i in range(60)]
    again = folder.apply("double", "out", "--arg", "factor=3")
    assert again.code == 0 and "nothing to do" in again.out


def test_two_workers_import_the_current_folder(folder: Folder) -> None:
    """As with python -m, also in the workers."""
    done = folder.run("apply", "rows.parquet", "out", "--fn", "scoring:double", "--workers", "2")
    assert done.code == 0 and "2 workers" in done.out


def test_a_module_that_makes_arrow_arrays_of_pandas_columns(folder: Folder) -> None:
    """A driver that imports it to describe the job reads an empty cell as everybody else does."""
    code = (
        "import pandas as pd, pyarrow as pa\nNAMES = pa.array(pd.Series(['a', None, float('nan')], dtype=object))\n\n"
    )
    code += "def score(batch):\n    return {'nulls': batch['x'] * 0 + NAMES.null_count}\n"
    (folder.path / "naming.py").write_text(code)
    told = ("apply", "rows.parquet", "out", "--fn", "naming:score", "--workers", "1")
    assert (done := folder.run(*told)).code == 0, done.err
    assert gm.read(str(folder.path / "out")).to_table()["nulls"].to_pylist() == [2.0] * 60
    script = "import gristmill as gm, naming\nprint(gm.Job('rows.parquet', naming.score, 'out').run().state)"
    same = subprocess.run([sys.executable, "-c", script], cwd=folder.path, capture_output=True, text=True, timeout=60)
    assert same.stdout == "nothing to do\n", same.stderr


def test_a_function_of_a_file(folder: Folder) -> None:
    """`--fn FILE.py:NAME`, wherever the file is: its folder is importable, also by workers, and its edits are seen."""
    (folder.path / "lib").mkdir()
    code = "from near import factor\n\n\ndef score(batch):\n    return {'score': batch['x'] * factor}\n"
    (folder.path / "lib" / "score.py").write_text(code)
    (folder.path / "lib" / "near.py").write_text("factor = 2.0\n")
    told = ("apply", "rows.parquet", "out", "--fn", "lib/score.py:score", "--workers", "2")
    assert (done := folder.run(*told)).code == 0, done.err
    assert gm.read(str(folder.path / "out")).to_table()["score"].to_pylist() == [2.0 * i for i in range(60)]
    assert folder.run(*told).code == 0
    (folder.path / "lib" / "near.py").write_text("factor = 3.0\n")
    assert folder.run(*told).code == 4
    assert folder.run(*told[:4], "lib/scor.py:score").err.count("there is no such file") == 1
    (folder.path / "os.py").write_text(code)
    assert "rename the file" in folder.run(*told[:4], "os.py:score").err


def test_other_arguments_are_refused_with_the_difference_unless_restarted(folder: Folder) -> None:
    """Exit 4; --restart is the way out that the message names."""
    assert folder.apply("double").code == 0
    refused = folder.apply("double", "out", "--arg", "factor=3")
    assert refused.code == 4 and refused.err.count("Traceback") == 0 and "--restart" in refused.err
    assert folder.apply("double", "out", "--arg", "factor=3", "--restart").code == 0
    assert gm.read(str(folder.path / "out")).to_table()["score"].to_pylist()[1] == 3.0


def test_preview_prints_rows_and_leaves_nothing(folder: Folder) -> None:
    """Plain where there is no terminal; JSON lines on request."""
    done = folder.apply("double", "out", "--preview", "3")
    assert done.code == 0 and not (folder.path / "out").exists()
    assert [line.split() for line in done.out.splitlines()[1:]] == [
        ["id", "score"], ["--", "-----"], ["0", "0"], ["1", "2"], ["2", "4"],
    ]  # fmt: skip
    rows = folder.apply("double", "out", "--preview", "2", "--json", "--progress", "off")
    assert [json.loads(line) for line in rows.out.splitlines()] == [{"id": 0, "score": 0.0}, {"id": 1, "score": 2.0}]
    assert rows.err == ""


def test_a_saved_job_runs_the_same(folder: Folder) -> None:
    """--save, then run: the sink says that there is nothing to do."""
    done = folder.apply("double", "out", "--arg", "factor=3", "--where", "x < 10", "--save", "job.yaml")
    assert done.code == 0 and figure(done.out, "ok") == 10
    again = folder.run("run", "job.yaml")
    assert again.code == 0 and "nothing to do" in again.out
    assert folder.apply("double", "out", "--arg", "factor=3", "--where", "x < 10", "--save", "job.yaml").code == 0
    other = folder.apply("double", "out2", "--save", "job.yaml")
    assert other.code == 2 and "has other content" in other.err
    assert folder.apply("double", "out3", "--where", "nothing = 1", "--save", "other.yaml").code == 2
    assert folder.apply("double", "out3", "--where", "id = 1", "--save", "other.yaml").code == 0
    assert (
        folder.apply("double", "out", "--arg", "factor=3", "--where", "x < 10", "--append", "--save", "a.yaml").code
        == 0
    )
    assert "\non_new_files: append\n" in (folder.path / "a.yaml").read_text()


def test_jobs_in_files(folder: Folder) -> None:
    """job.yaml with a variable and a profile, FILE.py, FILE.py:NAME and MODULE:NAME."""
    (folder.path / "job.yaml").write_text(
        "vars: {n: 5}\nsource: {uri: rows.parquet, limit: '${n}'}\nmodel: {call: 'scoring:double'}\n"
        "sink: 'out-${n}/'\nengine: {workers: 0}\nprofiles: {all: {source: {limit: null}}}\n"
    )
    assert figure(folder.run("run", "job.yaml", "--var", "n=7").out, "rows in") == 7
    assert folder.run("run", "job.yaml", "--profile", "all", "--var", "n=8").code == 0
    assert gm.read(str(folder.path / "out-8")).count_rows() == 60
    (folder.path / "pipe.py").write_text(
        "import gristmill as gm\nfrom scoring import double\n"
        "job = gm.Job(gm.source('rows.parquet', limit=3), double, 'p1', workers=0)\n"
        "def mine(batch): return {'y': batch['x']}\n"
        "two = gm.Job('rows.parquet', mine, 'p2', workers=1)\n"
    )
    assert figure(folder.run("run", "pipe.py").out, "rows in") == 3
    assert figure(folder.run("run", "pipe.py:two").out, "rows in") == 60
    assert "nothing to do" in folder.run("run", "pipe:two").out


def test_a_plan_says_what_the_sink_holds(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, an unfinished run, all rows, new files, a result of another job; it changes none of it."""
    monkeypatch.chdir(folder.path)
    (folder.path / "in").mkdir()
    shutil.copy("rows.parquet", "in/a.parquet")

    def told(fn: str = "double", **options: Any) -> str:
        return gm.Job("in", f"scoring.py:{fn}", "held", workers=0, shard_rows=10, **options).plan().sink

    def run(fn: str = "double") -> gm.Report:
        return gm.Job("in", f"scoring.py:{fn}", "held", workers=0, shard_rows=10, gates={"min_ok": 1}).run()

    assert told() == ""
    with pytest.raises(gm.GateFailed):
        run("bad")
    assert re.fullmatch(r"an unfinished run, \d of 6 shards done, which the next run .* resumes", told("bad"))
    shutil.rmtree("held")
    run()
    assert told() == "all rows are published: there is nothing to do"
    assert "a result of a different job, so that a run is refused: code: " in told("bad")
    shutil.copy("rows.parquet", "in/b.parquet")
    assert told() == "a result, and 1 new file since: --append scores these alone"
    assert told(on_new_files="append").endswith("1 new file since: a run scores these alone")
    before = sorted(map(str, folder.path.rglob("held/**/*")))
    (folder.path / "job.yaml").write_text("source: in\nmodel: {call: 'scoring.py:double'}\nsink: held\n")
    assert "\nsink     a result, and 1 new file since" in folder.run("plan", "job.yaml").out
    assert sorted(map(str, folder.path.rglob("held/**/*"))) == before


def test_plan_and_schema_from_python(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the commands have and print them, of a job or its file."""
    monkeypatch.chdir(folder.path)
    (folder.path / "job.yaml").write_text(
        "source: rows.parquet\nmodel: {call: 'scoring:double'}\nsink: planned/\nrunning: {shard_rows: 7}\n"
    )
    job = gm.load_job("job.yaml")
    told = json.loads(folder.run("plan", "job.yaml", "--json").out)
    for view in (gm.plan("job.yaml"), gm.plan(job), job.plan()):
        assert (view.rows, view.shards) == (told["rows"], told["shards"]) == (60, 9)
        assert str(view) == folder.run("plan", "job.yaml").out.rstrip("\n")
    job.run()
    assert str(gm.verify("planned")) == folder.run("verify", "planned").out.rstrip("\n")
    assert json.loads(folder.run("schema").out) == gm.schema()


# ---------------------------------------------------------------- mistakes

MISTAKES = [
    ((), 2, "Usage: gristmill"),
    (("emebd",), 2, "no command 'emebd': did you mean 'embed'? (gristmill --help)"),
    (("embed", "a", "b"), 2, "missing option '--model'"),
    (("apply", "rows.parquet", "--fn", "scoring:double"), 2, "missing SOURCE or SINK: name the rows, then"),
    (("apply", "rows.parquet", "out", "--fn", "scoring:double", "--kep", "id"), 2, "--kep"),
    (("apply", "rows.parqet", "out", "--fn", "scoring:double"), 2, "rows.parquet"),
    (("apply", "rows.parquet", "out", "--fn", "scoring:duble"), 2, "scoring:duble"),
    (("apply", "rows.parquet", "out", "--fn", "scorring:double"), 2, "scorring"),
    (("apply", "rows.parquet", "out", "--fn", "double"), 2, "callable 'double': write it as MODULE:NAME"),
    (
        ("apply", "rows.parquet", "out", "--fn", "m.joblib"),
        2,
        "write model: {sklearn: m.joblib} in a job file, or gm.Skl",
    ),
    (("apply", "rows.parquet", "out", "--fn", "scoring:double", "--keep", "idd"), 2, "idd"),
    (("apply", "rows.parquet", "out", "--fn", "scoring:double", "--where", "y > 1"), 2, "y"),
    (
        ("apply", "rows.parquet", "out", "--fn", "scoring:double", "--row-id", "r", "--key", "nope"),
        2,
        "key names column 'nope'",
    ),
    (("apply", "rows.parquet", "out", "--fn", "scoring:double", "--batch-timeout", "0"), 2, "batch_timeout is 0"),
    (("apply", "rows.parquet", "out", "--fn", "scoring:double", "--workers", "3-1"), 2, "workers is 3-1"),
    (("apply", "rows.parquet", "out", "--fn", "scoring:double", "--steps-workers", "-1"), 2, "steps_workers is -1"),
    (("apply", "rows.parquet", "scoring.py", "--fn", "scoring:double"), 2, "scoring.py"),
    (("embed", "rows.parquet", "out", "--text", "t", "--model", "no/such"), 2, "no/such"),
    (("run", "jbo.yaml"), 2, "jbo.yaml: there is no such job file"),
    (("run", "what"), 2, "what: not a job"),
    (("status", "nowhere"), 2, "nowhere: there is no such sink"),
    (("dead", "nowhere"), 2, "nowhere: there is no such sink"),
    (("verify", "nowhere"), 2, "nowhere: there is no such sink"),
    (("retry-dead", "nowhere"), 2, "nowhere: there is no such sink"),
    (("run", "job.yaml", "--profile", "a", "--profile", "b"), 2, "--profile is given 2 times (a, b): give one"),
    (("status", "out", "--var", "a=1", "--profile", "x"), 2, "out is a sink; --var and --profile only apply to a job"),
    (("verify", "out", "--set", "sink.uri=b"), 2, "out is a sink; --set only app"),
    (
        ("apply", "rows.parquet", "out", "--fn", "scoring:double", "--preview", "2", "--append"),
        2,
        "--preview and --append",
    ),
    (
        ("apply", "rows.parquet", "out", "--fn", "scoring:double", "--set", "source.types.id=string"),
        2,
        "no option types: Parquet files have types of their own",
    ),
]


@pytest.mark.parametrize(("arguments", "code", "said"), MISTAKES, ids=[" ".join(m[0]) or "nothing" for m in MISTAKES])
def test_a_mistake_is_one_message_without_a_traceback(
    folder: Folder, arguments: tuple[str, ...], code: int, said: str
) -> None:
    """On stderr, with the value; nothing was run and no sink is left."""
    done = folder.run(*arguments, "--progress", "off") if arguments[:1] == ("apply",) else folder.run(*arguments)
    assert (done.code, "Traceback" in done.err) == (code, False), done.err
    assert said in done.err
    assert done.out == ""
    assert not list(folder.path.glob("out/*.parquet"))


FAILING = """
from concurrent.futures import ThreadPoolExecutor

def deep(batch):
    try:
        inner(batch)
    except KeyError as error:
        raise ValueError("no rate") from error

def inner(batch):
    raise KeyError("rate")

def threads(batch):
    return next(ThreadPoolExecutor(1).map(inner, [batch]))

class Broken:
    def __init__(self):
        raise OSError("no weights")
    def __call__(self, batch):
        return batch
"""


@pytest.mark.parametrize(
    ("name", "own", "more"),
    [
        ("deep", ["deep", "inner", "deep"], ()),
        ("threads", ["threads", "inner"], ()),
        ("Broken", ["__init__"], ()),
        ("deep", ["deep", "inner", "deep"], ("--preview", "3")),
    ],
)
def test_a_failure_shows_the_users_frames(folder: Folder, name: str, own: list[str], more: tuple[str, ...]) -> None:
    """A function that fails on every row, or a class that cannot be made, is told with the frames of its own module,
    and what these call; --debug shows those of this package, too.
    """
    (folder.path / "failing.py").write_text(FAILING)
    arguments = ("apply", "rows.parquet", "out", "--fn", f"failing:{name}", "--progress", "off", *more)
    done = folder.run(*arguments)
    frames = [line.split(", in ")[1] for line in done.err.splitlines() if "failing.py" in line and "File" in line]
    assert (done.code, frames) == (1, own)
    assert "/gristmill/" not in done.err and done.err.count("Traceback") == len(done.err.split("direct cause"))
    assert "/gristmill/worker/" in folder.run(*arguments, "--debug").err


def test_debug_shows_the_traceback(folder: Folder) -> None:
    """By flag or by environment."""
    wrong = ("apply", "rows.parqet", "out", "--fn", "scoring:double")
    assert "Traceback" in folder.run(*wrong, "--debug").err
    assert "Traceback" in folder.run(*wrong, env={"GRISTMILL_DEBUG": "1"}).err


def test_a_gate_that_does_not_hold_is_exit_3_with_the_report(folder: Folder) -> None:
    """Nothing is published; --accept publishes after a person has looked."""
    done = folder.apply("bad", "out", "--min-ok", "1")
    assert done.code == 3 and "min_ok" in done.err and not list(folder.path.glob("out/*.parquet"))
    accepted = folder.apply("bad", "out", "--min-ok", "1", "--accept")
    assert accepted.code == 0 and figure(accepted.out, "dead") == 1


@pytest.mark.parametrize("rows", [10, 60], ids=["early", "at the end"])
def test_a_person_can_look_after_a_gate_has_failed(folder: Folder, rows: int) -> None:
    """The message and status say how: the letters, though nothing is published, and the way out."""
    shape = ("--min-ok", "1", "--shard-rows", str(rows))
    failed = folder.apply("bad", "out", *shape)
    assert failed.code == 3 and "gristmill dead out shows them; --accept, accept=True, publishes" in failed.err
    looked = folder.run("dead", "out")
    assert looked.code == 0 and "rows.parquet:7\n  ValueError: seven is not allowed\n" in looked.out
    assert looked.err.count("\n") == 1 and "nothing is published" in looked.err
    text = folder.run("status", "out").out
    assert "a gate did not hold" in text and "gristmill dead out shows them; --accept, accept=True, publishes" in text


# ---------------------------------------------------------------- looking at a sink


def test_dead_letters_are_readable(sink_with_dead: Folder) -> None:
    """Where the row stood, what was wrong, what it held; counted by error; as JSON."""
    listed = sink_with_dead.run("dead", "out")
    assert listed.code == 0 and "rows.parquet:7\n  ValueError: seven is not allowed\n  {" in listed.out
    assert "Traceback" in sink_with_dead.run("dead", "out", "--traceback").out
    by = sink_with_dead.run("dead", "out", "--by", "error")
    assert [line.split()[:2] for line in by.out.splitlines()[-1:]] == [["ValueError", "1"]]
    row = json.loads(sink_with_dead.run("dead", "out", "--json").out)
    assert row["position"] == 7 and json.loads(row["payload"])["x"] == 7.0
    assert json.loads(sink_with_dead.run("dead", "out", "--by", "error", "--json").out)["rows"] == 1


def test_no_dead_letters_is_said(folder: Folder) -> None:
    """An empty answer is an answer."""
    assert folder.apply("double").code == 0
    assert folder.run("dead", "out").out == "out: no dead letters\n"


def test_an_engine_that_there_is_not_is_told_also_where_nothing_is_to_do(sink_with_dead: Folder) -> None:
    """Exit 2 with what was meant, before the sink is looked at; so from Python."""
    done = sink_with_dead.apply("bad", "out", "--engine", "rey")
    assert done.code == 2 and "must be one of local, ray, spark; did you mean 'ray'?" in done.err, done.err
    with pytest.raises(gm.BadJob, match="engine 'dask': it must be one of local, ray, spark"):
        gm.Job("rows.parquet", len, "out", engine="dask")


def test_status_of_a_finished_sink(sink_with_dead: Folder) -> None:
    """For a person and as JSON; by the sink or by the job."""
    text = sink_with_dead.run("status", "out").out
    assert "done and published" in text and "60: 59 ok, 1 dead, 0 filtered" in text
    now = json.loads(sink_with_dead.run("status", "out", "--json").out)
    assert now["state"] == "done" and now["rows_ok"] == 59
    (sink_with_dead.path / "j.yaml").write_text("source: x\nmodel: {call: 'm:f'}\nsink: out\n")
    assert json.loads(sink_with_dead.run("status", "j.yaml", "--json").out) == now


@pytest.mark.long
def test_status_while_a_run_goes(folder: Folder) -> None:
    """From another terminal: running, with counts that grow, of how many, and who holds it."""
    slow = ("--arg", "seconds=0.5", "--batch-rows", "5", "--shard-rows", "10", "--workers", "1", "--limit", "100")
    running = folder.start("apply", "rows.parquet", "out", "--fn", "scoring:Slow", *slow)
    try:
        seen = []
        deadline = time.monotonic() + 60
        while running.poll() is None and time.monotonic() < deadline:
            if (folder.path / "out").exists():
                now = json.loads(folder.run("status", "out", "--json").out)
                seen.append((now["state"], now.get("phase"), now.get("rows_done", 0)))
                text = folder.run("status", "out").out
                early = re.search(r"\nphase +(planning|loading)\n", text)  # no row is scored then
                assert not (early and "\nrows" in text), text
                if now.get("rows_done", 0) > 0 and now["state"] == "running":
                    assert "rows_in" not in now  # nobody knows yet
                    told = re.search(r"\nrows +\d+ of 60: \d+ ok, 0 dead, 0 filtered\n", text)
                    assert told or "done and published" in text, text
                    second = folder.run("apply", "rows.parquet", "out", "--fn", "scoring:Slow", *slow)
                    if running.poll() is None:
                        assert second.code == 75, second.err
                    break
        assert ("running", "running") in {(state, phase) for state, phase, _ in seen}, seen
    finally:
        _, err = running.communicate(timeout=60)
    assert running.returncode == 0, err


def test_verify_names_what_was_changed(sink_with_dead: Folder) -> None:
    """Exit 0 as published, exit 1 with the file's name after a bit has flipped (fault 36)."""
    assert sink_with_dead.run("verify", "out").code == 0
    part = next(Path(sink_with_dead.path / "out").glob("part-*.parquet"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    wrong = sink_with_dead.run("verify", "out")
    assert wrong.code == 1 and part.name in wrong.out
    assert json.loads(sink_with_dead.run("verify", "out", "--json").out)["ok"] is False


def test_dead_letters_are_scored_again_after_a_fix(sink_with_dead: Folder) -> None:
    """The job is remembered in the sink; other code is refused until it is accepted."""
    source = sink_with_dead.path / "scoring.py"
    source.write_text(source.read_text().replace("== 7", "== 7000"))
    refused = sink_with_dead.run("retry-dead", "out")
    assert refused.code == 4 and "--accept-code-change" in refused.err
    done = sink_with_dead.run("retry-dead", "out", "--accept-code-change")
    assert done.code == 0 and figure(done.out, "ok") == 60
    assert sorted(gm.read(str(sink_with_dead.path / "out")).to_table()["id"].to_pylist()) == list(range(60))


@pytest.mark.long
@pytest.mark.parametrize("first", ["python", "command"])
def test_a_script_and_the_command_on_it_are_one_job(folder: Folder, first: str) -> None:
    """Run in either order, or again for dead rows only: the functions are the script's own."""
    (folder.path / "job.py").write_text(
        "import os\nimport gristmill as gm\n\n"
        "def f(batch):\n    if not os.path.exists('mended') and (batch['x'] == 7).any():\n"
        "        raise ValueError('seven')\n    return {'y': batch['x'] * 2}\n\n"
        "job = gm.Job('rows.parquet', f, gm.sink('out', keep=['id']), workers=0)\n"
        "if __name__ == '__main__':\n    job.run()\n"
    )
    command = str(Path(sysconfig.get_path("scripts"), "gristmill"))

    def ended(*arguments: str) -> int:
        done = subprocess.run(arguments, cwd=folder.path, capture_output=True, text=True, timeout=120)
        assert done.returncode in (0, 2), done.stderr
        return done.returncode

    orders = [
        (sys.executable, "job.py"),
        (command, "run", "job.py"),
        (sys.executable, "-m", "gristmill", "run", "job.py"),
    ]
    for words in orders if first == "python" else reversed(orders):
        ended(*words)
    assert folder.run("dead", "out").out.count("seven") >= 1
    (folder.path / "mended").touch()
    ended(command, "retry-dead", "out", "--job", "job.py")
    assert gm.read(str(folder.path / "out")).count_rows() == 60


def test_retry_dead_wants_the_job_of_this_very_sink(sink_with_dead: Folder) -> None:
    """Another job's is refused by name; a sink that Python wrote needs --job."""
    (sink_with_dead.path / "j.yaml").write_text("source: x\nmodel: {call: 'm:f'}\nsink: elsewhere\n")
    refused = sink_with_dead.run("retry-dead", "out", "--job", "j.yaml")
    assert refused.code == 2 and "it has the sink elsewhere" in refused.err
    (sink_with_dead.path / "out/_gristmill/job.yaml").unlink()
    assert "give it with --job JOB" in sink_with_dead.run("retry-dead", "out").err


def test_a_condition_leaves_no_noise(folder: Folder) -> None:
    """DuckDB, which evaluates it, complains on stderr of what is left of it when the interpreter ends."""
    ended = folder.apply("double", "out", "--where", "id > 5")
    assert figure(ended.out, "ok") == 54
    assert "leaked" not in ended.err


def test_a_plan_says_what_would_run(folder: Folder) -> None:
    """Rows, bytes, null counts, columns; nothing is written; estimates say that they are."""
    rows = pa.table({"id": [1, None, 3], "x": [1.0, 2.0, 3.0]})
    pq.write_table(rows, folder.path / "nulls.parquet")
    (folder.path / "j.yaml").write_text(
        "source: nulls.parquet\nmodel: {call: 'scoring:double'}\nsink: {uri: out, keep: [id]}\n"
    )
    text = folder.run("plan", "j.yaml").out
    assert (
        "rows     3\n" in text
        and "nulls    id: 1" in text
        and "writes   id: int64, and what scoring:double returns" in text
    )
    assert not (folder.path / "out").exists()
    view = json.loads(folder.run("plan", "j.yaml", "--json").out)
    assert view["rows"] == 3 and view["rows_estimated"] is False and view["nulls"]["id"] == 1
    (folder.path / "rows.jsonl").write_text('{"x": 1}\n' * 1000)
    guessed = folder.run("plan", "j.yaml", "--set", "source.uri=rows.jsonl", "--keep", "x")
    assert "about" in guessed.out and "estimated" in guessed.out, guessed


def test_a_plan_shows_only_what_is_read(folder: Folder) -> None:
    """Of columns that are neither named nor in a condition, neither types nor null counts."""
    rows = pa.table({"id": [1, 2], "x": [1.0, None], "lang": ["en", None], "text": [None, "b"]})
    pq.write_table(rows, folder.path / "in.parquet")
    (folder.path / "j.yaml").write_text(
        "source: {uri: in.parquet, columns: [id, x], where: \"lang = 'en'\"}\n"
        "model: {call: 'scoring:double'}\nsink: {uri: out, keep: [id]}\n"
    )
    text = folder.run("plan", "j.yaml").out
    assert (
        "reads    id: int64, x: double, lang: string\n" in text and "nulls    lang: 1, x: 1, in the files\n" in text
    ), text


# ---------------------------------------------------------------- output and its ends


def test_json_everywhere_for_programs(folder: Folder) -> None:
    """--progress json gives JSON lines that end in the report; --json gives the report on stdout; --log keeps lines."""
    done = folder.apply("bad", "out", "--progress", "json", "--json", "--log", "log.jsonl")
    events = [json.loads(line) for line in done.err.splitlines()]
    assert events[0]["event"] == "progress" and events[-1]["event"] == "report" and events[-1]["rows_dead"] == 1
    assert json.loads(done.out)["rows_ok"] == 59
    logged = [json.loads(line) for line in (folder.path / "log.jsonl").read_text().splitlines()]
    assert {"progress"} <= {item["event"] for item in logged}
    assert folder.run("apply", "rows.parquet", "o2", "--fn", "scoring:double", "--workers", "0", "--json",
                      env={"GRISTMILL_PROGRESS": "off"}).err == ""  # fmt: skip


def test_prints_of_user_code_are_shown(folder: Folder) -> None:
    """Beside the progress lines, on stderr, from a worker's process."""
    done = folder.run("apply", "rows.parquet", "out", "--fn", "scoring:loud", "--workers", "1")
    assert done.code == 0 and "scoring 59" in done.err and "scoring" not in done.out.replace("scoring:loud", "")


def test_a_flood_of_prints_is_no_deadlock(folder: Folder) -> None:
    """Fault 24: the run ends although nobody reads its stderr for a while."""
    rows = pa.table({"id": list(range(20_000)), "x": [float(i) for i in range(20_000)]})
    pq.write_table(rows, folder.path / "many.parquet")
    running = folder.start("apply", "many.parquet", "out", "--fn", "scoring:loud", "--workers", "1")
    time.sleep(1)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 0, err[-500:]


@pytest.mark.few(1)
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(folder: Folder, closed: str) -> None:
    """Launchers close them: the command does what it does, and no file of the result stands where they were."""
    (folder.path / "prints.py").write_text(
        "import os\ndef score(batch):\n    os.write(1, b'x')\n    os.write(2, b'x')\n    return {'y': batch['id']}\n"
    )
    pq.write_table(pa.table({"id": range(300)}), folder.path / "rows.parquet")
    gristmill = f"{sys.executable} -m gristmill"
    for command in (f"apply rows.parquet out --fn prints.py:score --keep id {{}} {closed}", f"status out {closed}"):
        for more in ("", "--workers 0") if "apply" in command else ("",):
            done = subprocess.run(f"{gristmill} {command.format(more)}", shell=True, cwd=folder.path, timeout=60)
            assert done.returncode == 0, (command, more)
    assert gm.read(str(folder.path / "out")).to_table()["y"].to_pylist() == list(range(300))
    assert gm.verify(str(folder.path / "out")).ok


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_pipe_ends_quietly(folder: Folder, stream: str) -> None:
    """`| head`: no traceback, no complaint of the interpreter's, and the run is published (fault 40)."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(folder.path / "other", "w") as other:
        streams = {"stdout": other, "stderr": other, stream: writing}
        running = folder.start("apply", "rows.parquet", "out", "--fn", "scoring:loud", "--workers", "1", **streams)
        os.close(writing)
        assert running.wait(timeout=60) == 0
    said = (folder.path / "other").read_text()
    assert "Traceback" not in said and "BrokenPipe" not in said
    assert gm.read(str(folder.path / "out")).count_rows() == 60


def test_a_listing_cut_by_head_ends_quietly(folder: Folder) -> None:
    """More than a pipe holds, to a reader that leaves."""
    (folder.path / "scoring.py").write_text(
        "def most_bad(batch):\n    assert (batch['x'] < 3).all(), 'x' * 3000\n    return {'y': batch['x']}\n"
    )
    assert folder.apply("most_bad", "out2", "--min-ok", "0").code == 0
    running = folder.start("dead", "out2", "--json", "--limit", "0")
    assert running.stdout.read(10)
    running.stdout.close()
    assert running.wait(timeout=30) == 0
    assert running.stderr.read() == ""
    running.stderr.close()


@pytest.mark.few(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_a_run_that_can_be_resumed(folder: Folder, number: int, code: int) -> None:
    """130 and 143, in words; the same command goes on (fault 26)."""
    slow = ("apply", "rows.parquet", "out", "--fn", "scoring:Slow", "--arg", "seconds=0.03", "--batch-rows", "2",
            "--shard-rows", "8", "--workers", "1")  # fmt: skip
    running = folder.start(*slow)
    deadline = time.monotonic() + 60
    while not list(folder.path.glob("out/_gristmill/*/receipts/*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(number)
    _, err = running.communicate(timeout=30)
    assert running.returncode == code, err
    assert "again" in err and "Traceback" not in err
    done = folder.run(*slow)
    assert done.code == 0 and "were done before" in done.out


def test_a_job_with_a_secret_as_it_is_is_not_remembered(folder: Folder) -> None:
    """A token typed on the command line is not copied into the sink (fault 39)."""
    (folder.path / "scoring.py").write_text("def f(batch, token, size): return {'y': batch['x']}\n")
    assert folder.apply("f", "out", "--arg", "token=s3cr3t-t0ken", "--arg", "size=3").code == 0
    for path in (folder.path / "out").rglob("*"):
        assert not path.is_file() or b"s3cr3t" not in path.read_bytes(), path
    assert "give it with --job" in folder.run("retry-dead", "out").err


@pytest.mark.long
def test_a_value_of_the_environment_that_is_an_argument_is_part_of_the_job(folder: Folder) -> None:
    """Refused where it changed, without being kept; that of a credential of the storage is none of its matter."""
    (folder.path / "job.yaml").write_text(
        "source: {uri: rows.parquet, storage: {token: '${env:TOKEN}'}}\nengine: {workers: 0}\n"
        "steps: [{map: 'scoring:stepped', args: {by: 'n${env:STEP}'}}]\n"
        "model: {call: 'scoring:f', args: {given: {by: ['${env:THRESHOLD}']}}}\nsink: {uri: out, keep: [id]}\n"
    )
    (folder.path / "scoring.py").write_text(
        "def stepped(batch, by): return {**batch, 'x': batch['x'] + int(by[1:])}\n"
        "def f(batch, given): return {'y': batch['x'] * float(given['by'][0])}\n"
    )
    env = {"TOKEN": "t", "STEP": "771", "THRESHOLD": "880055"}
    assert folder.run("run", "job.yaml", env=env).code == 0
    again = folder.run("run", "job.yaml", env={**env, "TOKEN": "another"})
    assert again.code == 0 and "nothing to do" in again.out
    for name, place in (("STEP", "steps[0]: value of n${env:STEP}"), ("THRESHOLD", "model: value of ${env:THRESHOLD}")):
        for verb in ((), ("--append",)):
            changed = folder.run("run", "job.yaml", *verb, env={**env, name: "990066"})
            assert changed.code == 4 and f"{place} (argument" in changed.err and "changed" in changed.err
    assert folder.run("run", "job.yaml", "--restart", env={**env, "THRESHOLD": "990066"}).code == 0
    assert "nothing to do" in folder.run("run", "job.yaml", env={**env, "THRESHOLD": "990066"}).out
    assert folder.run("run", "job.yaml", env=env).code == 4
    stored = [p.read_bytes() for p in (folder.path / "out").rglob("*") if p.is_file() and "_gristmill" in p.parts]
    assert any(b"scrypt " in part for part in stored)
    assert not any(value in part for part in stored for value in (b"880055", b"990066", b"n771"))


def test_the_order_of_a_mapping_in_an_argument_is_part_of_the_job(folder: Folder) -> None:
    """Rules that are tried in their order: refused in another one; the job that a sink keeps for retry-dead has it as
    it was written.
    """
    (folder.path / "rules.py").write_text(
        "import os\n\n\ndef first(batch, rules):\n"
        "    if not os.path.exists('mended') and 'text 7' in batch['t'].tolist():\n        raise ValueError('seven')\n"
        "    return {'label': [next(of for word, of in rules.items() if word in t) for t in batch['t'].tolist()]}\n"
    )
    text = (
        "source: rows.parquet\nmodel: {call: 'rules:first', args: {rules: {text: a word, '7': a figure}}}\n"
        "sink: {uri: out, keep: [id]}\nengine: {workers: 0}\n"
    )
    (folder.path / "job.yaml").write_text(text)
    assert folder.run("run", "job.yaml").code == 0
    assert "nothing to do" in folder.run("run", "job.yaml").out
    (folder.path / "other.yaml").write_text(
        text.replace("{text: a word, '7': a figure}", "{'7': a figure, text: a word}")
    )
    refused = folder.run("run", "other.yaml")
    assert refused.code == 4 and "argument rules of first changed" in refused.err
    (folder.path / "mended").touch()
    assert (done := folder.run("retry-dead", "out")).code == 0, done.err
    found = gm.read(str(folder.path / "out")).to_table()
    assert found.num_rows == 60 and set(found["label"].to_pylist()) == {"a word"}


def test_secrets_are_nowhere(folder: Folder) -> None:
    """Not in plan, receipts, report, log, dead letters or errors, though the function was given it (fault 39)."""
    (folder.path / "job.yaml").write_text(
        "source: {uri: rows.parquet, storage: {token: '${env:TOKEN}'}}\nengine: {workers: 0}\n"
        "running: {log: log.jsonl}\n"
        "model: {call: 'scoring:leaky', args: {token: '${env:TOKEN}'}}\nsink: out\n"
    )
    done = folder.run("run", "job.yaml", "--progress", "json", "--debug", env={"TOKEN": "s3cr3t-t0ken"})
    assert done.code != 0
    assert "s3cr3t" not in done.out + done.err
    for path in folder.path.rglob("*"):
        assert not path.is_file() or b"s3cr3t" not in path.read_bytes(), path
    missing = folder.run("run", "job.yaml")
    assert missing.code == 2 and "needs the environment variable TOKEN" in missing.err


@pytest.mark.long
def test_status_adds_up(folder: Folder) -> None:
    """A step that makes one row many has two sums; a run that was stopped is told by its receipts, as shards are."""
    code = "def two(row): return [] if row['id'] % 3 else [{'n': 0}, {'n': 1}]\ndef f(b): return {'y': b['id']}\n"
    (folder.path / "fn.py").write_text(code)
    steps = "steps: [{flat_map: 'fn:two'}, {filter: 'n = 0 or id < 6'}]\n"
    (folder.path / "job.yaml").write_text(f"source: rows.parquet\n{steps}model: {{call: 'fn:f'}}\nsink: out\n")
    assert (done := folder.run("run", "job.yaml")).code == 0, done.err
    out = folder.run("status", "out").out
    assert re.search(r"rows +60: 60 went on, 0 dead, 0 filtered\n", out), out
    assert re.search(r"made +40: 22 ok, 0 dead, 18 filtered\n", out), out
    assert folder.apply("bad", "gated", "--shard-rows", "7", "--min-ok", "1").code == 3
    now = gm.status(str(folder.path / "gated"))
    for said in (folder.path / "gated").rglob("progress.json"):  # as a run leaves it that was killed before it said any
        said.unlink()
    assert (told := folder.run("status", "gated")).code == 0 and re.search(r"\nrows +\d+: \d+ ok", told.out), told
    assert (
        now["rows_done"] == now["rows_ok"] + now["rows_dead"] == min(60, 7 * now["shards_done"])
        and now["rows_dead"] == 1
    )


@pytest.mark.long
def test_predict_by_the_suffix_of_a_saved_model(folder: Folder) -> None:
    """An estimator, a graph; another suffix is told, with what to use for it."""
    import pyarrow.parquet as pq
    import skops.io
    from sklearn.linear_model import LinearRegression

    rows = pq.read_table(folder.path / "rows.parquet").to_pandas()
    model = LinearRegression().fit(rows[["x"]], rows["x"] * 3 + 1)
    skops.io.dump(model, folder.path / "line.skops")
    done = folder.run("predict", "rows.parquet", "out", "--model", "line.skops", "--keep", "id", "--workers", "0")
    assert done.code == 0, done.err
    found = gm.read(str(folder.path / "out")).to_table().sort_by("id")
    assert found["prediction"].to_pylist() == pytest.approx((rows["x"] * 3 + 1).tolist())
    refused = folder.run("predict", "rows.parquet", "two", "--model", "line.bin")
    assert refused.code == 2 and "one of .onnx, .pt" in refused.err and "apply is for functions" in refused.err
    refused = folder.run("predict", "rows.parquet", "two", "--model", "line.skops", "--features", "y")
    assert refused.code == 2 and "also has y" in refused.err


def test_nulls_of_a_plan_are_those_of_the_files(folder: Folder) -> None:
    """Where a job reads some of the rows, the plan and the note about NaN say that nulls were counted in the files."""
    rows = pa.table({"id": [1, 2, 3], "x": [1.0, None, None]})
    pq.write_table(rows, folder.path / "nulls.parquet")
    (folder.path / "j.yaml").write_text("source: nulls.parquet\nmodel: {call: 'scoring:double'}\nsink: {uri: out}\n")
    whole = folder.run("plan", "j.yaml").out
    assert "nulls    x: 2\n" in whole and "x has 2 nulls: " in whole
    for some in ("--limit=1", "--sample=1"):
        text = folder.run("plan", "j.yaml", some).out
        assert "nulls    x: 2, in the files\n" in text and "x has 2 nulls in the files: " in text
    assert "nulls    x: 2, in the files\n" in folder.run("plan", "j.yaml", "--where", "x > 0").out


def test_forms_of_returns_and_price(folder: Folder) -> None:
    """A JSON Schema is taken as it is typed; two prices in one are refused with the way to give both."""
    common = ("rows.parquet", "facts", "--prompt", "{{ id }}", "--model", "m", "--base-url", "http://127.0.0.1:9/v1")
    twice = folder.run("prompt", *common, "--price", "input=1/1M,output=2/1M")
    assert twice.code == 2 and "give each alone: --price input=0.40/1M --price output=1.60/1M" in twice.err
    listed = folder.run("prompt", *common, "--returns", '{"type": "array", "items": {"type": "string"}}')
    assert listed.code == 2 and "the schema is of array: an answer is an object" in listed.err, listed
    broken = folder.run("prompt", *common, "--returns", '{"type"')
    assert broken.code == 2 and "is no JSON" in broken.err and "or @FILE" in broken.err


def test_a_warning_of_a_lookup_is_shown_as_others_are(folder: Folder) -> None:
    """In one line, without the file and the line of our code that Python tells."""
    rows = 100_001  # over these a lookup without an index is slow enough to be told
    pq.write_table(pa.table({"id": range(rows), "x": [1.0] * rows}), folder.path / "rows.parquet")
    assert folder.apply("double").code == 0
    found = folder.run("lookup", "out", "5", "--key", "id")
    assert found.code == 0 and '"score": 2.0' in found.out
    assert re.match("warning: .*out: no index, so that its files are read for each lookup by id: ", found.err)
    assert found.err.count("\n") == 1
