"""How a call enters the policy and leaves it; shared by both drivers, which ensure that only one at a time does so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gristmill.dynamic.admission import Admission, Batch, Rules
from gristmill.dynamic.calls import Call
from gristmill.dynamic.stats import Tally
from gristmill.errors import QueueFull


def enter(policy: Admission, call: Call, tally: Tally) -> float:
    """Offer all of a call to the policy; returns when it wants `next` to be asked. Raises QueueFull, taking nothing."""
    if call.parts is None:
        soonest = policy.offer(call)
    else:
        dues = [policy.offer(part) for part in call.parts]
        soonest = None if None in dues else min(due for due in dues if due is not None)
    if soonest is None:
        for entry in call.entries:
            policy.drop(entry)
        tally.refused += call.missing
        limit = policy.rules.max_queue
        raise QueueFull(f"{policy.queued} items wait, and max_queue={limit}: a call of {call.missing} was refused")
    return soonest


def leave(policy: Admission, call: Call, tally: Tally) -> None:
    """Remove from the policy what has not left of a call."""
    call.finished = True
    for entry in call.entries:
        tally.dropped += entry.left
        policy.drop(entry)


def batches_of(call: Call, rules: Rules) -> Iterator[Batch]:
    """The batches of a call that runs by itself, until one fails."""
    policy = Admission(replace(rules, timeout=0.0, max_queue=None))
    for entry in call.entries:
        policy.offer(entry)
    while not call.finished and isinstance(batch := policy.next(0.0), Batch):
        yield batch
