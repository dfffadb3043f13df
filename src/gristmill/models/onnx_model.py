"""ONNX graphs over feature columns: what each graph input gets is decided and checked before anything runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.errors import BadModel, did_you_mean
from gristmill.fingerprint.modelfiles import Digests, digests_of, inside, model_file
from gristmill.job.specs import OnnxModel
from gristmill.models.columns import check_columns, is_text
from gristmill.models.contract import ModelInfo, Place, Prepared
from gristmill.models.features import Ragged, Stacker, as_column, check_numbers, check_rows, in_calls, renamed, take
from gristmill.models.onnx import open_session
from gristmill.models.onnx_graph import Graph, Value, read_graph
from gristmill.process.extras import installed, require
from gristmill.values import dataclass


@dataclass(frozen=True)
class Feed:
    """What one graph input gets: one column as it is, or several stacked."""

    value: Value
    columns: tuple[str, ...]
    stacked: bool

    @property
    def width(self) -> int | None:
        """Values per row, if the graph fixes them."""
        shape = self.value.shape
        return shape[1] if shape is not None and len(shape) == 2 else None


def feeds_of(spec: OnnxModel, graph: Graph, schema: pa.Schema | None) -> tuple[Feed, ...]:
    """The columns for each graph input, by `inputs`, `features`, or names. Raises BadModel if an input has none."""
    names = [v.name for v in graph.inputs]
    if spec.inputs is not None:
        if spec.features is not None:
            raise BadModel(f"{spec.name}: features and inputs are both given: give one")
        return tuple(_given(spec, graph, spec.inputs))
    if spec.features is not None:
        if len(graph.inputs) != 1:
            raise BadModel(
                f"{spec.name}: features= is for a graph with one input, and this one has {', '.join(names)}: give "
                "inputs="
            )
        return (Feed(graph.inputs[0], tuple(spec.features), True),)
    missing = [n for n in names if schema is not None and n not in schema.names]
    if missing and len(graph.inputs) == 1:
        width = Feed(graph.inputs[0], (), True).width
        raise BadModel(
            f"{spec.name}: the graph's input {missing[0]!r} takes {width or 'several'} values per row, and no column "
            "has its name: give features= with the columns in the order of training"
        )
    if missing:
        raise BadModel(
            f"{spec.name}: the source has no column for the graph's {', '.join(missing)}: say with inputs= which "
            f"columns each of {', '.join(names)} gets"
        )
    return tuple(Feed(v, (v.name,), False) for v in graph.inputs)


def _given(spec: OnnxModel, graph: Graph, inputs: Mapping[str, Any]) -> list[Feed]:
    names = [v.name for v in graph.inputs]
    for given in inputs:
        if given not in names:
            hint = did_you_mean(given, names)
            raise BadModel(f"{spec.name}: inputs= names {given!r}; the graph has {', '.join(names)}{hint}")
    missing = [n for n in names if n not in inputs]
    if missing:
        raise BadModel(f"{spec.name}: inputs= has no column for the graph's {', '.join(missing)}")
    return [
        Feed(v, (inputs[v.name],), False)
        if isinstance(inputs[v.name], str)
        else Feed(v, tuple(str(c) for c in inputs[v.name]), True)
        for v in graph.inputs
    ]


def check_feed(feed: Feed, schema: pa.Schema | None, name: str) -> None:
    """Raises BadModel if the columns do not suit the graph's input in dtype, rank or width."""
    value = feed.value
    where = f"{name}: the graph's input {value.name!r}"
    if value.dtype in ("", "sequence", "map"):
        raise BadModel(f"{where} is not a tensor, so no column can be fed to it")
    if value.shape is not None:
        if not value.shape:
            raise BadModel(f"{where} is a single value, so no column can be fed to it")
        if value.shape[0] not in (None, 1):
            raise BadModel(f"{where} takes exactly {value.shape[0]} rows per call: export it with a dynamic first axis")
        if feed.stacked and len(value.shape) != 2:
            raise BadModel(f"{where} has {len(value.shape)} axes; columns side by side make 2")
    if value.dtype == "string":
        check_columns(schema, feed.columns, name)
        kinds = [] if schema is None else [(c, schema.field(c).type) for c in feed.columns]
        for column, kind in kinds:
            if not is_text(kind):
                raise BadModel(f"{where} takes text, but column {column!r} is {kind}")
        return
    check_numbers(schema, feed.columns, name)
    if schema is not None:
        _check_types(feed, schema, where)


