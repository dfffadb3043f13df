"""How things stand with a sink, whatever a run ended with: `status` and `report` say it in the same words, with why,
and with a command that is the right one.
"""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

import pytest

from callers import eventually

Folder = Any  # conftest.Folder
JOB = """
source: rows.parquet
model: {{call: "scoring:{function}"}}
sink: {{uri: out, keep: [id]}}
engine: {{workers: 0}}
running: {{shard_rows: 10}}
{more}
"""

HARM = """

def harm(staged):
    for name in "ab":
        with open(f"{name}.db", "wb") as out:
            out.write(b"no database " * 1000)
"""


def write(folder: Folder, function: str, more: str = "") -> None:
    (folder.path / "job.yaml").write_text(JOB.format(function=function, more=more))


def stands(folder: Folder, target: str = "job.yaml") -> dict[str, str]:
    """What `status` says, which is what `report` and its page say."""
    done = folder.run("status", target)
    assert done.code == 0, done.err
    found = dict(re.match(r"(state|why|next) +(.*)", line).groups() for line in done.out.splitlines()  # type: ignore[union-attr]
                 if re.match(r"(state|why|next) ", line))  # fmt: skip
    if (folder.path / "out" / "_gristmill").exists():
        told = folder.run("report", target)
        assert told.code == 0, told.err
        for name, text in found.items():
            assert re.search(rf"^{name} +{re.escape(text)}$", told.out, re.MULTILINE), (name, text, told.out)
        page = (
            folder.run("report", target, "-o", "-")
            .out.replace("&#39;", "'")
            .replace("&#34;", '"')
            .replace("&amp;", "&")
        )
        assert found["state"] in page and found.get("why", "")[:60] in page
    return found


def follow(folder: Folder, said: dict[str, str]) -> Any:
    """Do what `next` names."""
    command = said["next"].partition("&& gristmill ")[2]
    assert command, said
    return folder.run(*command.split())


def worse(folder: Folder) -> None:
    """Let `bad` fail on more rows than the one that is always allowed."""
    text = (folder.path / "scoring.py").read_text()
    (folder.path / "scoring.py").write_text(text.replace('(batch["x"] == 7)', '(batch["x"] % 10 == 7)'))


def test_a_job_that_cannot_run_and_has_no_sink_yet(folder: Folder) -> None:
    """Nothing is made there, and still the job's status tells what was wrong; once it runs, that is over."""
    write(folder, "double")
    os.rename(folder.path / "rows.parquet", folder.path / "other.parquet")
    assert folder.run("run", "job.yaml").code == 2
    assert not (folder.path / "out").exists()
    said = stands(folder)
    assert said["state"] == "nothing is published; the last run could not begin" and "rows.parquet" in said["why"]
    assert said["next"].startswith("mend what the message names, and run it again: cd ")
    os.rename(folder.path / "other.parquet", folder.path / "rows.parquet")
    assert follow(folder, said).code == 0
    assert stands(folder) == {"state": "done and published"}


def test_a_job_that_cannot_run_any_more(folder: Folder) -> None:
    """The result stands, and what is wrong now is told, until a run finds it well; of a row of failures the last."""
    write(folder, "double")
    assert folder.run("run", "job.yaml").code == 0
    os.rename(folder.path / "rows.parquet", folder.path / "other.parquet")
    for _ in range(3):
        assert folder.run("run", "job.yaml").code == 2
    said = stands(folder)
    assert said["state"] == "published before; the last run could not begin" and "rows.parquet" in said["why"]
    assert len(list((folder.path / "out" / "_gristmill" / "runs").iterdir())) == 2
    os.rename(folder.path / "other.parquet", folder.path / "rows.parquet")
    assert "nothing to do" in follow(folder, said).out
    assert stands(folder) == {"state": "done and published"}


