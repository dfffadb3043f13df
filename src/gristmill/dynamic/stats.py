"""What a batcher has done: a tally that its drivers write to, and the frozen copy of it that users read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Any

from gristmill.dynamic.admission import Batch
from gristmill.values import dataclass


@dataclass(frozen=True)
class Stats:
    """A batcher at one moment. Times are in the unit in their name, sizes in items.

    `total_processed` counts the items of every batch that has been run (once, also with `retry_alone`), `total_failed`
    those that ended in an error, `total_dropped` items whose callers left before their batch did (cancelled, timed out,
    closed), `total_refused` items that found the queue full. `batch_sizes` maps a size to the number of batches;
    `waiting_ms` maps an upper bound, a power of two of microseconds, to the number of items that waited less than it,
    and at least half of it, between call and batch.
    """

    queue_size: int = 0
    total_processed: int = 0
    total_batches: int = 0
    avg_batch_size: float = 0.0
    avg_processing_time: float = 0.0  # seconds per batch
    total_failed: int = 0
    total_dropped: int = 0
    total_refused: int = 0
    batch_sizes: Mapping[int, int] = field(default_factory=dict)
    waiting_ms: Mapping[float, int] = field(default_factory=dict)
    cache_stats: Any = None

    def snapshot(self) -> dict[str, Any]:
        """All of it as plain values that `json.dumps` accepts; histogram keys become strings."""
        plain = {name: value for name, value in vars(self).items() if name not in ("batch_sizes", "waiting_ms")}
        try:
            plain["cache_stats"] = None if self.cache_stats is None else asdict(self.cache_stats)
        except TypeError:  # a cache may report anything
            plain["cache_stats"] = str(self.cache_stats)
        plain["batch_sizes"] = {str(size): count for size, count in self.batch_sizes.items()}
        plain["waiting_ms"] = {f"{bound:g}": count for bound, count in self.waiting_ms.items()}
        return plain


class Tally:
    """Counts of one driver; only that driver writes to it, or the holder of its lock."""

    def __init__(self) -> None:
        self.sizes: Counter[int] = Counter()
        self.waits = [0] * 64  # by bit length of the microseconds waited
        self.seconds = 0.0
        self.failed = 0
        self.dropped = 0
        self.refused = 0

    def left(self, batch: Batch, now: float) -> None:
        """A batch leaves the queue."""
        waits = self.waits
        for entry, start, stop in batch.parts:
            waits[int((now - entry.arrived) * 1e6).bit_length()] += stop - start

    def ran(self, size: int, seconds: float, failed: int) -> None:
        """A batch of `size` items is done; the function took `seconds` for it."""
        self.sizes[size] += 1
        self.seconds += seconds
        self.failed += failed

    def add(self, other: Tally) -> None:
        """Add another tally, whose driver may be writing to it."""
        self.sizes.update(dict(other.sizes))  # copied in one step
        self.waits = [mine + its for mine, its in zip(self.waits, other.waits, strict=True)]
        self.seconds += other.seconds
        self.failed += other.failed
        self.dropped += other.dropped
        self.refused += other.refused

    def picture(self, queue_size: int, cache_stats: Any = None) -> Stats:
        """The copy that users see."""
        batches = sum(self.sizes.values())
        items = sum(size * count for size, count in self.sizes.items())
        return Stats(
            queue_size=queue_size,
            total_processed=items,
            total_batches=batches,
            avg_batch_size=items / batches if batches else 0.0,
            avg_processing_time=self.seconds / batches if batches else 0.0,
            total_failed=self.failed,
            total_dropped=self.dropped,
            total_refused=self.refused,
            batch_sizes=dict(sorted(self.sizes.items())),
            waiting_ms={2**bits / 1000: count for bits, count in enumerate(self.waits) if count},
            cache_stats=cache_stats,
        )