def _check_types(feed: Feed, schema: pa.Schema, where: str) -> None:
    value = feed.value
    width = 0
    for column in feed.columns:
        kind = schema.field(column).type
        listed = hasattr(kind, "value_type") and not pa.types.is_dictionary(kind)
        inner = kind.value_type if listed else kind
        if value.dtype.startswith(("int", "uint", "bool")) and (
            pa.types.is_floating(inner) or pa.types.is_decimal(inner)
        ):
            raise BadModel(
                f"{where} takes {value.dtype}, but column {column!r} is {kind}: numbers would be truncated; cast it in "
                "a step"
            )
        if listed and value.shape is not None and len(value.shape) == 1:
            raise BadModel(f"{where} takes one value per row, but column {column!r} is {kind}")
        width += kind.list_size if pa.types.is_fixed_size_list(kind) else 1
        if listed and not pa.types.is_fixed_size_list(kind):
            return
    if feed.width is not None and width != feed.width:
        raise BadModel(
            f"{where} takes {feed.width} values per row, but "
            f"{', '.join(feed.columns[:8])}{' …' * (len(feed.columns) > 8)} {'give' if width > 1 else 'gives'} {width}"
        )


# ---------------------------------------------------------------- in the driver


@dataclass(frozen=True)
class _Parts:
    path: Path
    graph: Graph
    columns: Mapping[str, str]


def _parts(spec: OnnxModel) -> _Parts:
    path = model_file(spec.model, "ONNX", (".onnx",))
    graph = read_graph(path)
    columns = renamed([v.name for v in graph.outputs], spec.outputs, spec.output, spec.name)
    return _Parts(path, graph, columns)


def describe(spec: OnnxModel, schema: pa.Schema | None) -> ModelInfo:
    """Checks file, inputs and columns against each other; digests the files. Raises BadModel, MissingExtra."""
    parts = _parts(spec)
    if not installed("onnxruntime"):
        require("onnxruntime", "onnx", spec.name)
    feeds = feeds_of(spec, parts.graph, schema)
    for feed in feeds:
        check_feed(feed, schema, spec.name)
    digests = _digests(parts, spec)
    return ModelInfo(
        spec.name,
        columns=tuple(dict.fromkeys(c for feed in feeds for c in feed.columns)),
        outputs=tuple(parts.columns.values()),
        schema=_schema(parts),
        digest=digests.all,
        digests=digests.by_file,
        keeps_columns=True,
        filled=tuple(dict.fromkeys(c for feed in feeds for c in feed.columns)),
        library="onnxruntime",
    )


def _digests(parts: _Parts, spec: OnnxModel) -> Digests:
    external = [inside(parts.path.parent, n, spec.name) for n in parts.graph.external]
    lost = [p.name for p in external if not p.is_file()]
    if lost:
        raise BadModel(f"{spec.name}: its weights are in {', '.join(lost)} beside it, which is missing")
    return digests_of(parts.path.parent, [parts.path, *external], spec.sha256, spec.name)


def _schema(parts: _Parts) -> pa.Schema | None:
    """The output columns' types, if the graph gives the shapes of all outputs."""
    fields = []
    for value in parts.graph.outputs:
        if value.name not in parts.columns:
            continue
        if value.shape is None or len(value.shape) not in (1, 2) or value.shape[1:] == (None,) or not value.dtype:
            return None
        kind = pa.type_for_alias(value.dtype)
        if len(value.shape) == 2 and value.shape[1] != 1:
            kind = pa.list_(kind, value.shape[1])
        fields.append(pa.field(parts.columns[value.name], kind))
    return pa.schema(fields)


