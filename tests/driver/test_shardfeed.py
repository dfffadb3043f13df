"""The feed as a state machine: whatever workers do, every shard is committed or the run stops, and it always ends."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.driver.retries import error_of
from gristmill.driver.shardfeed import ShardFeed
from gristmill.errors import WorkerLost
from gristmill.process import machine
from gristmill.process.messages import DONE, WAIT, Death, Failure, Item, Left, Outcome, Started
from gristmill.shards.shard import Shard
from gristmill.worker.recipe import Task

HELD = 2
COUNTS = (10, 10, 0, 0, 10, 0, 0, 10)
DEADLY = st.sampled_from(["segfault", "exit", "killed", "left", "io", "model", "sick", "space"])


def task(number: int) -> Task:
    """The task of a shard."""
    return Task("score", Shard(number, (), 10), schema=pa.schema([]))


def proof(scored: int | None) -> Task:
    """Rows of a shard that was scored, or of none."""
    return Task("proof", Shard(-1 if scored is None else scored, ()), rows=16)


class Engine:
    """A pretended engine: workers hold two items and end them as chance says; `troubles` are used up one by one."""

    def __init__(self, feed: ShardFeed, workers: int, troubles: list[str]) -> None:
        self.feed = feed
        self.workers = workers
        self.troubles = troubles
        self.living: dict[str, list[Item]] = {}
        self.done: set[str] = set()
        self.serial = self.steps = self.read = 0

    def held(self) -> list[int]:
        """Shards that are at some worker."""
        return [i.value.shard.number for items in self.living.values() for i in items if i.value.kind == "score"]

    def step(self, draw: st.DataObject) -> bool:
        """Start, feed, let one thing happen. False at the end."""
        self.steps += 1
        while self.read in self.feed.committed:  # by whoever reads the stream, in order
            self.feed.consumed(self.read)
            self.read += 1
        while len(self.living) < min(self.workers, self.feed.wanted()):
            self.living[f"w{self.serial}"] = []
            self.feed.on(Started(f"w{self.serial}"))
            self.serial += 1
        for name, items in self.living.items():
            while name not in self.done and len(items) < HELD:
                item = self.feed.take(name)
                if item is WAIT:
                    break
                if item is DONE:
                    self.done.add(name)
                    break
                items.append(item)
        numbers = self.held()
        assert len(numbers) == len(set(numbers)), "a shard was handed out twice at once"
        for items in self.living.values():
            careful = [i for i in items if i.value.careful]
            assert not careful or len(items) == 1, "a careful attempt shares its worker"
        for name in [n for n, items in self.living.items() if not items and n in self.done]:
            del self.living[name]
        busy = sorted(n for n, items in self.living.items() if items)
        if not busy:
            assert not self.living or self.feed.wanted() > 0 or self.feed.fatal is not None
            return bool(self.living)
        self.happens(busy[draw.draw(st.integers(0, len(busy) - 1))])
        return True

    def happens(self, name: str) -> None:
        """The first item of a worker ends, or the worker does."""
        items = self.living[name]
        trouble = self.troubles.pop() if self.troubles else ""
        keys = tuple(i.key for i in items)
        if trouble in ("segfault", "exit", "killed"):
            number = {"segfault": 11, "killed": 9}.get(trouble)
            del self.living[name]
            self.feed.on(Death(name, keys, "", None if number else 3, number))
        elif trouble == "left":
            del self.living[name]
            self.feed.on(Left(name, keys))
        elif trouble:
            self.feed.on(Outcome(name, items.pop(0).key, None, Failure(trouble, "E", "e")))
        else:
            self.feed.on(Outcome(name, items.pop(0).key, {"counts": COUNTS, "ok": 10}))


@settings(deadline=None)
@given(
    st.data(), st.integers(1, 40), st.integers(1, 4), st.lists(DEADLY, max_size=25), st.none() | st.integers(1, 9),
    st.booleans(),
)  # fmt: skip
def test_every_shard_is_committed_or_the_run_stops(
    draw: st.DataObject, shards: int, workers: int, troubles: list[str], most_ahead: int | None, remote: bool
) -> None:
    """Nothing is handed out twice at once; DONE comes only at the end; there is no state in which nothing moves, also
    in a stream whose reader waits for the next shard.
    """
    feed = ShardFeed(workers, most_ahead=most_ahead, proof=proof, remote=remote)
    feed.begin(task, range(shards), draw.draw(st.frozensets(st.integers(1, shards))))
    engine = Engine(feed, workers, troubles)
    given = len(troubles)
    while engine.step(draw):
        assert engine.steps < 20 * (shards + given + 5), "nothing comes to an end"
    if feed.fatal is None:
        assert sorted(feed.committed) == list(range(shards))
        assert feed.take("late") is DONE
    else:
        assert feed.take("late") is DONE
        assert feed.wanted() == 0


def test_new_names_for_every_shard_are_not_kept() -> None:
    """An engine may name a new worker for each item: what its last shard was is known of the latest ones only."""
    feed = ShardFeed(2)
    feed.begin(task, range(3_000), frozenset(range(1, 3_000)))
    given = []
    for n in range(3_000):
        item = feed.take(f"w{n}")
        assert isinstance(item, Item)
        given.append(item.value.shard.number)
        feed.on(Outcome(f"w{n}", item.key, {"counts": COUNTS, "ok": 10}))
    assert sorted(given) == list(range(3_000)) and len(feed._last) <= 256


def test_a_worker_goes_on_inside_what_it_decodes() -> None:
    """Three row groups of four shards and two workers: each has a group for itself, the third is for who comes first,
    and the other begins in the middle of what is left of it. A shard that is tried again comes first.
    """
    feed = ShardFeed(2)
    feed.begin(task, range(12), frozenset(range(12)) - {0, 4, 8})
    given: dict[str, list[int]] = {"a": [], "b": []}

    def take(worker: str) -> int:
        item = feed.take(worker)
        assert isinstance(item, Item)
        number = item.value.shard.number
        given[worker].append(number)
        feed.on(Outcome(worker, item.key, {"counts": COUNTS, "ok": 10}))
        return int(number)

    for _ in range(4):
        take("a"), take("b")
    assert given == {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}
    assert [take("a"), take("b"), take("a"), take("b")] == [8, 10, 9, 11]
    assert feed.take("a") is DONE

    feed = ShardFeed(2)
    feed.begin(task, range(6), frozenset(range(1, 6)))
    first = feed.take("a")
    assert isinstance(first, Item) and first.value.shard.number == 0
    feed.on(Outcome("a", first.key, None, Failure("io", "OSError", "e")))
    again = feed.take("b")
    assert isinstance(again, Item) and again.value.shard.number == 0


@settings(deadline=None)
@given(st.data(), st.integers(1, 30), st.integers(1, 4))
def test_kills_from_outside_are_nobodys_fault(draw: st.DataObject, shards: int, workers: int) -> None:
    """Up to the bound, any number of SIGKILLs delays a run and blames nothing: no attempt becomes careful."""
    feed = ShardFeed(workers)
    feed.begin(task, range(shards))
    engine = Engine(feed, workers, ["killed"] * 15)
    while engine.step(draw):
        assert not any(i.value.careful for items in engine.living.values() for i in items)
    assert feed.fatal is None
    assert sorted(feed.committed) == list(range(shards))


def test_more_kills_than_come_from_outside() -> None:
    """The run ends, and says what may be at work: code that kills its own process does so each time."""
    feed = ShardFeed(1)
    feed.begin(task, range(1))
    for number in range(100):
        item = feed.take(f"w{number}")
        if not isinstance(item, Item):
            break
        feed.on(Death(f"w{number}", (item.key,), "", None, 9))
    assert isinstance(feed.fatal, WorkerLost)
    assert "have it raise an error instead" in str(feed.fatal)


def test_a_model_that_fails_everywhere_stops_the_run_early() -> None:
    """A million shards on which the model fails throughout: some are tried, at places far apart, then the run stops."""
    feed = ShardFeed(1)
    feed.begin(task, range(1_000_000))
    tried: list[int] = []
    while (item := feed.take("w0")) is not DONE:
        assert item is not WAIT
        tried.append(item.value.shard.number)
        feed.on(Outcome("w0", item.key, None, Failure("model", "ValueError", "no", "the model's traceback")))
    assert feed.fatal is not None
    assert "the model's traceback" in str(feed.fatal)
    assert len(tried) <= 10
    assert max(tried) - min(tried) > 500_000


def test_bad_rows_of_a_whole_shard_are_dead_where_the_model_works_elsewhere() -> None:
    """The shard is tried again as proven, once another one has worked."""
    feed = ShardFeed(1)
    feed.begin(task, range(3))
    item = feed.take("w0")
    assert (item.value.shard.number, item.value.proven) == (0, False)
    feed.on(Outcome("w0", item.key, None, Failure("model", "E", "e")))
    elsewhere = feed.take("w0")
    feed.on(Outcome("w0", elsewhere.key, {"counts": COUNTS}))
    again = feed.take("w0")
    assert (again.value.shard.number, again.value.proven) == (0, True)


def test_a_stream_goes_on_past_bad_rows_at_its_beginning() -> None:
    """Its reader waits for them, so that none beyond can be tried: that its first rows were scored is what counts."""
    feed = ShardFeed(1, most_ahead=4)
    feed.begin(task, range(100))
    feed.probed = {"ok": 3}
    for _ in range(4):
        feed.on(Outcome("w0", feed.take("w0").key, None, Failure("model", "E", "e")))
    assert feed.take("w0") is WAIT
    assert (feed.fatal, feed.take("w0").value.proven) == (None, True)


def test_a_shard_that_fails_throughout_though_the_model_works_ends_the_run() -> None:
    """It is tried a few times, and not for ever."""
    feed = ShardFeed(1)
    feed.begin(task, range(2))
    first, other = feed.take("w0"), feed.take("w0")
    other = feed.take("w1") if other is WAIT else other
    feed.on(Outcome("w1", other.key, {"counts": COUNTS}))
    for _ in range(10):
        feed.on(Outcome("w0", first.key, None, Failure("memory", "E", "e")))
        if feed.fatal is not None:
            break
        while (first := feed.take("w0")) is WAIT:
            pass
    assert feed.fatal is not None


def test_a_resumed_shard_of_bad_rows_is_judged_by_rows_from_elsewhere() -> None:
    """The last shard of a resumed run fails throughout: rows of the start are scored to learn if the model works."""
    for ok in (64, 0):
        feed = ShardFeed(1, proof=proof)
        feed.begin(task, [7])
        feed.on(Outcome("w0", feed.take("w0").key, None, Failure("model", "E", "e")))
        assert feed.take("w0") is WAIT
        asked = feed.take("w0")
        assert (asked.value.kind, asked.value.shard.number) == ("proof", -1)
        feed.on(Outcome("w0", asked.key, {"ok": ok, "rows": 64}))
        item = feed.take("w0")
        assert item.value.proven if ok else item is DONE
        assert (feed.fatal is None) == bool(ok)


BAD = st.lists(st.tuples(st.integers(0, 199), st.integers(1, 80)), max_size=3)


@pytest.mark.long
@settings(deadline=None)
@given(st.data(), st.integers(1, 200), st.integers(1, 3), BAD, st.booleans(), st.booleans())
def test_stretches_of_shards_on_which_the_model_fails(
    draw: st.DataObject, shards: int, workers: int, bad: list[tuple[int, int]], remote: bool, early: bool
) -> None:
    """Wherever they are and however long: with a proof that it works elsewhere all are committed, each handed out twice
    at most, with few proofs; one of a model that works on nothing stops the run after a few shards.
    """
    fails = {n for first, some in bad for n in range(first, first + some)}
    works = early or not fails.issuperset(range(shards))
    feed = ShardFeed(workers, proof=proof, remote=remote)
    feed.begin(task, range(shards))
    living: dict[str, list[Item]] = {f"w{n}": [] for n in range(workers)}
    given, proofs = 0, 0
    while feed.wanted():
        for name, items in living.items():
            while len(items) < 5 and isinstance(item := feed.take(name), Item):
                items.append(item)
                given += 1
        busy = [name for name, items in living.items() if items]
        if not busy:
            continue
        name = busy[draw.draw(st.integers(0, len(busy) - 1))]
        item = living[name].pop(0)
        number, attempt = item.value.shard.number, item.value
        if attempt.kind == "proof":
            proofs += 1
            assert number == -1 or number not in fails, "rows that failed are no evidence"
            feed.on(Outcome(name, item.key, {"ok": 3 if works else 0, "rows": 16}))
        elif number in fails and not attempt.proven:
            feed.on(Outcome(name, item.key, None, Failure("model", "E", "e")))
        else:
            ok = 0 if number in fails else 10
            feed.on(Outcome(name, item.key, {"counts": (10, 10, 0, 0, 10, 0, 10 - ok, ok)}))
    failed = len(fails.intersection(range(shards)))
    if works:
        assert feed.fatal is None and sorted(feed.committed) == list(range(shards))
        assert given - proofs == shards + failed
        assert proofs <= (4 + failed / 8 if remote else 1 + failed / 8)
    else:
        assert feed.fatal is not None and proofs == 1
        assert given - proofs <= 8 + 5 * workers
        assert "16 from all over the source" in str(feed.fatal)


def test_a_remote_model_is_tried_as_soon_as_a_shard_fails_throughout() -> None:
    """With rows of the shard of which most were answered: not with other shards, each of which would cost its rows."""
    feed = ShardFeed(1, proof=proof, remote=True)
    feed.begin(task, range(100))
    for ok in (3, 9, 5):
        feed.on(Outcome("w0", feed.take("w0").key, {"counts": (10, 10, 0, 0, 10, 0, 10 - ok, ok)}))
    feed.on(Outcome("w0", feed.take("w0").key, None, Failure("model", "Refused", "400: no")))
    asked = feed.take("w0")
    assert (asked.value.kind, asked.value.shard.number) == ("proof", 1)
    feed.on(Outcome("w0", asked.key, {"ok": 0, "rows": 16}))
    assert feed.take("w0") is DONE
    assert "every row tried, 16 from shard 1, scored before among them (Refused: 400: no)" in str(feed.fatal)


@pytest.mark.parametrize(
    ("group", "counter"),
    [
        ("0::/user/x\n", "sys/fs/cgroup/user/x/memory.events"),
        ("0::/outside/name\n", "sys/fs/cgroup/memory.events"),
        ("8:pids:/\n4:cpu,memory:/x\n0::/\n", "sys/fs/cgroup/memory/x/memory.oom_control"),
        ("4:memory:/outside/name\n", "sys/fs/cgroup/memory/memory.oom_control"),
        ("0::/\n", ""),
        (None, ""),
    ],
)
def test_whose_kills_for_want_of_memory_are_evidence(tmp_path: Path, group: str | None, counter: str) -> None:
    """Those in the control group of this process, where it counts them, not those of other programs."""

    def write(path: str, count: int) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"low 0\noom 7\noom_kill {count}\n")

    write("proc/vmstat", 3)
    if group is not None:
        write("proc/self/cgroup", 0)
        (tmp_path / "proc/self/cgroup").write_text(group)
    if counter:
        write(counter, 5)
    asked = machine.OutOfMemory(str(tmp_path))
    killed = Death("w0", signal=9)
    assert not asked(killed)
    write("proc/vmstat", 4)
    assert asked(killed) is not bool(counter)
    if counter:
        write(counter, 6)
        assert asked(killed)
    assert not asked(killed)


def test_a_full_disk_is_told_with_the_sink_and_the_way_out() -> None:
    """And without a traceback, which other failures have."""
    full = Failure("space", "OSError", "[Errno 28] No space left on device", "Traceback (most recent call last): …")
    text = str(error_of(full, "shard 3", "labels/"))
    assert text.startswith("shard 3: [Errno 28] No space left on device: what was committed stays: free space")
    assert "the sink (labels/)" in text and "TMPDIR" in text and "Traceback" not in text
    refused = Failure("space", "PermissionError", "[Errno 13] Permission denied: 'x'", "Traceback (most recent …")
    assert "Traceback" in str(error_of(refused, "shard 3", "labels/"))
