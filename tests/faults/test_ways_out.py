"""Every way out that a refusal names is accepted, whatever state a sink is in and whatever a person tries: each is
followed, on a copy, until a run has ended.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import victims
from test_generations import BEFORE_PUBLISHING, more, run

import gristmill as gm
from gristmill.driver import run as driver
from gristmill.errors import GateFailed, GristmillError, RunFailed

OLD: dict[str, Any] = {"args": {"bad": [3]}}
NEW: dict[str, Any] = {"args": {"bad": [4]}}
CLEAN: dict[str, Any] = {"args": {"bad": []}}
KEEPS: dict[str, Any] = {"keep": ["id", "x"]}
GATED = {"min_ok": 0.99}


class World:
    """A folder with a source and a sink, the job as it was (`then`), and as a person has it now."""

    def __init__(self, folder: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
        self.folder, self.then, self.now = folder, then, now

    @property
    def source(self) -> str:
        return str(self.folder / "in")

    @property
    def root(self) -> str:
        return str(self.folder / "out")

    def attempt(self, how: dict[str, Any], back: bool = False) -> gm.Report:
        """The job as it is now, or with code, options and files put back, with a verb."""
        verbs = dict(how)
        given = {"fn": "scored", "workers": 0, "shard_rows": 10, "gates": GATED, **(self.then if back else self.now)}
        for name in os.listdir(f"{self.source}.then") if back else ():
            shutil.copy2(os.path.join(f"{self.source}.then", name), self.source)
        spec = jobs.job(self.source, self.root, **given).spec
        if verbs.pop("retry", False):
            return driver.retry_dead(spec, **verbs)
        return driver.run(spec, **verbs)


Steps = list[tuple[dict[str, Any], bool]]  # verbs in turn, and whether the job is put back for each


def told(error: GristmillError, was_back: bool) -> Iterator[Steps]:
    """The ways out that an error names: of each the verbs in turn, and whether the job is put back for it."""
    text = str(error)
    if isinstance(error, GateFailed):
        assert "--accept, accept=True, publishes" in text
        yield [({"accept": True}, was_back)]
        return
    if "run the job again" in text:
        yield [({}, was_back)]
        return
    last = text.rpartition("\n")[2]
    begins = re.search(r"(?:^|: )(put it back|use )", last)
    assert begins is not None, f"no way out: {text}"
    for way in last[begins.start(1) :].split(", or "):
        steps, back = [], was_back
        for step in way.removeprefix("use ").split(", then "):
            if step.startswith("put it back"):
                back = True
                if "to go on" in step:
                    steps.append(({}, True))
                continue
            new = "with the new code" in step
            steps.append((verbs_of(step), back and not new))
        assert steps, f"no way in {way!r} of {text}"
        yield steps


def verbs_of(step: str) -> dict[str, Any]:
    """`--append (append=True) to …` as the arguments that it names."""
    named = dict.fromkeys(re.findall(r"(\w+)=True", step), True)
    if step.startswith("retry-dead"):
        return {**named, "retry": True}
    assert named or step.startswith("run "), step
    return named


def follow(world: World, how: Steps, tmp: Path, done: set[str], trail: tuple[str, ...] = ()) -> None:
    """Do what was advised; where that is refused, follow all of that advice in turn, never in a circle."""
    assert len(trail) < 5, "\n".join(trail)
    for at, (verbs, back) in enumerate(how):
        try:
            world.attempt(verbs, back)
        except GristmillError as e:
            assert not isinstance(e, RunFailed), (*trail, str(e))
            said = f"{verbs}{' (put back)' if back else ''}: {e}"
            plain = re.sub(r"/\S+/", "", said)
            assert plain not in trail, "a circle:\n" + "\n".join((*trail, plain))
            if at == 0 and (same := f"{back}{e}") in done:
                return  # a refusal changes nothing: where this one leads has been seen
            done |= {same} if at == 0 else set()
            for number, way in enumerate(told(e, back)):
                aside = tmp / f"aside{len(trail)}{number}"  # the plan has the paths of the source: worlds take turns
                shutil.copytree(world.folder, aside)
                try:
                    follow(world, way, tmp, done, (*trail, plain))
                finally:
                    shutil.rmtree(world.folder)
                    os.rename(aside, world.folder)
            return


STATES = ("done", "done, dead", "append failed", "append failed, dead before", "append stopped", "append unplanned",
          "restart stopped", "restart failed", "retry stopped", "first failed", "first stopped")  # fmt: skip
CHANGES = ("nothing", "code", "option", "input", "new file", "code and new file", "bad file gone")
VERBS: tuple[dict[str, Any], ...] = (
    {},
    {"append": True},
    {"retry": True},
    {"retry": True, "accept_code_change": True},
)


def made(state: str, folder: Path) -> World:
    """A sink in that state."""
    victims.write_input(str(folder / "in"), 100, files=1)
    source, root = str(folder / "in"), str(folder / "out")
    then = OLD if "dead" in state or state.startswith(("retry", "first")) else CLEAN
    if state.startswith("first"):
        if state == "first stopped":
            run(source, root, harm=BEFORE_PUBLISHING, gates=GATED, **then)
        else:
            then = {"args": {"bad": list(range(3, 20))}}
            failing(source, root, then)
        return World(folder, then, then)
    run(source, root, gates=GATED, **then)
    if state.startswith("append"):
        if "failed" in state:
            poison = pa.table({"id": np.arange(100, 120), "x": pa.array([None] * 20, pa.float64())})
            pq.write_table(poison, os.path.join(source, "y.parquet"))
            failing(source, root, then, append=True)
        else:
            more(source, range(100, 120), "y.parquet")
            harm = BEFORE_PUBLISHING if "stopped" in state else {**BEFORE_PUBLISHING, "path": "plan.json"}
            run(source, root, harm=harm, append=True, gates=GATED, **then)
    elif state.startswith("restart"):
        then = {"args": {"bad": [5]}} if state == "restart stopped" else {"args": {"bad": list(range(3, 20))}}
        if state == "restart stopped":
            run(source, root, harm=BEFORE_PUBLISHING, restart=True, gates=GATED, **then)
        else:
            failing(source, root, then, restart=True)
    elif state == "retry stopped":
        code = {"args": {"bad": [3]}, "batch_rows": 7}
        run(source, root, harm=BEFORE_PUBLISHING, retry=True, gates=GATED, **code)
    return World(folder, then, then)


def failing(source: str, root: str, then: dict[str, Any], **verb: bool) -> None:
    """A run whose gate does not hold."""
    with pytest.raises(GateFailed):
        run(source, root, gates=GATED, **then, **verb)


def changed(world: World, change: str) -> None:
    """What a person changes before trying again."""
    if "code" in change:
        world.now = {**world.then, **NEW}
    if change == "option":
        world.now = {**world.then, **KEEPS}
    if change == "input":
        name = sorted(os.listdir(world.source))[0]
        pq.write_table(victims.table(100, 1000), os.path.join(world.source, name))
        os.utime(os.path.join(world.source, name), (2e9, 2e9))
    if "new file" in change:
        more(world.source, range(200, 900), "z.parquet")
    if change == "bad file gone" and os.path.exists(os.path.join(world.source, "y.parquet")):
        os.unlink(os.path.join(world.source, "y.parquet"))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "change", [c if c in ("nothing", "code") else pytest.param(c, marks=pytest.mark.slow) for c in CHANGES]
)
@pytest.mark.parametrize("state", STATES)
def test_every_way_out_that_is_named_is_accepted(state: str, change: str, quick: Path) -> None:
    """Of every state, change and verb: following what the refusal says ends in a run that has ended, in no circle."""
    world = made(state, quick / "w")
    shutil.copytree(world.source, f"{world.source}.then")
    backup = quick / "before"
    before, done = world.now, set[str]()
    shutil.copytree(world.folder, backup)
    for verbs in VERBS:
        world.now = before
        changed(world, change)
        try:
            follow(world, [(verbs, False)], quick, done)
        finally:
            shutil.rmtree(world.folder)
            shutil.copytree(backup, world.folder)
