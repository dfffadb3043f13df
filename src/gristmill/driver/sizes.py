"""How much at a time: workers, batches, shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gristmill.driver.resolved import Resolved
from gristmill.engines.contract import Room
from gristmill.job.options import BatchPlan
from gristmill.job.specs import EXPORTED
from gristmill.process import machine
from gristmill.shards import shard
from gristmill.worker.batches import CPU_TOKENS, GPU_TOKENS, MOST_ROWS, ONNX_TOKENS, ROWS_WITHOUT_LENGTHS
from gristmill.worker.recipe import LEAST_BEGUN

if TYPE_CHECKING:
    pass


SHARD_SECONDS = 30.0  # design §5: the most work a crash can cost, and what each commit covers
LEAST_SHARD = shard.LEAST_ROWS
QUICK_SECONDS, QUICK_ROWS = 0.5, 65_536  # least size of a shard of a cheap function, to keep files few
# Only the function knows how much memory a row takes, so it starts with few rows. A call of some milliseconds cannot
# have filled much memory, whatever it does: batches with quicker calls than this are made larger, as each call costs
# the function and the pipeline some 0.1 ms on top of its rows.
FUNCTION_ROWS, QUICK_CALL = 1024, 0.01
# Of a model of features (scikit-learn, ONNX, TorchScript) on a CPU, which takes 1 to 5 ms a call on top of its rows:
# names and types of some hundred columns are compared, and each tree of a boosted model is called by itself.
QUICK_FEATURES = 0.05
# Of models that answer row by row: rows of a shard, of a window, and that are taken as answered at once.
ROW_SHARD, ROW_WINDOW, ROWS_TAKEN = 4096, 256, 32
# Rows of a shard that is answered in bulk. Providers take 50,000 and more, but what a shard of theirs lacks after a day
# is asked for in another day, and their limits are on what is under way.
BULK_SHARD = 10_000
TEXT_WINDOW = 8192
PLAIN_WINDOW = 16_384
# Measured with MiniLM (91 MB of weights): a worker of ONNX Runtime holds 0.4 GB, one of torch 0.6 GB. While a model is
# being loaded, its weights are in memory twice.
WORKER_BYTES, WEIGHT_COPIES, MEMORY_SHARE = 400 << 20, 2, 0.8
UNTIMED_BYTES = 100 << 20  # design §5: below this nothing is timed


def workers(r: Resolved, room: Room, gpu_workers: int) -> tuple[int, int]:
    """How many workers, and threads for each: one process per GPU if there are any, otherwise one per core."""
    wanted: Any = r.job.engine.workers
    if isinstance(wanted, tuple):
        wanted = wanted[1]
    if wanted == "auto":
        on_gpus = r.place.gpu or r.job.engine.gpus not in ("auto", 0)  # a function's, if the job says so
        wanted = gpu_workers if on_gpus else min(room.workers, _fit_memory(r, room))
        # One process keeps that many rows in flight, or computes with all cores; with GPUs, each has its own.
        if r.estimated_rows <= LEAST_SHARD or (r.info.at_once and not r.place.gpu):
            wanted = 1
    if r.info.at_once:
        wanted = min(int(wanted), r.info.at_once)
    count, threads = int(wanted), r.job.engine.threads
    if threads == "auto":
        return count, room.threads or max(1, machine.cores() // max(1, count))
    return count, int(threads)


def _fit_memory(r: Resolved, room: Room) -> int:
    """Workers whose models fit into this machine's memory together: fewer for large models, with more threads each."""
    if room.grows or room.threads is not None:  # its scheduler divides another machine's memory
        return room.workers
    each = WORKER_BYTES + WEIGHT_COPIES * r.info.weight_bytes
    return max(1, int(MEMORY_SHARE * machine.memory() // each))


def budget_of(r: Resolved) -> BatchPlan:
    """What a call may hold, by default or as the job says; nothing tried or remembered (gristmill.driver.budgets)."""
    text, own = r.info.by_tokens, r.info.call is not None
    running = r.job.running
    if r.info.at_once:
        taken = ROWS_TAKEN if running.batch_rows == "auto" else int(running.batch_rows)
        return BatchPlan(CPU_TOKENS, taken, max(ROW_WINDOW, taken))
    tokens = running.batch_tokens
    if tokens == "auto":
        on_cpu = ONNX_TOKENS if r.place.backend in EXPORTED else CPU_TOKENS
        tokens = GPU_TOKENS if r.place.gpu else on_cpu
    rows = running.batch_rows
    quick = None
    if rows == "auto":
        quick = QUICK_CALL if own else None if text or r.place.gpu else QUICK_FEATURES
        rows = MOST_ROWS if text else FUNCTION_ROWS if own else ROWS_WITHOUT_LENGTHS * 32
    window = TEXT_WINDOW if text else max(PLAIN_WINDOW, int(rows))
    return BatchPlan(int(tokens), int(rows), window, text, quick=quick)


def is_timed(r: Resolved) -> bool:
    """Whether the rows of a shard rest on how quick the model is, as the first rows of a run tell."""
    return r.job.running.shard_rows == "auto" and not (r.info.bulk or r.info.at_once or r.info.asks)


def shard_rows(r: Resolved, rows_per_second: float | None) -> int:
    """Rows per shard: about half a minute of one worker, at most 1/(8 x workers) of the job (or 1/(8 x step processes),
    as each of these prepares one shard).
    """
    fixed = r.job.running.shard_rows
    if fixed != "auto":
        return int(fixed)
    at_once = max(1, r.workers) * max(1, r.job.engine.steps_workers)
    share = r.estimated_rows / (shard.SHARDS_PER_WORKER * at_once)
    quick = 0.0 if rows_per_second is None else min(rows_per_second * QUICK_SECONDS, QUICK_ROWS)
    least = LEAST_SHARD if r.info.by_tokens else 4 * LEAST_SHARD
    if r.job.engine.steps_workers:  # whoever asks for these has rows that are slow to prepare
        least = LEAST_SHARD // 16
    rows = max(share, least, quick)
    if r.info.bulk:
        rows = BULK_SHARD
    elif r.info.at_once:
        rows = min(max(share, LEAST_BEGUN), ROW_SHARD)
    elif rows_per_second is not None and r.bytes > UNTIMED_BYTES:
        rows = min(rows, max(1.0, rows_per_second * SHARD_SECONDS))
    return int(min(max(1, round(rows)), shard.MOST_ROWS))
