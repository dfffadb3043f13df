"""What the commands say after a run that did not publish, as a person at a terminal meets it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.cli.app import gristmill
from gristmill.cli.flags import ways

Folder = Any  # conftest.Folder

SCORE = """
def score(rows):
    return [{"s": BODY} for r in rows]
"""
JOB = """
source: {uri: "in/"}
model: {call: "fn:score", batch_format: rows}
sink: {uri: "out/", keep: [id]}
engine: {workers: 0}
"""


def code(path: Path, body: str) -> None:
    """The function, with what it makes of a row `r`."""
    (path / "fn.py").write_text(SCORE.replace("BODY", body))


def day(path: Path, number: int, rows: int = 200) -> None:
    """Another file for the source."""
    (path / "in").mkdir(exist_ok=True)
    ids = range(number * rows, (number + 1) * rows)
    pq.write_table(pa.table({"id": ids, "x": [float(i) for i in ids]}), path / "in" / f"day={number}.parquet")


@pytest.fixture
def gated(folder: Any) -> Any:
    """A result of one day, and an append of the next of whose rows a tenth fails: a gate does not hold."""
    (folder.path / "job.yaml").write_text(JOB)
    code(folder.path, "r['x'] / (r['id'] < 200 or r['id'] % 10)")
    day(folder.path, 0)
    assert folder.run("run", "job.yaml").code == 0
    day(folder.path, 1)
    assert folder.run("run", "job.yaml", "--append").code == 3
    return folder


@pytest.mark.long
def test_dead_shows_the_rows_of_an_append_whose_gate_did_not_hold(gated: Any) -> None:
    """`gristmill dead` is where the gate's message points: it shows them, and says whose they are."""
    shown = gated.run("dead", "out", "--json", "--limit", "0")
    assert [json.loads(json.loads(x)["payload"])["id"] for x in shown.out.splitlines()] == list(range(200, 400, 10))
    assert "a run with --append that has not finished" in shown.err and "not in the published result" in shown.err


@pytest.mark.long
def test_fixed_code_after_an_append_whose_gate_did_not_hold(gated: Any) -> None:
    """Rows of the old code are published as they are, which runs no code: every command says so, and it works."""
    code(gated.path, "r['x'] / 2")
    for verb in (["run", "job.yaml"], ["run", "job.yaml", "--append"], ["retry-dead", "out", "--job", "job.yaml"]):
        said = gated.run(*verb)
        assert said.code in (2, 4) and "begin it anew" not in said.err
        assert "use --accept (accept=True) to publish" in said.err and "put it back" not in said.err
        assert "then retry-dead --accept-code-change" in said.err and "--restart (restart=True) to score" in said.err
    assert gated.run("run", "job.yaml", "--accept").code == 0
    assert "retry-dead --accept-code-change" in gated.run("run", "job.yaml").err
    assert gated.run("retry-dead", "out", "--job", "job.yaml", "--accept-code-change").code == 0
    assert gated.run("verify", "out").code == 0 and "no dead letters" in gated.run("dead", "out").out


@pytest.mark.long
def test_a_refused_append_is_nothing(folder: Any) -> None:
    """A plain run after an append whose rows do not fit says that files are new; without them nothing is to do."""
    (folder.path / "job.yaml").write_text(JOB)
    code(folder.path, "r['x'] if r['id'] < 200 else 'text'")
    day(folder.path, 0)
    assert folder.run("run", "job.yaml").code == 0
    day(folder.path, 1)
    for _ in range(2):
        refused = folder.run("run", "job.yaml", "--append")
        assert refused.code == 4 and "column: s was double, is string" in refused.err
    plain = folder.run("run", "job.yaml")
    assert plain.code == 4 and "is new" in plain.err and "--append" in plain.err and "column: s" not in plain.err
    assert "done and published" in folder.run("status", "out").out
    (folder.path / "in" / "day=1.parquet").unlink()
    assert "nothing to do" in folder.run("run", "job.yaml").out


