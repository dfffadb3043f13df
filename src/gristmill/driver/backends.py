"""The backend of a text model when the job leaves it open: torch, or ONNX Runtime or OpenVINO on an export of the same
weights, whichever is the fastest on this machine.

Chosen once for a new plan and stored in it, outside the fingerprint, like batch budgets. In float32 all give the same
values to 1e-5, which is measured on rows of the source before the choice, as speed is; both are remembered by model and
machine. Precision is never chosen here: for one that is asked for, what it changes is measured and told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gristmill.arrow.topython import to_plain
from gristmill.driver.planning import Resolved
from gristmill.errors import BadModel
from gristmill.job.specs import EXPORTED, TextSpec, changed
from gristmill.process import machine
from gristmill.process.extras import installed
from gristmill.sources import formats
from gristmill.values import dataclass

if TYPE_CHECKING:
    from gristmill.models.runtimes import Runtimes

SAMPLE_ROWS = 32
# Tracing takes 8 s for MiniLM, 15 s with the comparison, and a minute for a base-size model; it saves half of torch's
# time or more (measured on a CPU), so only jobs that would take torch longer than this get one.
WORTH_SECONDS = 40.0
WORTH_A_BYTE = 60.0 / 440e6  # seconds: what a base-size model of 440 MB takes to trace
# A graph that is there, or is written from the weights, takes hardly more than loading torch for the comparison, which
# every worker would do that ran on torch.
QUICK_SECONDS = 10.0
QUICK_A_BYTE = 5.0 / 440e6
CORE_RATE = 50e9  # FLOP/s of one core at work in torch, measured with MiniLM on two cores (104 GFLOP/s)
CHARS_A_TOKEN = 4  # for English text; assumed of unknown tokenizers
UNKNOWN_LENGTH = 512  # most tokens, if the model has no limit of its own
REDUCED = ("bfloat16",)  # what both torch and OpenVINO compute


@dataclass(frozen=True)
class Chosen:
    """A resolved job with its backend chosen, and notes on the choice for the user."""

    resolved: Resolved
    notes: tuple[str, ...] = ()


def stored(r: Resolved, backend: str | None) -> Resolved:
    """The job on the backend that its plan was made for, if the job leaves the backend open."""
    if backend is None or not open_to_choice(r):
        return r
    return replace(r, model=on(text_model(r), backend), place=replace(r.place, backend=backend))


def on(model: TextSpec, backend: str) -> TextSpec:
    """The model on a backend: never on a graph found in the folder, which may have other weights."""
    return changed(model, backend=EXPORTED.get(backend, backend))


def open_to_choice(r: Resolved) -> bool:
    """Whether a backend other than the resolved one would do: the job says auto, and torch would run the folder's
    weights, on a CPU.
    """
    asked: Any = r.job.model
    if not r.info.exportable or asked.backend != "auto" or r.place.device != "cpu":
        return False
    model = text_model(r)
    return model.backend == "torch" and (model.dtype == "float32" or (model.dtype in REDUCED and asked.dtype != "auto"))


def rivals(r: Resolved) -> dict[str, TextSpec]:
    """What a job that is open to choice may run on here, by backend, torch first."""
    from gristmill.models import export

    model = text_model(r)
    found = {"torch": model}
    if export.exportable() and model.dtype == "float32":
        found["onnx"] = on(model, "onnx")
    if export.exportable() and installed("openvino"):
        found["openvino"] = on(model, "openvino")
    return found


def text_model(r: Resolved) -> TextSpec:
    """The model of a job whose ModelInfo says that it is exportable."""
    found: Any = r.model
    model: TextSpec = found
    return model


def settle(r: Resolved, *, thorough: bool = False) -> Chosen:
    """Choose the backend of a new plan; measure a reduced precision if the job asks for it. May export, and load torch
    for a comparison, which takes seconds: for a small job only if `thorough`.
    """
    if not r.info.exportable or r.place.device != "cpu":
        return Chosen(r)
    chosen = _fastest(r, thorough) if open_to_choice(r) else _asked(r)
    if getattr(r.job.model, "dtype", "auto") == "auto" or text_model(r).dtype not in ("int8", *REDUCED):
        return chosen
    told = _fidelity(chosen.resolved, text_model(chosen.resolved))
    return replace(chosen, notes=(*chosen.notes, *told))


def _fastest(r: Resolved, thorough: bool) -> Chosen:
    from gristmill.models import fidelity, runtimes

    model = text_model(r)
    specs = rivals(r)
    if len(specs) == 1:
        return Chosen(r)
    found = runtimes.recall(model)
    if found is None or not set(specs) <= set(found):  # OpenVINO, say, was installed since
        if not (thorough or worth_comparing(r)):
            return Chosen(r)
        found, problem = _measured(r, specs)
        if problem:
            return Chosen(r, (f"{r.model.name}: stays on torch: the cache cannot be written ({problem})",))
    best = runtimes.fastest({n: f for n, f in found.items() if n in specs}, _bound(model))
    if best != "torch":
        return Chosen(stored(r, best))
    one = found.get("onnx", runtimes.Runtime())
    if one.failed:
        return Chosen(r, (f"{r.model.name}: stays on torch: {one.failed}",))
    if not one.difference <= fidelity.CLOSE:
        return Chosen(r, (f"{r.model.name}: stays on torch: exported to ONNX it differs by {one.difference:.1e}",))
    return Chosen(r)


def usable(r: Resolved) -> tuple[str, ...]:
    """The backends that a settled job may run on here, by what was measured; none if it is not open to choice."""
    r = _undone(r)
    if not open_to_choice(r):
        return ()
    from gristmill.models import runtimes

    found = runtimes.recall(text_model(r)) or {}
    bound = _bound(text_model(r))
    return tuple(n for n in rivals(r) if n in found and not found[n].failed and found[n].difference <= bound)


def keep(r: Resolved, rates: Mapping[str, float]) -> None:
    """Remember rates by backend that were measured more thoroughly, of all that a job may run on, in any one unit.
    Failing to write is no error.
    """
    from gristmill.models import runtimes

    names = usable(r)
    if len(names) < 2 or not set(names) <= rates.keys():
        return
    model = text_model(_undone(r))
    found = {n: replace(f, rate=rates.get(n, 0.0)) for n, f in (runtimes.recall(model) or {}).items()}
    with contextlib.suppress(OSError):
        runtimes.remember(model, found)


def _undone(r: Resolved) -> Resolved:
    """The job before its backend was settled, if that was left open."""
    asked: Any = r.job.model
    if not r.info.exportable or asked.backend != "auto" or text_model(r).backend not in EXPORTED.values():
        return r
    return replace(r, model=changed(text_model(r), backend="torch"))


def _bound(model: TextSpec) -> float:
    """How far from torch in float32 what runs unasked may be; any, if a precision that differs was asked for."""
    from gristmill.models import fidelity

    return fidelity.CLOSE if model.dtype == "float32" else float("inf")


def _measured(r: Resolved, specs: dict[str, TextSpec]) -> tuple[Runtimes, str]:
    """What the runtimes reach, kept for later runs; and why it cannot be kept."""
    from gristmill.models import runtimes

    model = text_model(r)
    reference = changed(model, dtype="float32", backend="torch")
    found: Runtimes
    try:
        found = runtimes.measured(specs, reference, _sample(r))
    except BadModel as e:
        found = {n: runtimes.Runtime(failed="" if n == "torch" else str(e)) for n in specs}
    try:
        runtimes.remember(model, found)
    except OSError as e:
        return found, str(e)
    return found, ""


def _asked(r: Resolved) -> Chosen:
    """A job that says which backend. What an export that it needs is worth is measured with it, as torch is loaded to
    compare them anyway: so later jobs that leave the backend open know.
    """
    from gristmill.models import export, kinds, runtimes

    model = text_model(r)
    if model.dtype != "float32" or model.backend not in EXPORTED or not export.exportable():
        return Chosen(r)
    files = kinds.transformer(model).files_of(model)
    open_job = replace(r, model=changed(model, backend="torch"))
    if files.graph is None and runtimes.recall(text_model(open_job)) is None and worth_comparing(open_job):
        _measured(open_job, rivals(open_job))
    return Chosen(r)


def foreseen(r: Resolved) -> str:
    """The backend that a new plan would get, and why, without exporting or loading anything; "" for other models."""
    if not r.info.exportable:
        return ""
    model = text_model(r)
    if not open_to_choice(r):
        return next((n for n, export in EXPORTED.items() if export == model.backend), model.backend)
    from gristmill.models import runtimes

    specs = rivals(r)
    if len(specs) == 1:
        extra = "export" if model.dtype == "float32" else "openvino"
        return f"torch (another is compared with it where gristmill[{extra}] is installed)"
    found = runtimes.recall(model)
    if found is None:
        few = "torch (too small a job to compare others with it)"
        return f"the fastest of {', '.join(specs)} (compared first, once)" if worth_comparing(r) else few
    best = runtimes.fastest({n: f for n, f in found.items() if n in specs}, _bound(model))
    return f"{best} (compared before)"


def _fidelity(r: Resolved, model: TextSpec) -> tuple[str, ...]:
    """Measure what a reduced precision changes, if there is a float32 model to compare with, and rows enough."""
    from gristmill.models import fidelity

    if r.estimated_rows <= SAMPLE_ROWS:
        return ()
    try:
        found = fidelity.measured(model, _full(model), _sample(r))
    except BadModel as e:  # only a figure for the report: no reason to end the job
        return (f"{model.name} in {model.dtype}: not compared with float32: {e}",)
    return (found.line(f"{model.name} in {model.dtype}"),)


def _full(model: TextSpec) -> TextSpec | None:
    """The same in float32: its export, if that is known to be equal to torch and so spares loading it."""
    from gristmill.models import fidelity, kinds, runtimes

    try:
        full = kinds.resolve(changed(model, dtype="float32", backend="auto"))
    except BadModel:
        return None
    if full.backend != "torch":
        return full
    one = (runtimes.recall(full) or {}).get("onnx")
    good = one is not None and not one.failed and one.difference <= fidelity.CLOSE
    return on(full, "onnx") if good else full


# ---------------------------------------------------------------- how long the job would take


def worth_comparing(r: Resolved) -> bool:
    """Whether torch would take long enough for a comparison with others, and the export that it needs, to pay."""
    from gristmill.models import export, kinds

    model = text_model(r)
    kind = kinds.transformer(model)
    trusted = bool(getattr(model, "trust_remote_code", False))
    quick = export.quick(kind.files_of(model), kind.TASK, model.name, code=trusted)
    least, a_byte = (QUICK_SECONDS, QUICK_A_BYTE) if quick else (WORTH_SECONDS, WORTH_A_BYTE)
    wanted = least + a_byte * r.info.weight_bytes
    most = getattr(model, "max_length", None) or UNKNOWN_LENGTH
    speed = CORE_RATE * machine.cores()
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
