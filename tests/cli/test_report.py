"""`gristmill report`: of sinks at every stage of their life, to a file, to the terminal and as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pytest

from callers import eventually
from gristmill.cli.execute import typed
from gristmill.job.job import JobSpec, Sink, Source
from gristmill.job.specs import Call, FunctionModel

Folder = Any  # conftest.Folder


def told(folder: Folder, sink: str = "out") -> dict[str, Any]:
    """What is known of a sink."""
    done = folder.run("report", sink, "--format", "json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def test_a_report_of_what_is_published(sink_with_dead: Folder) -> None:
    """One file, with what was run, counts, the error with its row, and the command; the terminal says the same."""
    done = sink_with_dead.run("report", "out", "-o", "report.html")
    assert (done.code, done.out) == (0, "")
    html = (sink_with_dead.path / "report.html").read_text()
    text = sink_with_dead.run("report", "out").out
    for part in ("seven is not allowed", "rows.parquet:7", "59", "ValueError", "gristmill apply rows.parquet out"):
        assert part in html and part in text, part
    assert "call: scoring:bad" in html.replace("&#39;", "") and list(sink_with_dead.path.glob("*.tmp")) == []
    found = told(sink_with_dead)
    assert [(kind["error"], kind["rows"]) for kind in found["kinds"]] == [("ValueError", 1)]
    (run,) = found["runs"]
    assert (run["state"], run["rows"], run["rows_dead"], run["exit_code"]) == ("done", 60, 1, 0)
    assert run["rows_per_second"] > 0 and all(worker["rows_per_second"] > 0 for worker in run["per_worker"])
    assert sum(worker["rows"] for worker in run["per_worker"]) == 60 and run["pace"][-1][1] == 60
    assert run["slowest"][0]["source"].endswith("rows.parquet") and run["folder"] == str(sink_with_dead.path)


def test_generations_beside_each_other(folder: Folder) -> None:
    """The last ten, with their counts, in order; a run with nothing to do is none."""
    for number in range(12):
        assert folder.apply("double", "out", "--restart", "--limit", str(number + 1)).code == 0
    assert folder.apply("double", "out", "--limit", "12").out.startswith("out: nothing to do")
    found = told(folder)
    assert [night["rows_ok"] for night in found["nights"]] == list(range(3, 13))
    assert len(found["runs"]) == 12


def test_a_gate_that_did_not_hold(folder: Folder) -> None:
    """The report says so, with the dead letters that are why, although nothing is published."""
    worse = (
        "def worse(batch):\n    if (batch['x'] % 4 == 0).any():\n"
        "        raise ValueError('<script>')\n    return {'s': batch['x']}\n"
    )
    (folder.path / "scoring.py").write_text(worse)
    assert folder.apply("worse").code == 3
    found = told(folder)
    assert (found["state"], found["nights"], found["runs"][-1]["state"]) == ("unfinished", [], "gate failed")
    assert [(kind["error"], kind["rows"]) for kind in found["kinds"]] == [("ValueError", 15)]
    html = folder.run("report", "out", "--format", "html").out
    assert "<script" not in html and "&lt;script&gt;" in html and "Not published: a gate did not hold" in html


@pytest.mark.long
def test_a_run_that_was_killed(folder: Folder) -> None:
    """Its record says that it was, and the next one goes on."""
    arguments = (
        "apply", "rows.parquet", "out", "--fn", "scoring:Slow", "--arg", "seconds=0.05", "--keep", "id",
        "--workers", "1", "--set", "running.shard_rows=5",
    )  # fmt: skip
    process = folder.start(*arguments)
    assert eventually(lambda: list(folder.path.glob("out/_gristmill/*/receipts/*.json")), 60)
    while_it_runs = told(folder)
    assert while_it_runs["state"] == "running" and while_it_runs["runs"][-1]["state"] == "running"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert eventually(lambda: told(folder)["state"] == "unfinished", 30)
    (run,) = told(folder)["runs"]
    assert run["state"] == "killed" and "ended without a word" in run["error"]
    shown = folder.run("report", "out").out
    assert "killed: the run that began" in shown and "0.00 s" not in shown
    page = folder.run("report", "out", "--format", "html").out
    assert ">killed</span>" in page and ">0.00 s<" not in page
    assert folder.run(*arguments).code == 0
    assert [run["state"] for run in told(folder)["runs"]] == ["killed", "done"]


def test_no_secret_of_the_command_line_is_recorded(folder: Folder) -> None:
    """Neither one whose name says so, wherever it stands, nor one in an address; the rest of the command is kept."""
    (folder.path / "scoring.py").write_text("def f(batch, size=1): return {'y': batch['x']}\n")
    (folder.path / "job.yaml").write_text(
        "vars: {token: x, size: 1}\nsource: rows.parquet\nmodel: {call: 'scoring:f', args: {size: '${size}'}}\n"
        "sink: {uri: out/, keep: [id]}\nengine: {workers: 0}\n"
    )
    arguments = (
        "--var",
        "token=s3cr3t-token",
        "--var",
        "size=3",
        "--alert",
        "https://me:s3cr3t@127.0.0.1:1/s3cr3t-path",
    )
    assert folder.run("run", "job.yaml", *arguments).code == 0
    (run,) = told(folder)["runs"]
    assert run["command"] == [
        "gristmill", "run", "job.yaml", "--var", "token=***", "--var", "size=3", "--alert", "https://127.0.0.1:1",
    ]  # fmt: skip
    (folder.path / "scoring.py").write_text("def f(batch, size=1, token=''): return {'y': batch['x']}\n")
    assert folder.apply("f", "two", "--arg", "token=s3cr3t-token").code == 0
    assert told(folder, "two")["runs"][0]["command"] == []
    held = [p for p in folder.path.rglob("_gristmill/**/*") if p.is_file() and b"s3cr3t" in p.read_bytes()]
    assert held == []


def test_a_command_can_be_typed_again(folder: Folder) -> None:
    """What only sounds like a secret stays as it was typed, in flags, arguments, variables and paths of the job: the
    command that is told runs as it stands.
    """
    (folder.path / "scoring.py").write_text("def f(batch, **args): return {'y': batch['x']}\n")
    (folder.path / "job.yaml").write_text(
        "vars: {token_set: x, monkey: y}\nsource: rows.parquet\nsink: {uri: out/, keep: [id]}\nengine: {workers: 0}\n"
        "model: {call: 'scoring:f', args: {set: '${token_set}', animal: '${monkey}'}}\nupdate: {key: [x]}\n"
    )
    arguments = (
        "run", "job.yaml", "--var", "token_set=a", "--var=monkey=b", "--set", "model.args.max_tokens=3",
        "--set", "model.args.tokenizer=bert", "--set", "update.key=id",
    )  # fmt: skip
    assert folder.run(*arguments).code == 0
    (run,) = told(folder)["runs"]
    assert run["command"] == ["gristmill", *arguments]
    assert folder.run(*run["command"][1:]).code == 0
    assert (folder.path / "out/_gristmill/job.yaml").exists()
    assert folder.apply("f", "two", "--arg", "max_tokens=3", "--arg", "tokenizer=bert").code == 0
    assert [w for w in told(folder, "two")["runs"][0]["command"] if "=" in w] == ["max_tokens=3", "tokenizer=bert"]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (["--max-tokens", "9", "--tokens-per-minute", "9", "--batch-tokens=64"], None),
        (["--key", "id,day", "--on-null", "keep"], None),
        (["--key=id"], None),
        (["--set", "deliver.0.key=id", "--set", "source.key=id"], None),
        (["--request", "stop_token_ids=[1]", "--where", "token_set = 'a'"], None),
        (["--where", "key=5", "--prompt", "token: {x} = ?"], None),
        (["--limit", "5", "days/key=5/a.parquet", "key=5/b.parquet"], None),
        (["--var", "api_key=s3cr3t=="], ["--var", "api_key=***"]),
        (["--var=hf_token=s3cr3t"], ["--var=hf_token=***"]),
        (["--set", "model.api_key=s3cr3t"], ["--set", "model.api_key=***"]),
        (["--set=source.storage.key=s3cr3t"], ["--set=source.storage.key=***"]),
        (["--token", "s3cr3t", "--api-key=s3cr3t"], ["--token", "***", "--api-key=***"]),
        (["--deliver", "redis://me:s3cr3t@host:1/0#a"], ["--deliver", "redis://host:1/0#a"]),
    ],
)
def test_what_is_told_of_a_command(said: list[str], shown: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only values of secrets are left out: also where name and value are one word, or the value has an = in it."""
    monkeypatch.setattr(sys, "argv", ["gristmill", "run", "job.yaml", *said])
    spec = JobSpec(Source(("rows.parquet",)), FunctionModel(Call("scoring:f")), Sink("out/"))
    assert typed(spec) == ("gristmill", "run", "job.yaml", *(said if shown is None else shown))


def test_what_is_no_sink(folder: Folder) -> None:
    """An error with the way out, as for the other commands; a file that cannot be written, too."""
    done = folder.run("report", "nowhere")
    assert done.code == 2 and "there is no such sink" in done.err
    folder.apply("double")
    done = folder.run("report", "out", "-o", "no/such/report.html")
    assert done.code == 2 and "-o no/such/report.html: cannot be written: No such file or directory" in done.err


def test_dead_letters_that_are_gone(sink_with_dead: Folder) -> None:
    """They are counted all the same, and the report says that they cannot be read."""
    for path in sink_with_dead.path.glob("out/**/*.jsonl*"):
        path.unlink()
    found = told(sink_with_dead)
    assert found["kinds"][0]["rows"] == 1 and found["kinds"][0]["examples"] == []
    assert "is gone" in found["letters"] and "is gone" in sink_with_dead.run("report", "out").out