def test_retry_dead_is_about_the_sink_that_is_named(sink_with_dead: Folder) -> None:
    """Copied, moved, from another folder that has a sink, a source and a module of the same names: that very sink is
    mended, by the job as it was started, and no other.
    """
    here = sink_with_dead.path
    (here / "scoring.py").write_text((here / "scoring.py").read_text().replace("== 7", "== 7000"))
    told = "--accept-code-change"
    shutil.copytree(here / "out", here / "backup")
    before = gm.status(str(here / "out"))
    assert (done := sink_with_dead.run("retry-dead", "backup", told)).code == 0 and "backup: done" in done.out, done.err
    assert (gm.dead(str(here / "backup")).num_rows, gm.dead(str(here / "out")).num_rows) == (0, 1)
    assert gm.status(str(here / "out")) == before
    other = here / "other"
    other.mkdir()
    (other / "scoring.py").write_text("def bad(batch): return {'score': batch['x'] * -1}\n")
    shutil.copy(here / "rows.parquet", other)
    shutil.copytree(here / "out", other / "out")
    (here / "out").rename(here / "moved")
    assert (done := replace(sink_with_dead, path=other).run("retry-dead", "../moved", told)).code == 0, done.err
    assert gm.dead(str(here / "moved")).num_rows == 0 and gm.dead(str(other / "out")).num_rows == 1
    assert sorted(gm.read(str(here / "moved")).to_table()["score"].to_pylist()) == list(range(60))
    assert not (here / "out").exists()


def test_retry_dead_of_what_is_not_published(folder: Folder) -> None:
    """After a gate that failed: what is missing is a result, not the job."""
    (folder.path / "scoring.py").write_text("def f(batch): return [ValueError('no')] * 30 + list(batch['x'][30:])\n")
    assert folder.apply("f", "out", "--batch-rows", "60").code == 3
    assert "nothing is published" in folder.run("retry-dead", "out").err


@pytest.mark.few(1)
@pytest.mark.parametrize("way", [("--row-id", "other"), ("--keep", "")])
def test_a_name_that_would_stand_twice(folder: Folder, way: tuple[str, str]) -> None:
    """Both ways out that the message names are taken."""
    options = {"--fn": "scoring:double", "--keep": "id", "--row-id": "id"}
    refused = folder.run("apply", "rows.parquet", "out", *(t for o in options.items() for t in o))
    assert refused.code == 2 and "--row-id NAME" in refused.err and "--keep ''" in refused.err
    options[way[0]] = way[1]
    assert folder.run("apply", "rows.parquet", "out", *(t for o in options.items() for t in o)).code == 0


def test_an_option_that_is_named_as_python_does_is_told_as_a_flag(folder: Folder) -> None:
    """What an error calls `types=` is said as this command takes it, and works so."""
    (folder.path / "mixed.jsonl").write_text('{"a": 5}\n{"a": "5"}\n')
    (folder.path / "scoring.py").write_text("def f(batch): return {'n': [len(x) for x in batch['a']]}\n")
    score = ("apply", "mixed.jsonl", "out", "--fn", "scoring:f")
    assert "types= is --set source.types.NAME=…" in (refused := folder.run(*score)).err, refused.err
    assert folder.run(*score, "--set", "source.types.a=string", "--set", "sink.keep=a").code == 0
    assert "options.names" in folder.run(*score, "--set", "source.names=x").err


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("max_cost needs a price, as input=0.40/1M and output=1.60/1M", ()),
        ("pass it as an argument (gm.model(f, (1, 2), name=value))", ()),
        ("use reset_index(drop=True), or keep=", ("keep",)),
        ("'seed=3 where=x': give a limit of at least 1 (limit=100)", ("limit",)),
        ("uses ${limit}, which is not defined: give it under vars, or with --var limit=…", ()),
        ("rows/keep=a/b.csv and limit=3/b.csv: it is empty, so where= finds nothing", ("where",)),
    ],
)
def test_only_options_are_told_as_flags(message: str, told: tuple[str, ...]) -> None:
    """No words of examples, calls, paths and quoted texts that look like one."""
    command = gristmill.get_command(click.Context(gristmill), "apply")
    assert command is not None
    assert tuple(re.findall(r"(\w+)= is --", ways(message, command.params))) == told