# ---------------------------------------------------------------- in a worker


def open_model(spec: OnnxModel, place: Place) -> LoadedOnnx:
    """Loads the graph."""
    return LoadedOnnx(spec, place)


class LoadedOnnx:
    """An `OnnxModel` at work. Rows have no lengths."""

    def __init__(self, spec: OnnxModel, place: Place) -> None:
        parts = _parts(spec)
        if spec.sha256 is not None:
            _digests(parts, spec)  # the files may have changed since the driver looked
        self._name = spec.name
        self._feeds = feeds_of(spec, parts.graph, None)
        for feed in self._feeds:
            check_feed(feed, None, spec.name)
        self._columns = parts.columns
        self._keep_nulls = place.keep_nulls
        # A graph made for exactly one row is called row by row.
        self._single = any(f.value.shape is not None and f.value.shape[0] == 1 for f in self._feeds)
        self._session = open_session(parts.path, place, spec.name)
        self.about = {
            "backend": "onnx",
            "device": place.device,
            "threads": place.threads,
            "dtype": parts.graph.precision,
        }

    def prepare(self, rows: pa.Table) -> Prepared:
        """Columns as the arrays that the graph takes; rows with null, NaN or infinite features are refused."""
        stacker = Stacker(rows, self._name, keep=self._keep_nulls)
        return Prepared(rows.num_rows, {f.value.name: _fed(stacker, f) for f in self._feeds}, None, stacker.refused)

    def predict(self, prepared: Prepared, index: np.ndarray) -> pa.Table:
        """The chosen outputs for the rows at `index`; rows whose lists have other lengths go in other calls. Raises
        BadOutput if an output has another number of rows.
        """
        return in_calls(prepared.inputs.values(), index, lambda some: self._answers(prepared, some))

    def _answers(self, prepared: Prepared, index: np.ndarray) -> pa.Table:
        names = list(self._columns)
        feeds = {name: np.ascontiguousarray(take(values, index)) for name, values in prepared.inputs.items()}
        if self._single and len(index) != 1:
            calls = [self._session.run(names, {n: v[i : i + 1] for n, v in feeds.items()}) for i in range(len(index))]
            results = [_together([c[k] for c in calls]) for k in range(len(names))]
        else:
            results = self._session.run(names, feeds)
        columns, fields = [], []
        for name, values in zip(names, results, strict=True):
            values, labels = _probabilities(values)
            check_rows(values, len(index), self._name, name)
            column = as_column(values, len(index), self._name, self._columns[name])
            columns.append(column)
            metadata = None if labels is None else {"labels": json.dumps(labels)}
            fields.append(pa.field(self._columns[name], column.type, metadata=metadata))
        return pa.table(columns, schema=pa.schema(fields))

    def close(self) -> None:
        """Nothing is held open."""


def _fed(stacker: Stacker, feed: Feed) -> np.ndarray | Ragged:
    if feed.stacked:
        return stacker.matrix(feed.columns, feed.value.dtype, feed.width)
    array = stacker.column(feed.columns[0], feed.value.dtype, feed.width if (feed.width or 0) > 1 else None)
    if isinstance(array, Ragged):
        return array
    if feed.value.shape is not None and len(feed.value.shape) == 2 and array.ndim == 1:
        return array.reshape(-1, 1)
    return array


def _together(parts: list[Any]) -> Any:
    if isinstance(parts[0], list):
        return [entry for part in parts for entry in part]
    return np.concatenate([p if p.ndim else p[None] for p in parts])


def _probabilities(values: Any) -> tuple[Any, list[Any] | None]:
    """A list of dicts label → probability (what ZipMap of sklearn-onnx gives) as [rows, labels], with the labels."""
    if isinstance(values, list) and values and isinstance(values[0], dict):
        labels = list(values[0])
        return np.array([[row[k] for k in labels] for row in values], dtype=np.float32), labels
    return values, None
