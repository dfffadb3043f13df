"""The backend of a text model when the job leaves it open: torch, or ONNX Runtime on an export of the same float32
weights.

Chosen once for a new plan and stored in it, outside the fingerprint, like batch budgets: both give the same values to
1e-5, which is measured on rows of the source before the choice. Precision is never chosen here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.topython import to_plain
from gristmill.driver.planning import Resolved
from gristmill.errors import BadModel
from gristmill.job.specs import TextSpec, changed
from gristmill.models.encoder import EXPORTED
from gristmill.process import machine
from gristmill.sources import formats

SAMPLE_ROWS = 32
# An export takes 8 s for MiniLM, 15 s with the comparison, and a minute for a base-size model; it saves half of torch's
# time or more (measured on a CPU), so only jobs that would take torch longer than this get one.
WORTH_SECONDS = 40.0
WORTH_A_BYTE = 60.0 / 440e6  # seconds: what a base-size model of 440 MB takes to export
CORE_RATE = 50e9  # FLOP/s of one core at work in torch, measured with MiniLM on two cores (104 GFLOP/s)
CHARS_A_TOKEN = 4  # for English text; assumed of unknown tokenizers
UNKNOWN_LENGTH = 512  # most tokens, if the model has no limit of its own


@dataclass(frozen=True)
class Chosen:
    """A resolved job with its backend chosen, and notes on the choice for the user."""

    resolved: Resolved
    notes: tuple[str, ...] = ()


def stored(r: Resolved, backend: str | None) -> Resolved:
    """The job on the backend that its plan was made for, if the job leaves the backend open."""
    if backend is None or not open_to_choice(r):
        return r
    runs = EXPORTED if backend == "onnx" else backend  # never a graph found in the folder, which may have other weights
    return replace(r, model=changed(r.model, backend=runs), place=replace(r.place, backend=backend))


def open_to_choice(r: Resolved) -> bool:
    """Whether a backend other than the resolved one would do: the job says auto, and the folder has float32 weights for
    torch only.
    """
    asked: Any = r.job.model
    if not r.info.exportable or asked.backend != "auto" or r.place.device != "cpu":
        return False
    return text_model(r).backend == "torch" and text_model(r).dtype == "float32"


def text_model(r: Resolved) -> TextSpec:
    """The model of a job whose ModelInfo says that it is exportable."""
    found: Any = r.model
    model: TextSpec = found
    return model


def settle(r: Resolved) -> Chosen:
    """Choose the backend of a new plan; measure int8 if the job asks for it. May export, which takes seconds."""
    if r.info.exportable and getattr(r.job.model, "dtype", None) == "int8" and r.place.device == "cpu":
        return _quantised(r, text_model(r))
    if open_to_choice(r):
        return _exported(r)
    return Chosen(r)


def _exported(r: Resolved) -> Chosen:
    from gristmill.models import export, fidelity

    model = text_model(r)
    if not export.exportable():
        return Chosen(r)
    found = fidelity.verdict(model)
    onnx = stored(r, "onnx")
    if found is None:
        if not worth_exporting(r):
            return Chosen(r)
        try:
            found = fidelity.measured(text_model(onnx), model, _sample(r)).difference or 0.0
        except BadModel as e:
            found = str(e)
        try:
            fidelity.remember(model, found)
        except OSError as e:
            return Chosen(r, (f"{r.model.name}: stays on torch: the cache cannot be written ({e})",))
    if isinstance(found, str):
        return Chosen(r, (f"{r.model.name}: stays on torch: {found}",))
    if not found <= fidelity.CLOSE:
        return Chosen(r, (f"{r.model.name}: stays on torch: exported to ONNX it differs by {found:.1e}",))
    return Chosen(onnx)


def foreseen(r: Resolved) -> str:
    """The backend that a new plan would get, and why, without exporting or loading anything; "" for other models."""
    if not r.info.exportable:
        return ""
    model = text_model(r)
    if not open_to_choice(r):
        return "onnx" if model.backend == EXPORTED else model.backend
    from gristmill.models import export, fidelity

    if not export.exportable():
        return "torch (on ONNX Runtime where gristmill[export] is installed)"
    found = fidelity.verdict(model)
    if found is None:
        return "onnx (exported first, once)" if worth_exporting(r) else "torch (too small a job to export the model)"
    return "onnx (exported before)" if isinstance(found, float) and found <= fidelity.CLOSE else "torch"


def _quantised(r: Resolved, model: TextSpec) -> Chosen:
    """Measure what int8 changes, if there is a float32 model to compare with and there are enough rows to matter."""
    from gristmill.models import fidelity, kinds

    if r.estimated_rows <= SAMPLE_ROWS:
        return Chosen(r)
    reference: TextSpec | None
    try:
        reference = kinds.resolve(changed(model, dtype="float32", backend="auto"))
    except BadModel:
        reference = None
    try:
        found = fidelity.measured(model, reference, _sample(r))
    except BadModel as e:  # only a figure for the report: no reason to end the job
        return Chosen(r, (f"{model.name} in int8: not compared with float32: {e}",))
    return Chosen(r, (found.line(f"{model.name} in int8"),))


# ---------------------------------------------------------------- how long the job would take


def worth_exporting(r: Resolved) -> bool:
    """Whether torch would take long enough for an export to pay."""
    most = getattr(r.model, "max_length", None) or UNKNOWN_LENGTH
    speed = CORE_RATE * machine.cores()
    wanted = WORTH_SECONDS + WORTH_A_BYTE * r.info.weight_bytes
    if r.estimated_rows * most * r.info.flops_a_token / speed < wanted:
        return False
    lengths = [min(most, len(t) / CHARS_A_TOKEN + 2) for t in to_plain(_sample(r).column(0)) if t]
    mean = float(np.mean(lengths)) if lengths else 0.0
    return r.estimated_rows * mean * r.info.flops_a_token / speed >= wanted


def _sample(r: Resolved) -> pa.Table:
    """The first texts of the source; built-in texts if only the job's steps make the column."""
    column = text_model(r).text
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
    reading = formats.reading(r.job.source, (column,), r.schema, block_bytes=1 << 20)
    for index, start, stop in r.selection.ranges.tolist():
        for block in r.source_format.read(r.files[index], r.fs, np.array([[start, stop]]), reading):
            yield block.rows
