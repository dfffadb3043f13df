"""How a call enters the policy and leaves it; shared by both drivers, which see to it that one at a time does so."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from gristmill.batching.admission import Admission, Batch, Rules
from gristmill.batching.calls import Call
from gristmill.batching.failures import QueueFull
from gristmill.batching.stats import Tally


def enter(policy: Admission, call: Call, tally: Tally) -> float:
    """Offer all of a call to the policy; returns when it wants `next` to be asked. Raises QueueFull, taking nothing."""
    soonest = math.inf
    for entry in call.entries:
        due = policy.offer(entry)
        if due is None:
            waiting, limit = policy.queued, policy.rules.max_queue
            for other in call.entries:
                policy.drop(other)
            tally.refused += call.missing
            raise QueueFull(f"{waiting} items wait, and max_queue={limit}: a call of {call.missing} was refused")
        soonest = min(soonest, due)
    return soonest


def leave(policy: Admission, call: Call, tally: Tally) -> None:
    """Take what has not left of a call out of the policy again."""
    call.finished = True
    for entry in call.entries:
        tally.dropped += entry.left
        policy.drop(entry)


def batches_of(call: Call, rules: Rules) -> Iterator[Batch]:
    """The batches of one call that is alone."""
    policy = Admission(replace(rules, timeout=0.0, max_queue=None))
    for entry in call.entries:
        policy.offer(entry)
    while isinstance(batch := policy.next(0.0), Batch):
        yield batch
