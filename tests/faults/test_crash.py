"""Faults 2, 3 and 4: the run is killed at every operation that it does to disk, and goes on in another process.

The crash is data: the number of an operation, and what is lost with it. recording.py counts the operations.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import crashing
import jobs
import oracles
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet
import pytest
import recording
import victims
from apart import Apart, Ended

import gristmill as gm
from gristmill.commit.publication import success


@dataclass(frozen=True)
class Scene:
    """A job about to be run: its folders, and what the sink holds before (`base`, or nothing)."""

    apart: Apart
    folder: Path
    source: str
    base: Path | None = None
    verbs: tuple[tuple[str, Any], ...] = ()

    def beside(self, apart: Apart) -> Scene:
        """The same job over the same input, with a folder and processes of its own."""
        folder = self.folder / "beside"
        folder.mkdir()
        return replace(self, apart=apart, folder=folder)

    @property
    def root(self) -> str:
        return str(self.folder / "out")

    @property
    def log(self) -> str:
        return str(self.folder / "calls")

    @property
    def journal(self) -> str:
        return str(self.folder / "journal")

    def begin(self) -> None:
        """Everything as it was before the run."""
        for path in (self.root, self.journal):
            shutil.rmtree(path, ignore_errors=True)
        Path(self.log).unlink(missing_ok=True)
        if self.base is not None:
            shutil.copytree(self.base, self.root)

    def run(self, at: int | None = None, **others: Any) -> Ended:
        """Run the job; where `at` is given, it is killed at that operation."""
        harm = others.pop("harm", None if at is None else {"at": at, "kind": "kill"})
        return self.apart.run(
            "crashing:run", source=self.source, sink=self.root, log=self.log, journal=self.journal, harm=harm,
            **{**dict(self.verbs), **others},
        )  # fmt: skip

    def crashed(self, at: int) -> bool:
        """A run killed at operation `at`; False where it ended before it came there."""
        self.begin()
        ended = self.run(at)
        assert ended.code in (0, -9), ended.printed
        return ended.code == -9

    def committed(self) -> set[int]:
        """Ids that need no scoring again. A restart that has published is begun anew by the same command."""
        verbs = dict(self.verbs)
        if verbs.get("restart") and (found := success(self.root)) is not None and found.generation == 2:
            return set()
        return oracles.committed(self.root, self.source, after=1 if "restart" in verbs or "retry" in verbs else 0)

    def resumed(self, rows: int, wanted: pa.Table) -> None:
        """The same command again: all oracles hold."""
        oracles.nothing_partial(self.root)
        done = self.committed()
        Path(self.log).unlink(missing_ok=True)
        ended = self.run()
        assert ended.code == 0, ended.printed
        oracles.nothing_lost_nothing_twice(self.root, list(range(rows)), crashing.filtered(rows))
        oracles.same_values(self.root, wanted)
        assert not done & set(oracles.called(self.log)), "the model was called for a committed shard"
        oracles.tidy(self.root)


@pytest.fixture
def scene(apart: Apart, quick: Path) -> Scene:
    """A first run of 60 rows in two files, four shards."""
    return Scene(apart, quick, victims.write_input(str(quick / "in"), 60))


def at_each(scenes: Sequence[Scene], check: Callable[[Scene, int], bool], first: int = 0, step: int = 1) -> int:
    """`check` at operation `first` and every `step`-th after it until one says that the run ended before it; how many
    there were. The scenes take turns and go on at once: a run of one process leaves the other cores idle.
    """

    def lane(number: int) -> int:
        count = 0
        while check(scenes[number], first + step * (number + count * len(scenes))):
            count += 1
        return count

    with ThreadPoolExecutor(len(scenes)) as pool:
        return sum(pool.map(lane, range(len(scenes))))


def whole(scene: Scene, rows: int) -> pa.Table:
    """What an uninterrupted run publishes."""
    scene.begin()
    ended = scene.run()
    assert ended.code == 0, ended.printed
    oracles.nothing_lost_nothing_twice(scene.root, list(range(rows)), crashing.filtered(rows))
    return gm.read(scene.root).to_table().combine_chunks()


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.long)])
def test_fault_02_killed_at_every_operation(scene: Scene, another: Apart, step: int) -> None:
    """SIGKILL at operation k, for every (or fourth) k of the job; the next run finishes it: nothing lost or twice."""
    wanted = whole(scene, 60)

    def killed(scene: Scene, at: int) -> bool:
        if not scene.crashed(at):
            return False
        if success(scene.root) is None:
            with pytest.raises(gm.BadSource, match="no result"):
                gm.read(scene.root)
        scene.resumed(60, wanted)
        return True

    count = at_each([scene, scene.beside(another)], killed, step=step)
    assert count > 80 // step, f"only {count} operations were counted"


@pytest.mark.long
@pytest.mark.parametrize("how", ["names", "contents", "some"])
def test_fault_03_power_fails_and_unsynced_writes_are_lost(scene: Scene, another: Apart, how: str) -> None:
    """As 02, but what was not synced goes too: names, contents, or any mixture of both."""
    wanted = whole(scene, 60)

    def cut(scene: Scene, at: int) -> bool:
        crashed = scene.crashed(at)
        recording.lose_unsynced(scene.journal, scene.root, how, seed=at)
        if crashed:
            shutil.rmtree(scene.journal)
            scene.resumed(60, wanted)
        else:
            oracles.nothing_lost_nothing_twice(scene.root, list(range(60)), crashing.filtered(60))
            oracles.same_values(scene.root, wanted)
        return crashed

    count = at_each([scene, scene.beside(another)], cut, {"names": 0, "contents": 1, "some": 2}[how], step=4)
    assert count > 20, f"only {count} operations were counted"


def ids(file: str) -> list[int]:
    """Those in a file, in order."""
    rows = pa.json.read_json(file) if file.endswith("jsonl") else pa.parquet.read_table(file)
    return sorted(rows["id"].to_pylist())


@pytest.mark.parametrize("how", ["contents", "some"])
@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
def test_fault_03_power_fails_while_a_sink_that_is_one_file_is_made(quick: Path, name: str, how: str) -> None:
    """At any operation on it, and after a restart that replaces it: if there is a file, it is whole, and the next run
    goes on.
    """
    place = quick / "place"
    place.mkdir()
    sink, journal = str(place / name), str(quick / "journal")
    for rows in (40, 60):
        source = victims.write_input(str(quick / "in"), rows)
        jobs.run(source, sink, "scored", journal=journal, verbs={"restart": rows == 60}, workers=0, shard_rows=20)
    lines = Path(journal, "journal").read_text().splitlines(keepends=True)
    made = [n for n, line in enumerate(lines) if "/onefile" in line or f'"{sink}"' in line]
    assert sum(f'"{sink}"' in line for line in lines) == 2, "it is not made by the run's file layer"
    for until in range(min(made), len(lines) + 1):
        if until < len(lines) and until - 1 not in made:
            continue
        Path(journal, "journal").write_text("".join(lines[:until]))
        recording.lose_unsynced(journal, str(place), how, seed=until)
        if os.path.exists(sink):
            assert ids(sink) in (list(range(40)), list(range(60))), until
    assert os.path.exists(sink)
    jobs.run(source, sink, "scored", workers=0, shard_rows=20)
    assert ids(sink) == list(range(60)) and gm.verify(sink).ok


LAID_OUT = {"partition_by": ["group"], "files": 1, "sort_by": ["y"]}


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", [LAID_OUT, {"merge": True, "format": "jsonl"}], ids=["partitions", "merged"])
@pytest.mark.few(1)
def test_fault_02_killed_while_parts_are_joined(scene: Scene, another: Apart, layout: Any, step: int) -> None:
    """At every operation on a joined file, and at every removal of a part: the next run scores nothing, joins what is
    left, and publishes it once.
    """
    scene = replace(scene, verbs=(("layout", layout), ("fn", "grouped"), ("bad", [])))
    wanted = whole(scene, 60)

    def killed(scene: Scene, at: int, **where: Any) -> bool:
        scene.begin()
        ended = scene.run(harm={"at": at, "kind": "kill", **where})
        assert ended.code in (0, -9), ended.printed
        if ended.code == 0:
            return False
        if success(scene.root) is None:
            with pytest.raises(gm.BadSource, match="no result"):
                gm.read(scene.root)
        assert scene.committed() == set(range(60))
        scene.resumed(60, wanted)
        return True

    scenes = [scene, scene.beside(another)]
    count = at_each(scenes, partial(killed, path="merged"), step=step)
    count += at_each(scenes, partial(killed, path="work/part-", ops=["remove"]), step=step)
    assert count >= 12 // step, f"only {count} operations were counted"


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.long
def test_fault_02_killed_while_a_result_is_reduced(scene: Scene, another: Apart, step: int) -> None:
    """At every operation on what `reduce` wrote, and where `_SUCCESS` is replaced: of all rows, and there once."""
    scene = replace(scene, verbs=(("reduce", "victims:reported"), ("bad", [])))
    wanted = whole(scene, 60)

    def killed(scene: Scene, at: int, **where: Any) -> bool:
        scene.begin()
        ended = scene.run(harm={"at": at, "kind": "kill", **where})
        assert ended.code in (0, -9), ended.printed
        if ended.code == 0:
            return False
        scene.resumed(60, wanted)
        (path,) = gm.reduced(scene.root).values()
        assert Path(path).read_text().startswith("54 ")
        assert [p for p in Path(scene.root, "_reduced").rglob("*") if p.is_file()] == [Path(path)]
        return True

    scenes = [scene, scene.beside(another)]
    count = at_each(scenes, partial(killed, path="reduced"), step=step)
    count += at_each(scenes, partial(killed, path="_SUCCESS"), step=step)
    assert count > 8 // step, f"only {count} operations were counted"


def restarted(scene: Scene) -> Scene:
    """A finished result of other code, about to be restarted."""
    assert scene.run(bad=[5]).code == 0
    return scene


def appended(scene: Scene) -> Scene:
    """A finished result, and a new input file."""
    assert scene.run(append=False).code == 0
    pa.parquet.write_table(victims.table(10, 20), os.path.join(scene.source, "1.parquet"))
    return scene


def retried(scene: Scene) -> Scene:
    """A finished result with dead letters, whose cause is mended."""
    assert scene.run(retry=False, bad=[3, 13]).code == 0
    return scene


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "verbs", "rows"),
    [
        (restarted, {"restart": True, "bad": [3]}, 20),
        (
            restarted,
            {"restart": True, "bad": [3], "fn": "grouped", "layout": LAID_OUT, "reduce": "victims:reported"},
            20,
        ),
        (appended, {"append": True, "bad": [3]}, 30),  # every third operation: most are those of a first run
        (retried, {"retry": True, "accept_code_change": True, "bad": []}, 20),  # every second
    ],
)
def test_fault_04_killed_while_one_result_replaces_another(
    before: Callable[[Scene], Scene], verbs: dict[str, Any], rows: int, apart: Apart, another: Apart, quick: Path
) -> None:
    """Restart, append, retry-dead killed at an operation: a reader sees the old result or the new one, never a mix."""

    def begun(apart: Apart, folder: Path) -> Scene:
        source = victims.write_input(str(folder / "in"), 20, files=1)
        first = Scene(apart, folder, source, None, () if before is restarted else tuple(verbs.items()))
        before(first)
        base = folder / "base"
        shutil.copytree(first.root, base)
        return Scene(apart, folder, source, base, tuple(verbs.items()))

    scenes = [begun(apart, quick / "one"), begun(another, quick / "two")]
    old = gm.read(str(scenes[0].base)).to_table().combine_chunks()
    wanted = whole(scenes[0], rows)

    def killed(scene: Scene, at: int) -> bool:
        if not scene.crashed(at):
            return False
        seen = gm.read(scene.root).to_table().combine_chunks()
        assert seen.equals(old) or seen.equals(wanted)
        scene.resumed(rows, wanted)
        return True

    step = {restarted: 1, appended: 3, retried: 2}[before]
    count = at_each(scenes, killed, step=step)
    assert count * step > 30, f"only {count} operations were counted"


def test_a_retry_that_died_before_it_had_a_plan(apart: Apart, quick: Path) -> None:
    """The plain command then finds the live result whole: nothing to do, and not all rows as a retry."""
    source = victims.write_input(str(quick / "in"), 20, files=1)
    scene = Scene(apart, quick, source, None, (("bad", [3, 13]),))
    assert scene.run().code == 0
    before = gm.read(scene.root).to_table()
    harm = {"at": 0, "kind": "kill", "ops": ["create"], "path": "retried."}
    retry = {"retry": True, "accept_code_change": True, "bad": []}
    assert scene.run(harm=harm, **retry).code == -9
    assert scene.run().code == 0
    assert gm.read(scene.root).to_table().equals(before)
    assert scene.run(**retry).code == 0
    oracles.nothing_lost_nothing_twice(scene.root, list(range(20)), crashing.filtered(20))
    assert oracles.dead_ids(scene.root) == []


# What a run does to disk while it publishes: operations on these paths, and all others of these kinds.
PUBLISHING: tuple[dict[str, Any], ...] = (
    {"path": "reduced"}, {"path": "index"}, {"path": "published"}, {"path": "_SUCCESS"}, {"path": "settled"},
    {"path": "manifest"}, {"ops": ["link", "remove"]},
)  # fmt: skip
EXTRAS = {
    "parts": {"layout": {"index": ["id"]}, "reduce": "victims:reported"},
    "joined": {"layout": {"index": ["id"], "files": 1, "sort_by": ["y"]}, "reduce": "victims:reported"},
    "npy": {"layout": {"format": "npy", "files": 2}, "reduce": "victims:reported", "fn": "vectors"},
}
BEFORE: dict[str, Callable[[Scene], Scene]] = {"append": appended, "restart": restarted, "retry": retried}
QUICK = {("append", "joined"), ("restart", "npy"), ("anew", "parts")}


def standing(scene: Scene) -> Scene:
    """A finished result without what the job asks for now."""
    layout = {k: v for k, v in dict(scene.verbs)["layout"].items() if k != "index"}
    assert scene.run(layout=layout, reduce=None).code == 0
    return scene


@pytest.mark.parametrize(
    ("verb", "kind", "step"),
    [(v, k, 25) for v, k in sorted(QUICK)]
    + [pytest.param(v, k, 3, marks=pytest.mark.long) for v in (*BEFORE, "anew") for k in EXTRAS],
)
@pytest.mark.few(1)
def test_fault_04_killed_while_what_is_made_of_the_rows_is_published(
    verb: str, kind: str, step: int, apart: Apart, another: Apart, quick: Path
) -> None:
    """Index, reduced files, joined files, manifest: a reader sees the old result or the new one, and one more run of
    the same command makes everything right, whatever was linked, removed or half written.
    """
    verbs: dict[str, Any] = {**EXTRAS[kind], "bad": [3]}
    verbs |= {"append": {"append": True}, "restart": {"restart": True}, "anew": {}}.get(
        verb, {"retry": True, "accept_code_change": True, "bad": []}
    )

    def begun(apart: Apart, folder: Path) -> Scene:
        source = victims.write_input(str(folder / "in"), 20, files=1)
        first = Scene(apart, folder, source, None, tuple(verbs.items()))
        if verb == "restart":
            first = replace(first, verbs=(*verbs.items(), ("restart", False)))
        (BEFORE.get(verb) or standing)(first)
        shutil.copytree(first.root, folder / "base")
        return Scene(apart, folder, source, folder / "base", tuple(verbs.items()))

    def right(scene: Scene) -> None:
        wanted = sorted(set(range(30 if verb == "append" else 20)) - {*crashing.filtered(30), *verbs["bad"]})
        oracles.tidy(scene.root)
        verdict = gm.verify(scene.root, deep=True)
        assert verdict.ok, verdict.lines
        (path,) = gm.reduced(scene.root).values()
        assert Path(path).read_text().split()[0] == str(len(wanted))
        assert [p for p in Path(scene.root, "_reduced").rglob("*") if p.is_file()] == [Path(path)]
        if kind != "npy":
            assert sorted(gm.read(scene.root).to_table()["id"].to_pylist()) == wanted
            with gm.lookup(scene.root) as rows:
                assert [row and row["id"] for row in rows.get_many(wanted)] == wanted

    def killed(scene: Scene, at: int, **where: Any) -> bool:
        scene.begin()
        ended = scene.run(harm={"at": at, "kind": "kill", **where})
        assert ended.code in (0, -9), ended.printed
        if ended.code == 0:
            return False
        ended = scene.run()
        assert ended.code == 0, ended.printed
        right(scene)
        return True

    scenes = [begun(apart, quick / "one"), begun(another, quick / "two")]
    scenes[0].begin()
    ended = scenes[0].run()
    assert ended.code == 0, ended.printed
    right(scenes[0])
    count = sum(at_each(scenes, partial(killed, **where), step=step) for where in PUBLISHING)
    assert count * step > 30, f"only {count} operations were counted"
