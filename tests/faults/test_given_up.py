"""Every command in every state of an unfinished generation: it ends, or is refused with advice that helps. No state is
left in which a command is refused for ever, and nothing of what was given up stays in the sink.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jobs
import oracles
import pyarrow.parquet as pq
import pytest
import victims
from recording import Harm, Recorded

import gristmill as gm
from gristmill.commit import publication
from gristmill.driver.opening import Verbs
from gristmill.driver.run import finish, retry_dead, run
from gristmill.errors import GristmillError
from gristmill.result.verify import verify
from gristmill.sinks.formats import sink_format

KINDS = ("new", "restart", "append", "retry")
STAGES = {
    "claimed": Harm(at=0, kind="ENOSPC", ops=("create",), path="plan.json"),
    "planned": Harm(at=0, kind="ENOSPC", ops=("create",), path="/receipts/", times=999),
    "some receipts": Harm(at=1, kind="ENOSPC", ops=("create",), path="/receipts/", times=999),
    "gate failed": None,
    "linked": Harm(at=0, kind="ENOSPC", ops=("create",), path="/published/"),
}
CHANGES = ("nothing", "code", "options", "file added", "file removed", "file changed")
VERBS = ("run", "append", "restart", "retry")


@dataclass(frozen=True)
class Case:
    """An unfinished generation of a kind, the stage at which its run ended, what is changed then, the next command."""

    kind: str
    stage: str
    change: str
    verb: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.stage}; {self.change}; {self.verb}"


CASES = [
    Case(*case)
    for case in itertools.product(KINDS, STAGES, CHANGES, VERBS)
    if case[:2] != ("retry", "gate failed")  # no gate holds for a retry
]


class Scene:
    """A sink, its source, and a job whose rows 3 and 13 are dead."""

    def __init__(self, folder: Path) -> None:
        self.source, self.root, self.folder = str(folder / "in"), str(folder / "out"), folder
        os.makedirs(self.source)
        self.put("a", range(10))
        self.put("b", range(10, 20))
        self.newest, self.rows = "b", range(10, 20)
        self.job: dict[str, Any] = {"args": {"bad": [3, 13]}}
        self.undo: list[Any] = []
        self.count = 0

    def put(self, name: str, rows: range) -> None:
        """A file of the source."""
        pq.write_table(victims.table(len(rows), rows.start), os.path.join(self.source, f"{name}.parquet"))

    def command(self, verb: str, *, accept: bool = False, min_ok: float = 0.0, harm: Harm | None = None) -> str:
        """Run it; "" where it ended well, else what it was refused with."""
        self.count += 1
        spec = jobs.job(
            self.source, gm.sink(self.root, keep=["id"], **self.job.get("sink", {})), "scored", self.job["args"],
            workers=0, shard_rows=4, gates={"min_ok": min_ok},
        ).spec  # fmt: skip
        said: dict[str, bool] = {"restart": verb == "restart", "append": verb == "append", "accept": accept}
        try:
            if harm is not None:
                verbs = Verbs(**said, retry=verb == "retry")
                finish(spec, verbs, files=Recorded(str(self.folder / f"journal{self.count}"), harm))
            elif verb.startswith("retry"):
                retry_dead(spec, accept_code_change=verb == "retry, accepting")
            else:
                run(spec, **said)
            return ""
        except GristmillError as e:
            return f"{type(e).__name__}: {e}"

    def begun(self, kind: str, stage: str) -> None:
        """A run that does not come to its end."""
        if kind != "new":
            assert self.command("run") == ""
        if kind == "append":
            self.put("c", range(20, 30))
            self.newest, self.rows = "c", range(20, 30)
            self.job = {"args": {"bad": [3, 13, 23]}} if stage == "gate failed" else self.job
        if kind == "append" and stage == "gate failed":
            shutil.rmtree(self.root)
            os.rename(os.path.join(self.source, "c.parquet"), self.folder / "c")
            assert self.command("run") == ""
            os.rename(self.folder / "c", os.path.join(self.source, "c.parquet"))
        verb = {"new": "run"}.get(kind, kind)
        told = self.command(verb, min_ok=1.0 if stage == "gate failed" else 0.0, harm=STAGES[stage])
        assert told.startswith("GateFailed" if stage == "gate failed" else "RunFailed"), told

    def changed(self, change: str) -> None:
        """What happens before the next command, and how a person puts it back."""
        path, before, job = os.path.join(self.source, f"{self.newest}.parquet"), self.folder / "before", self.job
        shutil.copy2(path, before)
        if change == "code":
            self.job = {"args": {"bad": [4]}}
        elif change == "options":
            self.job = {**self.job, "sink": {"row_id": "rid"}}
        elif change == "file added":
            self.put("d", range(30, 40))
        elif change == "file removed":
            os.unlink(path)
        elif change == "file changed":
            self.put(self.newest, range(self.rows.start, self.rows.start + 7))

        def back() -> None:
            self.job = job
            shutil.copy2(before, path)
            if change == "file added":
                os.unlink(os.path.join(self.source, "d.parquet"))

        self.undo.append(back)

    def followed(self, verb: str, chance: random.Random) -> list[str]:
        """Give a command, and do what each refusal advises, until one is well: after two refusals at most."""
        told: list[str] = []
        while answer := self.command(verb, accept=bool(told) and "--accept," in told[-1]):
            assert answer not in told, f"refused twice with the same, whose advice was followed: {answer}"
            told.append(answer)
            assert len(told) <= 2, told
            verb = self._advised(answer, verb, chance)
        return told

    def _advised(self, answer: str, verb: str, chance: random.Random) -> str:
        ways = {
            r"--append \(": "append",
            r"--restart \(": "restart",
            r"or .*retry-dead to ": "retry",
            r"--accept-code-change": "retry, accepting",
            r"use run to go on|run the job again|run again": "run",
            r"put it back": verb,
        }
        answer = re.sub(r"put it back(, then [^,]*)+", "put it back", answer)  # the first of several steps
        found = [way for pattern, way in ways.items() if re.search(pattern, answer)]
        assert found, f"no way out is told: {answer}"
        way = chance.choice(found)
        if way == verb and "put it back" in answer:
            self.undo.pop()()
        return way

    def ids(self) -> list[int]:
        """Of all rows of the source."""
        return sorted(i for p in Path(self.source).iterdir() for i in pq.read_table(p)["id"].to_pylist())

    def sound(self) -> None:
        """A glob finds what gm.read does, verify agrees, and no row is there twice."""
        assert publication.latest(self.root) is not None
        verdict = verify(self.root, sink_format("parquet"))
        assert verdict.ok, verdict.lines
        read = gm.read(self.root).to_table(columns=["id"])["id"].to_pylist()
        seen = [i for p in Path(self.root).glob("*.parquet") for i in pq.read_table(p)["id"].to_pylist()]
        assert sorted(seen) == sorted(read)
        both = read + oracles.dead_ids(self.root)
        assert len(set(both)) == len(both)


def played(case: Case, folder: Path, seed: int) -> None:
    """One case from its beginning to a sink of which nothing is left to do."""
    chance, scene = random.Random(f"{case} {seed}"), Scene(folder)
    scene.begun(case.kind, case.stage)
    scene.changed(case.change)
    scene.followed(case.verb, chance)
    scene.sound()
    scene.followed("run", chance)
    scene.sound()
    scene.followed("append", chance)
    scene.sound()
    assert sorted(oracles.ok_ids(scene.root) + oracles.dead_ids(scene.root)) == scene.ids()
    for verb in ("run", "append"):
        assert scene.command(verb) == ""
        scene.sound()
    assert "unfinished" not in gm.status(scene.root)["state"] or case.kind != "append"


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory."""
    where = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=where) as folder:
        yield Path(folder)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_some_commands_over_what_is_unfinished(memory: Path, seed: int) -> None:
    """A sample of all below, another one for each seed."""
    for number, case in enumerate(random.Random(seed).sample(CASES, 4)):
        try:
            played(case, memory / str(number), seed)
        except AssertionError as e:
            raise AssertionError(f"{case}: {e}") from e


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_command_over_whatever_is_unfinished(case: Case, memory: Path) -> None:
    """All of them; of several ways out that a refusal names, one by chance."""
    played(case, memory / "one", int(os.environ.get("SEED", "0")))


