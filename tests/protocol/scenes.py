"""Scenes of the protocol: what a sink holds, what one driver begins, where it is stopped or ended, what another does
meanwhile; and what a reader may see at any moment.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from mortal import VERSION
from stepped import Driver, layers

import gristmill as gm
from gristmill.commit import publication
from gristmill.driver.opening import Verbs
from gristmill.driver.run import finish
from gristmill.driver.selection import Held
from gristmill.errors import GristmillError, WorkerLost
from gristmill.result import reading
from gristmill.result.verify import verify
from gristmill.sinks.formats import sink_format
from gristmill.stores.sinkindex import differences
from gristmill.stores.sinkrows import in_sink

ROWS = 8  # a file; a shard holds half of them
BAD = {1: (2, 5), 2: (5,), 3: (), 4: ()}  # source rows that fail, by version of the code
KILLS = {4: (5, 1)}  # the row and the piece of it that ends its worker

Result = frozenset[tuple[int, int, float]]  # id, piece, answer; the answer of a dead row is NaN's stand-in
DEAD = -1.0


def pieces(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Every row is two."""
    return [{"piece": 0}, {"piece": 1}]


def carried(batch: dict[str, np.ndarray], version: int) -> dict[str, np.ndarray]:
    """A step after that, in which a version may die."""
    if version in KILLS and ((batch["id"] % ROWS == KILLS[version][0]) & (batch["piece"] == KILLS[version][1])).any():
        sys.modules["mortal"].dies(version)  # found so, as it is no part of the job's code
    return {"carried": batch["piece"]}


def fails_at(batch: dict[str, np.ndarray], version: int) -> dict[str, np.ndarray]:
    """A post step that fails on the second piece of the rows that are bad in this version."""
    for i, piece in zip(batch["id"].tolist(), batch["piece"].tolist(), strict=True):
        if i % ROWS in BAD[version] and piece == 1:
            raise ValueError(f"row {i} is bad")
    return {"y": batch["y"]}


def answer(batch: dict[str, np.ndarray], version: int) -> dict[str, np.ndarray]:
    """The model; also it fails, on the first piece of the first bad row."""
    bad = BAD[version][:1]
    for i, piece in zip(batch["id"].tolist(), batch["piece"].tolist(), strict=True):
        if i % ROWS in bad and piece == 0:
            raise ValueError(f"row {i} is bad")
    return {"y": batch["id"] * 10.0 + batch["piece"] + 1000.0 * version}


def wanted(version: int, files: int) -> Result:
    """All of what a version answers for so many files."""
    out = set()
    for i in range(files * ROWS):
        for piece in (0, 1):
            bad = i % ROWS in (BAD[version][:1] if piece == 0 else BAD[version]) or (i % ROWS, piece) == KILLS.get(
                version
            )
            out.add((i, piece, DEAD if bad else i * 10.0 + piece + 1000.0 * version))
    return frozenset(out)


def cured(before: Result, version: int) -> Result:
    """A result whose dead rows were scored again by another version."""
    now = {(i, p): y for i, p, y in wanted(version, 9)}
    return frozenset((i, p, now[i, p] if y == DEAD else y) for i, p, y in before)


@dataclass(frozen=True)
class Act:
    """A command: a verb with a version of the code."""

    verb: str
    version: int

    def __str__(self) -> str:
        return f"{self.verb}{self.version}"


