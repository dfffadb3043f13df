"""What every engine keeps to, tried with stages that know nothing of shards."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from places import MEMORY, head
from pretended import Feed, Stages

from children import is_kept
from gristmill.engines.local import Local
from gristmill.engines.ray import Ray
from gristmill.job.options import RayOptions
from gristmill.process.messages import Left, Outcome, Printed, Started

HERE = (os.path.dirname(__file__),)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two cores of a Ray cluster, to which this process is connected."""
    with head() as started:
        started.add_node(num_cpus=2, object_store_memory=MEMORY)
        yield


def _made(request: pytest.FixtureRequest, workers: int) -> Any:
    if request.param == "ray":
        request.getfixturevalue("cluster")
        return Ray(workers, 1, HERE, False, RayOptions())
    return Local(workers, HERE, 2.0)


RAY = pytest.param("ray", marks=pytest.mark.leaves_children)  # idle processes of Ray; ours are watched


@pytest.fixture(params=["here", "one", "two", RAY])
def engine(request: pytest.FixtureRequest) -> Any:
    """The local engine without workers, with one, with two; Ray with two."""
    return _made(request, {"here": 0, "one": 1}.get(request.param, 2))


@pytest.fixture(params=["local", RAY])
def one(request: pytest.FixtureRequest) -> Any:
    """An engine with one worker in a process of its own."""
    return _made(request, 1)


@pytest.fixture(params=["local", RAY])
def two(request: pytest.FixtureRequest) -> Any:
    """An engine with two."""
    return _made(request, 2)


def driven(engine: Any, feed: Feed, stages: Stages | None = None) -> Feed:
    """Run to the end."""
    for event in engine.run(stages or Stages(), feed):
        feed.on(event)
    return feed


@pytest.mark.long
def test_fault_58_a_worker_that_stops_is_given_up(two: Any) -> None:
    """It is nobody's fault, the driver is not held up by what it cannot send it, and all items end."""
    items: list[tuple[str, Any]] = [("die", int(signal.SIGSTOP)), *[("echo", "x" * 500_000)] * 8]
    feed = driven(two, Feed(items), Stages(silence=1.0))
    assert sorted(feed.ended) == list(range(9))
    assert feed.deaths()
    for death in feed.deaths():  # on a machine with much else to do another one may be late, too
        assert "without a sign of life" in death.lost
        assert death.signal is None


def test_every_item_ends_once(engine: Any) -> None:
    """Each item has one outcome, values of any size come back whole, errors come back as failures."""
    items: list[tuple[str, Any]] = [("echo", n) for n in range(50)]
    items += [("big", 3 << 20), ("fail", 0)]
    feed = driven(engine, Feed(items))
    assert sorted(feed.ended) == list(range(52))
    assert [feed.ended[n][0] for n in range(50)] == list(range(50))
    assert len(feed.ended[50]) == 3 << 20
    assert feed.ended[51].message == "no"
    assert sum(isinstance(e, Outcome) for e in feed.events) == 52
    assert sum(isinstance(e, Started) for e in feed.events) >= 1


def test_nothing_to_do(engine: Any) -> None:
    """A feed that is done at once ends the run, and nothing is left."""
    assert driven(engine, Feed([])).deaths() == []


def test_closing_leaves_nothing_running(engine: Any) -> None:
    """Closing the iterator in the middle ends all workers, those that sleep at once."""
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    feed = Feed([("echo", 1), *[("sleep", 30)] * 4])
    events = engine.run(Stages(), feed)
    for event in events:
        feed.on(event)
        if feed.ended:
            break
    begun = time.monotonic()
    events.close()
    assert time.monotonic() - begun < 15
    if isinstance(engine, Local):  # of the others `leaves_no_worker` looks for what is ours
        after = psutil.Process().children(recursive=True)
        assert {p.pid for p in after if not is_kept(p)} <= before


def test_what_user_code_prints_is_passed_on(one: Any) -> None:
    """Both streams, from a worker's process, with the worker's name; the protocol is not disturbed."""
    feed = driven(one, Feed([("print", f"line {n}") for n in range(20)]))
    text = "".join(e.text for e in feed.events if isinstance(e, Printed))
    assert all(text.count(f"line {n}\n") == 2 for n in range(20))
    assert len(feed.ended) == 20


@pytest.mark.few(1)
@pytest.mark.parametrize("how", [int(signal.SIGKILL), int(signal.SIGSEGV), "exit"])
def test_a_death_is_told_with_what_was_held(two: Any, how: int | str) -> None:
    """The worker is replaced, the event says how it ended and what it held, the first item being the one that ran."""
    feed = driven(two, Feed([("echo", 0), ("die", how), *[("echo", n) for n in range(9)]]))
    assert len(feed.ended) == 11
    (death,) = feed.deaths()
    assert death.keys[0] == "1"
    assert death.started
    assert (death.signal, death.exit_code) == ((None, 3) if how == "exit" else (how, None))


@pytest.mark.parametrize("harm", ["raise", "exit"])
def test_a_worker_that_cannot_be_opened(one: Any, harm: str) -> None:
    """Its exception comes as an outcome without a key, its death as one before the start."""
    feed = Feed([("echo", 1)], workers=1)
    events = one.run(Stages(harm), feed)
    seen = []
    for event in events:
        seen.append(event)
        feed.on(event)
        if feed.deaths():
            break
    events.close()
    assert not feed.deaths()[0].started
    told = [e.error for e in seen if isinstance(e, Outcome) and e.key == ""]
    assert [e.message for e in told if e is not None] == (["cannot be opened"] if harm == "raise" else [])


def test_a_worker_that_leaves_gives_back_what_it_holds(one: Any) -> None:
    """It is no death; another one goes on."""
    items = [("echo", 0), ("leave", ""), *[("echo", n) for n in range(6)]]
    feed = driven(one, Feed(items, workers=1))
    assert len(feed.ended) == 8
    assert feed.deaths() == []
    (left,) = [e for e in feed.events if isinstance(e, Left)]
    assert left.reason == "asked to"
    assert len({v[1] for v in feed.ended.values() if isinstance(v, tuple)}) == 2


def test_a_worker_that_does_not_stop_is_killed() -> None:
    """After the grace it gets SIGKILL."""
    feed = Feed([("echo", 0), ("ignore", 0)], workers=1)
    events = Local(1, HERE, grace=0.5).run(Stages(), feed)
    for event in events:
        feed.on(event)
        if feed.ended:
            break
    time.sleep(0.3)
    begun = time.monotonic()
    events.close()
    assert time.monotonic() - begun < 10


class Unreadable:
    """Pickled, but not to be had again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_an_item_that_cannot_be_read_ends_its_worker() -> None:
    """With its exception as an outcome without a key: nothing waits for what is never begun."""
    feed = Feed([("echo", 0), ("echo", Unreadable())], workers=1)
    events = Local(1, HERE).run(Stages(), feed)
    for event in events:
        feed.on(event)
        if feed.deaths():
            break
    events.close()
    (told,) = [e.error for e in feed.events if isinstance(e, Outcome) and e.key == ""]
    assert told is not None
    assert "no number" in told.message