def test_a_limit_of_cost_names_the_flag_of_the_price(folder: Folder) -> None:
    """And no other flag that its example could be taken for."""
    refused = folder.run("prompt", "rows.parquet", "out", "--model", "m", "--prompt", "{{ id }}", "--max-cost", "5")
    assert refused.code == 2 and "--price input=0.40/1M --price output=1.60/1M" in refused.err
    assert "for this command" not in refused.err and "--output" not in refused.err


@pytest.mark.long
def test_fixed_code_after_a_first_run_whose_gate_did_not_hold(folder: Any) -> None:
    """Nothing is published yet, and the function is mended: --accept publishes what the old one scored and calls
    neither, then the dead rows alone are scored by the new one. With another source that is no way.
    """
    (folder.path / "job.yaml").write_text(JOB)
    code(folder.path, "r['x'] / (r['id'] % 10)")
    day(folder.path, 0)
    assert folder.run("run", "job.yaml").code == 3
    code(folder.path, "1 / 0")
    assert "use --accept (accept=True) to publish" in folder.run("run", "job.yaml").err
    accepted = folder.run("run", "job.yaml", "--accept")
    assert accepted.code == 0, accepted.err
    before = gm.read(str(folder.path / "out")).to_table()
    assert before.num_rows == 180
    code(folder.path, "-1.0")
    assert folder.run("retry-dead", "out", "--job", "job.yaml", "--accept-code-change").code == 0
    after = gm.read(str(folder.path / "out")).to_table()
    assert after.slice(0, 180).equals(before) and after["s"].to_pylist()[180:] == [-1.0] * 20


def test_what_was_added_and_dead_rows_of_text_are_told_as_they_stand(folder: Any) -> None:
    """A record that could not be read is shown as its line, at its byte, with what is wrong; an append says how many
    rows it has added; a source's file that was removed is not in the source any more.
    """
    (folder.path / "fn.py").write_text("def score(rows):\n    return [{'s': 1.0} for r in rows]\n")
    (folder.path / "job.yaml").write_text(JOB + "gates: {min_ok: 0.5}\n")
    (folder.path / "in").mkdir()
    (folder.path / "in" / "a.jsonl").write_text('{"id": 1}\n{"id": 9, "t": "broken\n')
    assert folder.run("run", "job.yaml").code == 0
    shown = folder.run("dead", "out").out
    told = " ".join(shown.split())  # the folder's name may be long, and lines broken
    assert "a.jsonl, byte 10" in told and '\n  {"id": 9, "t": "broken' in shown
    (message,) = gm.dead(str(folder.path / "out"))["message"].to_pylist()
    assert "Unterminated string starting at character 15 of the line" in message
    (folder.path / "in" / "b.jsonl").write_text('{"id": 3}\n{"id": 4}\n')
    assert "added 2 rows of 1 new file" in folder.run("run", "job.yaml", "--append").err
    (folder.path / "in" / "b.jsonl").unlink()
    assert "b.jsonl is no longer in the source" in folder.run("run", "job.yaml").err


def test_columns_with_commas_in_their_names_are_named_as_the_message_prints_them(folder: Any) -> None:
    """A later file has one column more: the way out is a command to copy, and with it the job is the same."""
    (folder.path / "in").mkdir()
    (folder.path / "fn.py").write_text("def f(batch):\n    return {'s': batch['zip'] * 2}\n")
    (folder.path / "in" / "1.csv").write_text('cust id,"Name, full",zip\n1,"a, b",3\n')
    apply = ("apply", "in", "out", "--fn", "fn.py:f", "--keep", '"Name, full"', "--workers", "0")
    assert folder.run(*apply).code == 0
    (folder.path / "in" / "2.csv").write_text('cust id,"Name, full",zip,extra\n2,"c, d",5,0\n')
    said = folder.run(*apply, "--append")
    assert said.code == 2
    way = re.search(r"\((--columns .*), columns=\)", said.err)
    assert way is not None and shlex.split(way[1])[1] == 'cust id,"Name, full",zip'
    assert folder.run(*apply, "--append", *shlex.split(way[1])).code == 0
    rows = gm.read(str(folder.path / "out")).to_table()
    assert (rows.column_names, rows["s"].to_pylist()) == (["Name, full", "s"], [6, 10])