@dataclass
class Scene:
    """A sink, its source of so many files, and every result that a reader may see by now."""

    folder: Path
    kind: str
    indexed: bool = False  # whether commands make an index, by which rows are then also looked up
    files: int = 0
    legal: set[tuple[Result, int]] = field(default_factory=set)  # with the version of the code that was last
    operations: int = 0
    lost: list[str] = field(default_factory=list)  # commands that a row has ended

    def __post_init__(self) -> None:
        self.root, self._layer = layers(str(self.folder), self.kind)
        (self.folder / "in").mkdir(parents=True)
        self.grow()

    def grow(self) -> None:
        """One more file."""
        ids = np.arange(self.files * ROWS, (self.files + 1) * ROWS)
        pq.write_table(pa.table({"id": ids}), self.folder / "in" / f"{self.files}.parquet")
        self.files += 1

    # ------------------------------------------------ commands

    def run(self, act: Act, driver: Driver) -> str:
        """A whole command; what it ended with: "done", "nothing to do", or the error's name."""
        job = gm.Job(
            str(self.folder / "in"),
            gm.model(answer, version=act.version),
            gm.sink(
                self.root,
                keep=["id", "piece"],
                index=["id", "piece"] if self.indexed else (),
                storage={} if self.kind == "disk" else {"region": "x"},
            ),
            steps=[gm.flat_map(pieces), gm.step(carried, version=act.version)],
            post=[gm.step(fails_at, version=act.version)],
            workers=0,
            shard_rows=ROWS // 2,
            gates={"min_ok": 0.0},
        )
        verbs = {
            "run": Verbs(),
            "append": Verbs(append=True),
            "restart": Verbs(restart=True),
            "retry": Verbs(retry=True, accept_code_change=True),
        }[act.verb]
        self._allow(act)
        VERSION.set(act.version)
        try:
            return finish(job.spec, verbs, files=self._layer(driver)).report.state
        except GristmillError as e:
            if isinstance(e, WorkerLost):
                self.lost.append(f"{act}: {e}")
            return type(e).__name__
        finally:
            self.operations += driver.operations

    def begun(self, act: Act, driver: Driver) -> tuple[threading.Thread, list[str]]:
        """The same in a thread of its own."""
        ended: list[str] = []
        thread = threading.Thread(target=lambda: ended.append(self.run(act, driver)))
        thread.start()
        return thread, ended

    def _allow(self, act: Act) -> None:
        """What readers may see from now on: what this command, or an unfinished one that it ends, may publish. Files
        are appended by the code that the result was made with last.
        """
        if act.verb != "retry":
            self.legal |= {(wanted(act.version, files), act.version) for files in range(1, self.files + 1)}
        for before, version in list(self.legal):
            if act.verb == "retry":
                self.legal.add((cured(before, act.version), act.version))
            elif version == act.version:
                self.legal.add((_grown(before, act.version, self.files), version))

    # ------------------------------------------------ readers

    def seen(self) -> Result | None:
        """What a reader finds; None where nothing is published. Raises AssertionError for what no command publishes."""
        layer = self._layer(Driver("reader"))
        if publication.latest(self.root, layer) is None:
            return None
        try:
            table = reading.read(self.root, layer).to_table()
            letters = reading.dead(self.root, layer)
        except OSError as e:
            raise AssertionError(f"a reader misses a file: {e}") from e
        rows = list(zip(*(table[n].to_pylist() for n in ("id", "piece", "y")), strict=True))
        dead = [(p["id"], p["piece"], DEAD) for p in map(json.loads, letters["payload"].to_pylist())]
        if self.indexed:
            with in_sink(self.root, layer, ()) as lookup:
                found = lookup.get_many([(i, p) for i, p, _ in rows])
            assert [row and (row["id"], row["piece"], row["y"]) for row in found] == rows, "looked up otherwise"
        assert len({(i, p) for i, p, _ in rows + dead}) == len(rows + dead), f"rows twice: {sorted(rows + dead)}"
        result = frozenset(rows + dead)
        assert result in {legal for legal, _ in self.legal}, f"a mix, or rows that are missing: {sorted(result)}"
        return result

    def unfinished(self) -> bool:
        """Whether a generation is left that can still be published, by whoever works on it."""
        return Held.by(self.root, self._layer(Driver("watcher"))).unfinished is not None

    def sound(self) -> None:
        """verify agrees with what is published."""
        layer = self._layer(Driver("verifier"))
        verdict = verify(self.root, sink_format("parquet"), layer, deep=True)
        assert verdict.ok, verdict.lines
        assert not (wrong := differences(publication.published(self.root, layer))), wrong


def _grown(before: Result, version: int, files: int) -> Result:
    """A result of some files with those that came since appended."""
    there = {i for i, _, _ in before}
    return before | {row for row in wanted(version, files) if row[0] not in there}


# ---------------------------------------------------------------- one exploration

HELD: dict[str, Callable[[Scene], None]] = {
    "nothing": lambda scene: None,
    "result": lambda scene: _done(scene, Act("run", 1)),
    "result and a new file": lambda scene: (_done(scene, Act("run", 1)), scene.grow())[0],
    "appended": lambda scene: (_done(scene, Act("run", 1)), scene.grow(), _done(scene, Act("append", 1)))[0],
}


def _done(scene: Scene, act: Act) -> None:
    assert scene.run(act, Driver("first")) == "done"


@dataclass(frozen=True)
class Interleaving:
    """Two commands on one sink: `first` is stopped, or `ends`, at its operation `at`; `second` runs; then the first
    one goes on; then the second command again until there is nothing to do.
    """

    kind: str
    held: str
    first: Act
    second: Act
    ends: bool
    indexed: bool = False

    def __str__(self) -> str:
        how = "ends" if self.ends else "stops"
        return f"{self.kind}: {self.held}; {self.first} {how}; {self.second}{', with an index' if self.indexed else ''}"

    def explored(self, folder: Path, at: int) -> tuple[bool, int]:
        """Take it. Whether the first driver came as far as `at`, and how many operations were done."""
        scene = Scene(folder, self.kind, self.indexed)
        HELD[self.held](scene)
        before = scene.seen()
        driver = Driver("A", at, self.ends)
        thread, ended = scene.begun(self.first, driver)
        try:
            came = self._interleaved(scene, driver, thread, ended)
        finally:
            driver.end()
            thread.join()
        self._settled(scene, before)
        return came, scene.operations

    def _interleaved(self, scene: Scene, driver: Driver, thread: threading.Thread, ended: list[str]) -> bool:
        while thread.is_alive() and not driver.stopped.is_set():
            thread.join(0.005)
        came = driver.over or driver.stopped.is_set()
        if came:
            scene.seen()
            leased = driver.leased  # one that was stopped before goes on as if it had begun later
            second = scene.run(self.second, Driver("B"))
            after, left = scene.seen(), second == "nothing to do" and scene.unfinished()
            driver.go_on()
            thread.join()
            late = scene.seen()
            if leased and second in ("done", "nothing to do") and not left:
                assert late == after, f"{self.first} came late ({ended}) and changed what {self.second} published"
        return came

    def _settled(self, scene: Scene, before: Result | None) -> None:
        """Whatever happened, no command is needed but --restart, and after it everything is as it should be."""
        assert not scene.lost, scene.lost
        state = scene.run(Act("run", 1), Driver("C"))
        if scene.seen() is not None:
            scene.sound()
        assert before is None or scene.seen() is not None, "a result is gone"
        if state not in ("done", "nothing to do"):
            assert scene.run(Act("restart", 3), Driver("D")) == "done", "a sink is jammed"
        else:
            assert scene.run(Act("run", 1), Driver("D")) == "nothing to do"
        scene.sound()
        scene.seen()