@pytest.mark.few(2)
@pytest.mark.parametrize("stage", ["claimed", "some receipts", "linked", "gate failed"])
def test_an_append_whose_file_is_taken_away_can_be_given_up(memory: Path, stage: str) -> None:
    """--append, as the refusal says, and from then on nothing is to do; also a glob sees the result alone."""
    scene = Scene(memory / "one")
    scene.begun("append", stage)
    scene.changed("file removed")
    told = scene.command("run")
    assert stage == "claimed" or "--append" in told
    if stage == "linked":
        verdict = gm.verify(scene.root)
        assert not verdict.ok and "of an unfinished append (generation 2) are in the sink" in verdict.lines[0]
    assert scene.command("append") == ""
    scene.sound()
    assert scene.command("run") == ""
    assert gm.status(scene.root)["state"] == "done"


@pytest.mark.parametrize("verb", ["append", "retry"])
@pytest.mark.parametrize("stage", ["some receipts", "linked"])
def test_a_restart_that_was_given_up_jams_no_command(memory: Path, stage: str, verb: str) -> None:
    """Begun with other code; with the code put back the published result is gone on with."""
    scene = Scene(memory / "one")
    assert scene.command("run") == ""
    job, scene.job = scene.job, {"args": {"bad": [4]}}
    assert scene.command("restart", harm=STAGES[stage])
    scene.job = job
    assert scene.command("run") == ""
    scene.sound()
    if verb == "append":
        scene.put("c", range(20, 30))
    assert scene.command(verb) == ""
    scene.sound()
    assert publication.published(scene.root).generations == [1, 3]
    assert gm.status(scene.root)["state"] == "done"


def test_a_first_run_whose_gate_fails_is_accepted_though_files_came(memory: Path) -> None:
    """Where new files are to be appended: the plan is judged as it was made, and what came since is appended."""
    scene = Scene(memory / "one")
    scene.begun("new", "gate failed")
    scene.changed("file added")
    assert scene.command("append", min_ok=1.0).startswith("GateFailed")
    assert scene.command("append", min_ok=1.0, accept=True) == ""
    scene.sound()
    assert gm.read(scene.root).count_rows() == 28


def test_what_was_given_up_can_no_longer_be_published(memory: Path) -> None:
    """By a run of it that stood still and goes on: it is told, and the sink stays as it is."""
    scene = Scene(memory / "one")
    scene.begun("append", "linked")
    from gristmill.commit import publish
    from gristmill.commit.documents import ResultRecord
    from gristmill.driver.selection import Held
    from gristmill.files.disk import LOCAL

    found = Held.by(scene.root, LOCAL)
    late = found.unfinished
    assert late is not None
    assert found.latest is not None
    about = ResultRecord(**{f.name: getattr(found.latest.body, f.name) for f in fields(ResultRecord)})
    scene.changed("file removed")
    assert scene.command("append") == ""
    with pytest.raises(gm.SinkBusy, match="has given it"):
        publish.publish(late, replace(about, generations=(1, 2)), [])
    scene.sound()
