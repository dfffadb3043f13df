"""What runs a text model where the job leaves it open: torch, or ONNX Runtime on an export of the same float32 weights.

Chosen once for a new plan and stored in it, outside the fingerprint as batch budgets are: both give the same values to
1e-5, which is measured on rows of the source before the choice is made. A precision is never chosen here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill import machine
from gristmill.errors import BadModel
from gristmill.io import registry
from gristmill.plan.specs import TextClassifier, TextEmbedder
from gristmill.planning import Resolved

SAMPLE_ROWS = 32
# An export takes 8 s for MiniLM, 15 s with the comparison, and a minute for a base-size model; it saves half of torch's
# time or more (measured on a CPU), so it is made for jobs that would take torch longer than this.
WORTH_SECONDS = 40.0
WORTH_A_BYTE = 60.0 / 440e6  # seconds: what a base-size model of 440 MB takes to export
CORE_RATE = 50e9  # FLOP/s of one core at work in torch, measured with MiniLM on two cores (104 GFLOP/s)
CHARS_A_TOKEN = 4  # English text, and what unknown tokenizers are taken to do
UNKNOWN_LENGTH = 512  # tokens at most, where the model has no limit of its own


@dataclass(frozen=True)
class Chosen:
    """A resolved job with its backend settled, and what a person should read about it."""

    resolved: Resolved
    notes: tuple[str, ...] = ()


def stored(r: Resolved, backend: str | None) -> Resolved:
    """The job on the backend that its plan was made for, where the job leaves the backend open."""
    model = r.model
    if backend is None or not isinstance(model, (TextEmbedder, TextClassifier)) or not open_to_choice(r):
        return r
    return replace(r, model=replace(model, backend=backend), place=replace(r.place, backend=backend))


def open_to_choice(r: Resolved) -> bool:
    """Whether another backend than the resolved one would do: the job says auto, and the folder has float32 weights for
    torch alone.
    """
    asked = r.job.model
    return (
        isinstance(asked, (TextEmbedder, TextClassifier))
        and asked.backend == "auto"
        and r.place.device == "cpu"
        and isinstance(r.model, (TextEmbedder, TextClassifier))
        and r.model.backend == "torch"
        and r.model.dtype == "float32"
    )


def settle(r: Resolved) -> Chosen:
    """Choose the backend of a new plan; measure int8 where it was asked for. May export, which takes seconds."""
    model = r.model
    asked = getattr(r.job.model, "dtype", None)
    if isinstance(model, (TextEmbedder, TextClassifier)) and asked == "int8" and r.place.device == "cpu":
        return _quantised(r, model)
    if open_to_choice(r):
        return _exported(r)
    return Chosen(r)


def _exported(r: Resolved) -> Chosen:
    from gristmill.models import export, fidelity

    assert isinstance(r.model, (TextEmbedder, TextClassifier))
    if not export.exportable():
        return Chosen(r)
    found = fidelity.verdict(r.model)
    onnx = stored(r, "onnx")
    if found is None:
        if not worth_exporting(r):
            return Chosen(r)
        try:
            found = fidelity.measured(onnx.model, r.model, _sample(r)).difference or 0.0  # type: ignore[arg-type]
        except BadModel as e:
            found = str(e)
        try:
            fidelity.remember(r.model, found)
        except OSError as e:
            return Chosen(r, (f"{r.model.name}: stays on torch: the cache cannot be written ({e})",))
    if isinstance(found, str):
        return Chosen(r, (f"{r.model.name}: stays on torch: {found}",))
    if not found <= fidelity.CLOSE:
        return Chosen(r, (f"{r.model.name}: stays on torch: exported to ONNX it differs by {found:.1e}",))
    return Chosen(onnx)


def foreseen(r: Resolved) -> str:
    """The backend that a new plan would get, and why, without exporting or loading anything; "" for other models."""
    model = r.model
    if not isinstance(model, (TextEmbedder, TextClassifier)):
        return ""
    if not open_to_choice(r):
        return model.backend
    from gristmill.models import export, fidelity

    if not export.exportable():
        return "torch (on ONNX Runtime where gristmill[export] is installed)"
    found = fidelity.verdict(model)
    if found is None:
        return "onnx (exported first, once)" if worth_exporting(r) else "torch (too small a job to export the model)"
    return "onnx (exported before)" if isinstance(found, float) and found <= fidelity.CLOSE else "torch"


def _quantised(r: Resolved, model: TextEmbedder | TextClassifier) -> Chosen:
    """Measure what int8 changes, where there is a float32 model to compare with and enough rows to care."""
    from gristmill.models import fidelity, registry

    if r.estimated_rows <= SAMPLE_ROWS:
        return Chosen(r)
    reference = replace(model, dtype="float32", backend="onnx")
    try:
        registry.encoder_files(reference)
    except BadModel:
        reference = None  # type: ignore[assignment]
    found = fidelity.measured(model, reference, _sample(r))
    return Chosen(r, (found.line(f"{model.name} in int8"),))


# ---------------------------------------------------------------- how long the job would take


def worth_exporting(r: Resolved) -> bool:
    """Whether torch would take long enough for an export to pay."""
    most = getattr(r.model, "max_length", None) or UNKNOWN_LENGTH
    speed = CORE_RATE * machine.cores()
    wanted = WORTH_SECONDS + WORTH_A_BYTE * r.info.weight_bytes
    if r.estimated_rows * most * r.info.flops_a_token / speed < wanted:
        return False
    lengths = [min(most, len(t) / CHARS_A_TOKEN + 2) for t in _sample(r).column(0).to_pylist() if t]
    mean = float(np.mean(lengths)) if lengths else 0.0
    return r.estimated_rows * mean * r.info.flops_a_token / speed >= wanted


def _sample(r: Resolved) -> pa.Table:
    """The first texts of the source; texts of our own where only the job's steps make the column."""
    column = r.model.text  # type: ignore[union-attr]
    if column not in r.schema.names:
        return pa.table({column: [f"{w} of an example" * n for n, w in enumerate(("One", "Two", "Three", "Four"), 1)]})
    found: list[pa.Table] = []
    rows = 0
    for block in _blocks(r, column):
        found.append(block.select([column]).slice(0, SAMPLE_ROWS - rows))
        rows += found[-1].num_rows
        if rows >= SAMPLE_ROWS:
            break
    return pa.concat_tables(found) if found else pa.table({column: pa.array([], pa.string())})


def _blocks(r: Resolved, column: str) -> Iterator[Any]:
    reading = registry.reading(r.job.source, (column,), r.schema, block_bytes=1 << 20)
    for index, start, stop in r.selection.ranges.tolist():
        for block in r.source_format.read(r.files[index], r.fs, np.array([[start, stop]]), reading):
            yield block.rows
