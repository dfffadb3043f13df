"""What waits to be sent: bounded, in order, by a thread that nobody waits for longer than they say."""

from __future__ import annotations

import threading
import time

from gristmill.observe.outbox import Outbox


def test_things_are_sent_in_order_and_closing_waits_for_them() -> None:
    """All that was given is sent when `close` returns, and nothing is wrong."""
    sent: list[int] = []
    box = Outbox("somebody", lambda thing, until: sent.append(thing), within=5)
    for n in range(50):
        box.put(n)
    assert box.close(time.monotonic() + 5) == []
    assert sent == list(range(50))


def test_one_that_hangs_is_given_up_after_the_time_that_was_given() -> None:
    """`put` returns at once, `close` at its limit, and says how many were not sent."""
    over = threading.Event()
    box = Outbox("somebody", lambda thing, until: over.wait(30), within=30)
    began = time.monotonic()
    for n in range(3):
        box.put(n)
    assert time.monotonic() - began < 0.5
    (line,) = box.close(time.monotonic() + 0.3)
    assert time.monotonic() - began < 2
    assert line == "somebody: no answer in time, 3 not sent"
    over.set()


def test_a_queue_that_is_full_loses_the_oldest() -> None:
    """Memory is bounded; what was lost is said."""
    sent: list[int] = []
    first, over = threading.Event(), threading.Event()

    def send(thing: int, until: float) -> None:
        first.set()
        over.wait(10)
        sent.append(thing)

    box = Outbox("somebody", send, within=30, most=4)
    box.put(0)
    assert first.wait(5)
    for n in range(1, 11):
        box.put(n)
    over.set()
    assert box.close(time.monotonic() + 5) == ["somebody: 6 not sent, as it is too slow"]
    assert sent == [0, 7, 8, 9, 10]


def test_only_the_newest_figures_wait() -> None:
    """With `latest` older things are replaced, which is no loss."""
    sent: list[int] = []
    first, over = threading.Event(), threading.Event()

    def send(thing: int, until: float) -> None:
        first.set()
        over.wait(10)
        sent.append(thing)

    box = Outbox("somebody", send, within=30, latest=True)
    box.put(0)
    assert first.wait(5)
    for n in range(1, 11):
        box.put(n)
    over.set()
    assert box.close(time.monotonic() + 5) == []
    assert sent == [0, 10]


def test_what_sending_raises_is_told_and_the_next_thing_is_sent() -> None:
    """Any exception: the thread goes on."""
    sent: list[int] = []

    def send(thing: int, until: float) -> None:
        if thing == 1:
            raise ZeroDivisionError("of a client's own")
        sent.append(thing)

    box = Outbox("somebody", send, within=5)
    for n in (0, 1):
        box.put(n)
    assert box.close(time.monotonic() + 5) == ["somebody: of a client's own"]
    assert sent == [0]
