"""The batch budget of a run: the job's, else the one stored in its plan, else one found earlier for this model on this
machine, else a default, with others tried beside it on the first batches.

Budgets that were found are kept in the cache by model, options and machine; deleting them costs only another sweep.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gristmill.commit.documents import BatchRecord
from gristmill.driver import planning
from gristmill.driver.planning import Resolved
from gristmill.fingerprint import digests, diskcache
from gristmill.job.options import BatchPlan
from gristmill.job.secret import SEALED
from gristmill.job.specs import EXPORTED
from gristmill.process import machine
from gristmill.worker.budgetsearch import compared, knee

# Around the defaults, in factors of two or four. Throughput is flat to a few percent over two or three of them, so a
# trial costs only a few percent of the batches it uses.
ONNX_TRIES = (256, 512, 1024, 2048)
CPU_TRIES = (512, 1024, 2048, 4096)
GPU_TRIES = (16_384, 32_768, 65_536, 131_072)  # 8,192 tokens of MiniLM are all launching of kernels on an H200
ROW_TRIES = (64, 256, 1024, 4096)
LONGEST_CALL = 2.0  # seconds
LEAST_ROWS = 2000  # with fewer, nothing is tried: the sweep would take most of the run and save nothing


def chosen(r: Resolved, planned: BatchRecord | None = None) -> BatchPlan:
    """The budget for a run of a resolved job; `planned` is what its plan stores."""
    plain = planning.budget_of(r)
    running = r.job.running
    if (running.batch_tokens if plain.by_tokens else running.batch_rows) != "auto":
        return plain
    if planned is not None:
        return replace(plain, **vars(planned))
    known = recall(r)
    if known is not None:
        return _with(plain, known)
    return replace(plain, **_tries(r, plain))


def _with(plain: BatchPlan, budget: int) -> BatchPlan:
    if plain.by_tokens:
        return replace(plain, tokens=budget)
    return replace(plain, rows=budget, window=max(plain.window, budget))


def _tries(r: Resolved, plain: BatchPlan) -> dict[str, Any]:
    # A user's function keeps its batches: only it knows how much memory a row takes.
    if r.info.call is not None or r.estimated_rows < LEAST_ROWS or r.only is not None:
        return {}
    if plain.by_tokens:
        on_cpu = ONNX_TRIES if r.place.backend in EXPORTED else CPU_TRIES
        return {"tries": GPU_TRIES if r.place.gpu else on_cpu}
    return {"tries": ROW_TRIES, "longest": LONGEST_CALL}


def stored(batch: BatchPlan) -> BatchRecord:
    """The budget as the plan stores it."""
    return BatchRecord(batch.tokens, batch.rows, batch.tries, batch.longest)


# ---------------------------------------------------------------- what was found


def recall(r: Resolved) -> int | None:
    """The budget found for this model, these options and this machine; None if there is none or it cannot be read."""
    try:
        return int(json.loads(_note(r).read_text(encoding="utf-8"))["budget"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def rate(r: Resolved) -> float | None:
    """Rows a second of all workers, as `tune` or a sweep found; None where budgets, and so rates, are of tokens."""
    if planning.budget_of(r).by_tokens:
        return None
    try:
        found = [float(x) for x in json.loads(_note(r).read_text(encoding="utf-8"))["rates"].values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return max(found, default=0.0) or None


def remember(r: Resolved, batch: BatchPlan, figures: Mapping[str, float]) -> None:
    """Keep what the sweep of a run found, if it compared at least two budgets."""
    rates = compared(figures)
    if rates and set(batch.tries) >= set(rates):
        keep(r, knee(rates), rates)


def keep(r: Resolved, budget: int, rates: Mapping[int, float]) -> None:
    """Write the budget to the cache. Failing to write is no error: the next run tries again."""
    note = _note(r)
    told = {"budget": budget, "rates": {str(b): round(x, 1) for b, x in sorted(rates.items())}, "model": r.model.name}
    with contextlib.suppress(OSError):
        diskcache.write_whole(note, json.dumps({**told, "machine": machine.name()}))


def _note(r: Resolved) -> Path:
    about = {
        "model": r.info.digest or {n: d for n, d in r.fingerprint.code.items() if not d.startswith(SEALED)},
        "options": {k: v for k, v in r.fingerprint.options.items() if k.startswith("model.")},
        "place": [r.place.device, r.place.backend, r.place.threads, r.workers, len(r.gpus)],
        "machine": machine.name(),
    }
    return diskcache.cache_folder() / "budgets" / f"{digests.digest_of(about)[:40]}.json"
