"""What torch, ONNX Runtime and OpenVINO make of a text model on this machine, on rows of a job's own source: how fast
each is and how far from torch, measured beside each other in a process of its own, and remembered by model and machine.

Rates are tokens a second of processor time of one thread, as workers run: what else the machine does hardly changes
their order.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.errors import BadModel, MissingExtra
from gristmill.fingerprint import digests
from gristmill.fingerprint.diskcache import cache_folder, write_whole
from gristmill.job.specs import TextSpec
from gristmill.models.contract import Place
from gristmill.models.export import export_key
from gristmill.models.fidelity import apart, difference, values
from gristmill.process import machine
from gristmill.values import dataclass

ROWS = 16  # that are compared
TOKENS = 1024  # most of them together: a quarter of a second of MiniLM on a core
ROUNDS = 1  # timed, of which the fastest counts, after one that compares


@dataclass(frozen=True)
class Runtime:
    """One of them: tokens a second of processor time, and the largest difference from torch in float32 (0 of torch
    itself), relative to the largest value if that is over 1; or why it is of no use.
    """

    rate: float = 0.0
    difference: float = 0.0
    failed: str = ""


Runtimes = Mapping[str, Runtime]  # by backend


def fastest(found: Runtimes, close: float) -> str:
    """The backend with the highest rate of those that are as close to torch, which is what there is otherwise."""
    good = {n: r for n, r in found.items() if not r.failed and r.difference <= close}
    return max(good, key=lambda n: good[n].rate) if good else "torch"


def measured(specs: Mapping[str, TextSpec], reference: TextSpec, rows: pa.Table) -> Runtimes:
    """Run each of `specs`, by backend, on some of the rows, beside each other; exports what is not in the cache.
    Differences are from `reference`. Raises BadModel where nothing can be measured.
    """
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows.slice(0, ROWS))
    body = pickle.dumps((dict(specs), reference, sink.getvalue()))
    return {n: Runtime(**told) for n, told in apart("gristmill.models.runtimes", body, reference.name).items()}


def main() -> None:
    """The process of `measured`."""
    specs, reference, rows = pickle.loads(sys.stdin.buffer.read())
    answer: dict[str, Any]
    try:
        found = raced(specs, reference, pa.ipc.open_stream(rows).read_all())
        answer = {name: asdict(one) for name, one in found.items()}
    except BadModel as e:
        answer = {"error": str(e)}
    sys.stdout.write("\n" + json.dumps(answer))
    sys.stdout.flush()


def raced(specs: Mapping[str, TextSpec], reference: TextSpec, rows: pa.Table) -> Runtimes:
    """The same in this process."""
    first = _Runner(reference)
    prepared, batches, tokens = _batches(first, rows)
    wanted = first.scored(prepared, batches)
    runners: dict[str, _Runner] = {n: first for n, spec in specs.items() if spec == reference}
    found: dict[str, Runtime] = {n: Runtime() for n in runners}
    for name, spec in specs.items():
        if name not in runners:
            try:
                runners[name] = _Runner(spec)
                found[name] = Runtime(difference=difference(runners[name].scored(prepared, batches), wanted))
            except (BadModel, MissingExtra) as e:
                runners.pop(name, None)
                found[name] = Runtime(failed=str(e))
    least: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, runner in runners.items():
            begun = time.process_time()
            runner.scored(prepared, batches)
            least[name] = min(least.get(name, np.inf), time.process_time() - begun)
    return {n: Runtime(tokens / least[n], r.difference) if n in least else r for n, r in found.items()}


class _Runner:
    """A model with one thread."""

    def __init__(self, spec: TextSpec) -> None:
        from gristmill.models import kinds

        spec = kinds.transformer(spec).compared(spec)
        self._model = kinds.open(spec, Place("cpu", spec.dtype, 1, spec.backend))
        self.prepare = self._model.prepare

    def scored(self, prepared: Any, batches: Sequence[np.ndarray]) -> np.ndarray:
        """float32 [rows, n], in the order of the batches."""
        return np.concatenate([values(self._model.predict(prepared, index)) for index in batches])


def _batches(runner: _Runner, rows: pa.Table) -> tuple[Any, list[np.ndarray], int]:
    """Rows ready for the model, the longest first, four in a batch, and how many tokens they have."""
    prepared = runner.prepare(rows)
    refused = {r.row for r in prepared.refused}
    index = np.array([i for i in range(prepared.rows) if i not in refused], dtype=np.int64)
    if len(index) == 0:
        raise BadModel(f"none of the {prepared.rows} rows sampled has a text to compare backends with")
    lengths = np.asarray(prepared.lengths)[index]
    index = index[: max(4, int(np.searchsorted(np.cumsum(lengths), TOKENS)))]
    lengths = lengths[: len(index)]
    order = index[np.argsort(-lengths, kind="stable")]
    return prepared, [order[at : at + 4] for at in range(0, len(order), 4)], int(lengths.sum())


# ---------------------------------------------------------------- what was found


def recall(spec: TextSpec) -> Runtimes | None:
    """What was measured before of this model on this machine; None if nothing was, or it cannot be read."""
    try:
        kept = json.loads(_note(spec).read_text(encoding="utf-8"))["runtimes"]
        return {str(n): Runtime(**told) for n, told in kept.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def remember(spec: TextSpec, found: Runtimes) -> None:
    """Keep what was found. Raises OSError if the cache cannot be written."""
    told = {"runtimes": {n: asdict(one) for n, one in found.items()}, "machine": machine.name()}
    write_whole(_note(spec), json.dumps(told))


def _note(spec: TextSpec) -> Path:
    from gristmill.models import kinds

    key = export_key(kinds.describe(spec, None).digest, kinds.transformer(spec).TASK)
    return cache_folder() / f"{key}-{spec.dtype}.{digests.digest_of(machine.name())[:12]}.runtimes.json"
