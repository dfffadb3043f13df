"""How a call enters the policy and leaves it; shared by both drivers, which see to it that one at a time does so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gristmill.batching.admission import Admission, Batch, Rules
from gristmill.batching.calls import Call
from gristmill.batching.stats import Tally
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
    """Take what has not left of a call out of the policy again."""
    call.finished = True
    for entry in call.entries:
        tally.dropped += entry.left
        policy.drop(entry)


def batches_of(call: Call, rules: Rules) -> Iterator[Batch]:
    """The batches of one call that is alone, as long as it goes well."""
    policy = Admission(replace(rules, timeout=0.0, max_queue=None))
    for entry in call.entries:
        policy.offer(entry)
    while not call.finished and isinstance(batch := policy.next(0.0), Batch):
        yield batch
