"""A user's function, of a batch or of one row, or a class built once per worker, as a model."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from gristmill.errors import BadModel
from gristmill.job.specs import Call, FunctionModel
from gristmill.models.calls import check_arguments, is_async
from gristmill.models.contract import ModelInfo, Place
from gristmill.models.returns import parse_schema
from gristmill.models.takes import takes_of
from gristmill.process.extras import installed, require
from gristmill.process.targets import import_target

if TYPE_CHECKING:
    from gristmill.models.batchfunction import LoadedFunction

AT_ONCE = 32  # rows for which a function of one row is called at a time, unless the job says how many


def describe(spec: FunctionModel, schema: pa.Schema | None) -> ModelInfo:
    """What is known of it without running it. Raises BadModel for a callable or types that cannot be used."""
    target = spec.call.target
    if isinstance(target, str):
        target = import_target(target)
    by_row = _by_row(spec.call, target)
    if by_row:
        _check_meant(spec, target)
    call = replace(spec.call, batch_format="row") if by_row else spec.call
    check_arguments(replace(call, target=target))
    form = call.batch_format
    if form in ("pandas", "polars") and not installed(form):
        require(form, form, f"{spec.name} with batch_format={form!r}")
    known = parse_schema(spec.returns) if spec.returns is not None else None
    if known is not None and spec.output is not None and known.names != [spec.output]:
        raise BadModel(
            f"output={spec.output!r} renames one column, but returns= has {', '.join(known.names) or 'none'}"
        )
    outputs = None if known is None else tuple(known.names)
    at_once = (spec.concurrency or AT_ONCE) if by_row else 0
    info = ModelInfo(spec.name, outputs=outputs, schema=known, call=call, on_gpu=False, at_once=at_once)
    takes = takes_of(call)
    if takes is None:
        return info
    takes.check(schema)
    return replace(info, columns=takes.columns, filled=takes.filled)


def open_model(spec: FunctionModel, place: Place) -> LoadedFunction:
    """Imports the function or builds the class."""
    target = import_target(spec.call.target) if isinstance(spec.call.target, str) else spec.call.target
    if not _by_row(spec.call, target):
        from gristmill.models.batchfunction import LoadedFunction

        return LoadedFunction(spec, place)
    from gristmill.models.rowfunction import LoadedRows

    return LoadedRows(spec, replace(place, at_once=place.at_once or spec.concurrency or AT_ONCE))


def _by_row(call: Call, target: Any) -> bool:
    """Whether it is a function of one row. Raises BadModel for one that is async and declared to take batches."""
    if is_async(target) and call.batch_format not in ("numpy", "row"):
        raise BadModel(
            f"{call.name} is an async function, which is called with one row as a dict: leave out batch_format "
            f"({call.batch_format!r})"
        )
    return call.batch_format == "row" or is_async(target)


_BATCHES = ("batch", "batches", "df", "frame", "dataframe", "rows", "table")


def _check_meant(spec: FunctionModel, target: Any) -> None:
    """Raises BadModel for a function of one row, by its concurrency or as it is async, whose argument is called a
    batch: others' `concurrency` is the number of workers. `batch_format="row"` alone says that a row is meant.
    """
    if spec.call.batch_format == "row" and spec.concurrency is None:
        return
    try:
        called = target.__call__ if isinstance(target, type) else target
        names = [name for name in inspect.signature(called).parameters if name != "self"]
    except (ValueError, TypeError):  # C code does not tell its arguments
        return
    if names[:1] and names[0].lower() in _BATCHES:
        raise BadModel(
            f"{spec.name} is to be called with one row as a dict, and its argument is named {names[0]!r}: give a plain "
            "function of a batch, without concurrency= (more processes are workers=); if it takes a row, name that so"
        )