def test_another_input(folder: Folder) -> None:
    """Exit 4: the message names the ways."""
    write(folder, "double")
    assert folder.run("run", "job.yaml").code == 0
    write(folder, "chatty")
    refused = folder.run("run", "job.yaml")
    assert refused.code == 4
    said = stands(folder)
    lines = [" ".join(line.split()) for line in refused.err.splitlines() if line.startswith("  ")]
    assert len(lines) > 1 and all(re.search(rf"[.:;,] {re.escape(line)}", said["why"]) for line in lines)
    assert said["state"].startswith("published before; the last run was refused") and "--restart" in said["why"]
    assert "the message names the ways" in said["next"]


def test_a_failure_that_resumes(folder: Folder) -> None:
    """Exit 1: why, in one line, and the same command."""
    write(folder, "leaky")
    assert folder.run("run", "job.yaml").code == 1
    said = stands(folder)
    assert said["state"] == "not finished; the last run failed" and "401" in said["why"]
    assert said["next"].startswith("run the job again to resume") and follow(folder, said).code == 1


def test_a_gate(folder: Folder) -> None:
    """Exit 3: which, and how it is accepted; running it again would be refused again."""
    write(folder, "bad", "gates: {min_ok: 1.0}")
    worse(folder)
    assert folder.run("run", "job.yaml").code == 3
    said = stands(folder)
    assert said["state"] == "not published: a gate did not hold" and "min_ok 1.0" in said["why"]
    assert follow(folder, said).code == 0
    assert stands(folder) == {"state": "done and published"}


@pytest.mark.long
def test_a_deadline(folder: Folder) -> None:
    """Exit 3 of a run that stops at its deadline: it goes on with --accept."""
    write(folder, "Slow", "deadline: 2s\non_deadline: stop")
    assert folder.run("run", "job.yaml", "--set", "model.args.seconds=0.1").code == 3
    said = stands(folder)
    assert said["state"] == "not published: its deadline had passed" and said["next"].startswith(
        "go on and publish late"
    )
    assert follow(folder, said).code == 0
    assert stands(folder)["state"] == "done and published"


def test_deliveries_that_fail(folder: Folder) -> None:
    """Published, but not delivered, and why for each store; whoever delivers it ends that."""
    with open(folder.path / "scoring.py", "a") as out:
        out.write(HARM)
    write(folder, "double", "audit: ['scoring:harm']\ndeliver: [{to: 'sqlite://a.db#t'}, {to: 'sqlite://b.db#t'}]")
    ended = folder.run("run", "job.yaml")
    assert ended.code == 2, ended  # files that are no databases stay so
    said = stands(folder)
    assert said["state"] == "published, but not delivered"
    assert (
        "a.db" in said["why"]
        and re.search(r"; sqlite://\S*b\.db", said["why"])
        and said["next"].startswith("mend what the message names")
    )
    for name in "ab":  # the audit does not run again
        os.unlink(folder.path / f"{name}.db")
    assert follow(folder, said).code == 0
    assert stands(folder) == {"state": "done and published"}


@pytest.mark.long
def test_a_run_that_was_killed(folder: Folder) -> None:
    """It cannot say so itself."""
    write(folder, "Slow")
    process = folder.start("run", "job.yaml", "--set", "model.args.seconds=0.1")
    eventually(lambda: json.loads(folder.run("status", "job.yaml", "--json").out).get("shards_done", 0) > 0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.communicate()
    said = stands(folder)
    assert said["state"] == "not finished; the last run ended without a word" and "it was killed" in said["why"]
    assert follow(folder, said).code == 0
    assert stands(folder) == {"state": "done and published"}


def test_alerts_name_the_way(folder: Folder) -> None:
    """What is told of a run that was held back has the command that status names."""
    worse(folder)
    write(folder, "bad", "gates: {min_ok: 1.0}\nalerts: [{command: tee -a told.jsonl}]")
    assert folder.run("run", "job.yaml").code == 3
    (told,) = [json.loads(line) for line in (folder.path / "told.jsonl").read_text().splitlines()]
    assert told["kind"] == "gate" and told["next"] == stands(folder)["next"]
