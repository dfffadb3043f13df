"""For use from Spark: the engine with options, `gm.spark(…)`, and a model as a column expression in a query."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from gristmill.arrow.casts import Lossy, fitted
from gristmill.arrow.rows import picked
from gristmill.errors import BadJob, BadModel, BadOutput, MissingExtra, PlanChanged, RunFailed
from gristmill.fingerprint.loadedmodules import listen, outdated
from gristmill.fingerprint.pins import Approved, Named, Pin, Planned
from gristmill.job.options import Auto, spark
from gristmill.job.specs import ModelSpec, as_model, changed
from gristmill.models.contract import ModelInfo, Place, Prepared
from gristmill.process.pickling import by_value
from gristmill.process.startup import become_worker, import_path
from gristmill.values import dataclass
from gristmill.worker.batches import (
    CPU_TOKENS,
    GPU_TOKENS,
    MOST_ROWS,
    ROWS_WITHOUT_LENGTHS,
    Budget,
    cut_lazily,
    padded_tokens,
)
from gristmill.worker.budgetsearch import Search

__all__ = ["predict_udf"]

_ANEW = "call predict_udf again"


def predict_udf(
    model: Any,
    *,
    on_null: Literal["null", "raise"] = "null",
    on_error: Literal["raise", "null"] = "raise",
    batch_tokens: int | Auto = "auto",
    batch_rows: int | Auto = "auto",
    threads: int = 1,
    returns: Mapping[str, str] | None = None,
) -> Callable[..., Any]:
    """A model as a column expression: `df.withColumn("vector", predict_udf(gm.TextEmbedder("minilm", text="body"))())`.

    Call what it returns with the columns that the model reads, in the model's order (`embed("title")`) or by name
    (`score(x="x", y=col("a") + 1)`), or with none if the model names its columns. The result is one column, or a struct
    if the model has several outputs. Each Python worker loads the model once, and cuts each Arrow batch by padded
    tokens. A null text gives null, as do rows that the model refuses or fails on with `on_error="null"`. A wrong number
    of rows always fails. Unlike a job, a query has no receipts and no dead letters.

    Spark's Python workers need Gristmill too; set `PYSPARK_PYTHON` to their interpreter before the session starts.
    Spark must know the types in advance: give `returns={"output": "float32"}`, or `"list<float32>"` for several numbers
    a row, for a model that does not declare them (a function without returns=, TorchScript, scikit-learn). Raises
    BadModel if it is not a model, or the types are not known: it says which they are, if rows of zeros show it.
    """
    from gristmill.models import kinds, registrations
    from gristmill.models.returns import parse_schema

    for name, value, allowed in (("on_null", on_null, ("null", "raise")), ("on_error", on_error, ("raise", "null"))):
        if value not in allowed:
            raise BadJob(f"{name} is {value!r}: it must be one of {', '.join(allowed)}")
    registered = registrations.found(as_model(model))
    spec = kinds.resolve(as_model(model) if registered is None else registered.spec)
    info = kinds.describe(spec, None)
    if registered is not None:
        registered.check_loaded(info.digests)
    schema = info.schema if returns is None else parse_schema(returns)
    if schema is None:
        raise BadModel(_untyped(spec, info))
    if info.digest and hasattr(spec, "sha256"):
        spec = changed(spec, sha256=info.digest)
    modules, files = _rests_on(spec, info)
    named: tuple[Named | Approved, ...] = files if registered is None else (*files, *registered.approved)
    shipped = _Shipped(
        spec, info.on_gpu, info.by_tokens, schema, on_null, on_error, batch_tokens, batch_rows, threads, modules, named
    )
    return _Expression(spec.name, info.columns, schema, _udf(shipped))


def _untyped(spec: ModelSpec, info: ModelInfo) -> str:
    """What to write for a model that does not declare its types."""
    need = f"{spec.name}: Spark must know the columns before it runs, with their types"
    if (found := _on_zeros(spec, info)) is not None:
        return f"{need}; as it answers rows of zeros, these are: predict_udf(model, {_told(found)})"
    name = (info.outputs or (getattr(spec, "output", None) or "output",))[0]
    one, several = (_told(pa.schema([(name, kind)])) for kind in (pa.float32(), pa.list_(pa.float32())))
    return f"{need}: predict_udf(model, {one}), or {several} if it answers several numbers a row"


def _on_zeros(spec: ModelSpec, info: ModelInfo) -> pa.Schema | None:
    """What a model of columns that it names answers to a few rows of zeros, or of empty texts; None if it takes neither
    or is the user's own code, which is not run here.
    """
    from gristmill.models import kinds

    if info.call is not None or info.asks or not info.columns:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = kinds.open(spec, Place("cpu", getattr(spec, "dtype", "auto"), 1, getattr(spec, "backend", "auto")))
    except Exception:  # a file that needs a GPU, a library that is not here: the executors may do better
        return None
    try:
        return next(
            (found for value in (0.0, 0, "") if (found := _answer_to(model, info.columns, value)) is not None), None
        )
    finally:
        model.close()


def _answer_to(model: Any, columns: tuple[str, ...], value: Any) -> pa.Schema | None:
    rows = pa.table({name: [value] * 3 for name in columns})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared = model.prepare(rows)
            return None if prepared.refused else model.predict(prepared, np.arange(rows.num_rows)).schema
    except Exception:  # it takes other values
        return None


def _told(schema: pa.Schema) -> str:
    """`returns=` for these columns."""
    columns = ", ".join(f'"{f.name}": "{_text(_plain(f.type))}"' for f in schema)
    return f"returns={{{columns}}}"


def _text(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"list<{_text(kind.value_type)}>"
    return {"float": "float32", "double": "float64"}.get(str(kind), str(kind))


def _rests_on(spec: ModelSpec, info: ModelInfo) -> tuple[tuple[Pin, ...], tuple[Named, ...]]:
    """The user's modules, and the files that arguments name, as they are now. They give a retrained model another
    payload: Spark's Python workers live on from query to query.
    """
    from gristmill.fingerprint import code
    from gristmill.fingerprint.modelfiles import Looked
    from gristmill.fingerprint.pins import named_pins, pins
    from gristmill.job.secret import secrets_in

    looked: dict[str, Looked] = {}
    found = code.digests_of_code(info.code, [], looked, ())
    if info.call is not None:
        found |= code.digests(info.call, [], looked)
    return pins(found), named_pins(found, tuple(secrets_in(spec)), looked)


class _Callable(types.ModuleType):
    """This module, which can be called like `gm.local` and `gm.ray`."""

    __call__ = staticmethod(spark)
    predict_udf = staticmethod(predict_udf)


CALLABLE: _Callable = _Callable(__name__)  # what type checkers see; the module itself becomes one
sys.modules[__name__].__class__ = _Callable


class _Expression:
    def __init__(self, name: str, columns: tuple[str, ...] | None, schema: pa.Schema, udf: Any) -> None:
        self._name = name
        self._columns = columns
        self._outputs = schema.names
        self._udf = udf

    def __call__(self, *columns: Any, **named: Any) -> Any:
        from pyspark.sql import functions as f

        given = dict(named)
        names = self._columns if self._columns is not None else columns
        if len(columns) > len(names) or not all(isinstance(n, str) for n in names[: len(columns)]):
            raise BadJob(
                f"{self._name} was given {len(columns)} columns, but it reads {', '.join(map(str, names)) or 'none'}: "
                "give an expression as name=column"
            )
        given |= dict(zip(names, columns, strict=False))
        for name in self._columns or ():
            given.setdefault(name, name)
        if not given:
            raise BadJob(f"{self._name} was given no column: name those that it reads")
        struct = f.struct(*[(f.col(c) if isinstance(c, str) else c).alias(n) for n, c in given.items()])
        return self._udf(struct).alias(self._outputs[0] if len(self._outputs) == 1 else self._name)


# ---------------------------------------------------------------- in a Python worker of Spark


@dataclass(frozen=True)
class _Shipped:
    """What is sent to a Python worker."""

    spec: ModelSpec
    on_gpu: bool
    by_tokens: bool
    schema: pa.Schema
    on_null: str
    on_error: str
    tokens: int | Auto
    rows: int | Auto
    threads: int
    modules: tuple[Pin, ...]
    named: tuple[Named | Approved, ...]


def _udf(shipped: _Shipped) -> Any:
    """The user-defined function over a struct of the model's columns: in Arrow, or in pandas before Spark 4.1."""
    try:
        from pyspark.sql import functions as f
    except ModuleNotFoundError as e:
        raise MissingExtra("predict_udf needs pyspark, which is not installed: pip install 'gristmill[spark]'") from e
    payload = by_value((import_path(), by_value(shipped)))
    kind = _spark_type(shipped.schema)
    if not hasattr(f, "arrow_udf"):
        return _pandas_udf(payload, kind)

    def predict(rows: pa.Array) -> pa.Array:
        return _one(_loaded(payload).score(pa.Table.from_struct_array(rows)))

    return f.arrow_udf(predict, kind)


def _pandas_udf(payload: bytes, kind: Any) -> Any:
    import pandas as pd
    from pyspark.sql.functions import pandas_udf

    def predict(rows):  # type: ignore[no-untyped-def]  # Spark evaluates the hints, which it needs as types
        result = _loaded(payload).score(pa.Table.from_pandas(rows, preserve_index=False))
        return result.to_pandas() if result.num_columns > 1 else result.column(0).to_pandas()

    several = kind.typeName() == "struct"
    predict.__annotations__ = {"rows": pd.DataFrame, "return": pd.DataFrame if several else pd.Series}
    return pandas_udf(predict, kind)


def _one(table: pa.Table) -> pa.Array:
    """The only column, or all columns as a struct that is null where they all are."""
    columns = [c.combine_chunks() for c in table.columns]
    columns = [pa.concat_arrays(c.chunks) if isinstance(c, pa.ChunkedArray) else c for c in columns]
    if len(columns) == 1:
        return columns[0]
    empty = functools.reduce(np.logical_and, [c.is_null().to_numpy(zero_copy_only=False) for c in columns])
    return pa.StructArray.from_arrays(columns, names=table.column_names, mask=pa.array(empty))


def _plain(kind: pa.DataType) -> pa.DataType:
    """A type as Spark has it: lists have no fixed length, and floats at least 32 bits."""
    if pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind) or pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    return pa.float32() if pa.types.is_float16(kind) else kind


def _spark_type(schema: pa.Schema) -> Any:
    from pyspark.sql.pandas.types import from_arrow_schema

    kind = from_arrow_schema(pa.schema([pa.field(f.name, _plain(f.type)) for f in schema]))
    return kind if len(schema) > 1 else kind.fields[0].dataType


@functools.lru_cache(maxsize=2)
def _loaded(payload: bytes) -> _Loaded:
    import pickle

    become_worker()
    listen()
    path, shipped = pickle.loads(payload)
    sys.path += [p for p in path if p not in sys.path]  # modules of the driver, if they are on this machine too
    return _Loaded(pickle.loads(shipped))


class _Loaded:
    """A model in a Python worker, and the budget that fits in its memory."""

    def __init__(self, shipped: _Shipped) -> None:
        from gristmill.models import kinds
        from gristmill.worker.bisection import Doubt

        self._shipped = shipped
        planned = Planned(shipped.modules, shipped.named, _ANEW)
        device = _device(shipped.spec, shipped.on_gpu)
        place = Place(
            device,
            getattr(shipped.spec, "dtype", "auto"),
            shipped.threads,
            getattr(shipped.spec, "backend", "auto"),
        )
        self._model = kinds.open(shipped.spec, place)
        planned.look()
        if old := outdated(shipped.modules):
            raise PlanChanged(
                f"{old[0]} has changed since this Python worker of Spark imported it: end the session and begin "
                "another (or set spark.python.worker.reuse to false)"
            )
        tokens = (GPU_TOKENS if device != "cpu" else CPU_TOKENS) if shipped.tokens == "auto" else shipped.tokens
        rows = (
            (MOST_ROWS if shipped.by_tokens else ROWS_WITHOUT_LENGTHS * 32) if shipped.rows == "auto" else shipped.rows
        )
        self._budgets = Search(Budget(tokens, rows))
        self._good: tuple[Prepared, np.ndarray] | None = None
        self._doubt = Doubt(self._still_works)

    def score(self, rows: pa.Table) -> pa.Table:
        """One output row per row, null for a row without one. Raises BadOutput and RunFailed."""
        shipped, name = self._shipped, self._shipped.spec.name
        prepared = self._model.prepare(rows)
        for refusal in prepared.refused:
            if (shipped.on_null if refusal.kind == "null" else shipped.on_error) == "raise":
                raise RunFailed(
                    f"{name}: {refusal.error}: {refusal.message} (on_null and on_error say what happens to such rows)"
                )
        refused = {r.row for r in prepared.refused}
        alive = np.array([i for i in range(rows.num_rows) if i not in refused], dtype=np.int64)

        def budget() -> Budget:
            return self._budgets.now(prepared.lengths is not None)

        places, tables = [np.empty(0, dtype=np.int64)], [pa.Table.from_batches([], shipped.schema)]
        for batch in cut_lazily(prepared.lengths, alive, budget, prepared.apart):
            found = self._isolation(prepared).score(batch)
            if found.dead and shipped.on_error == "raise":
                dead = found.dead[0]
                raise RunFailed(
                    f"{name}: {dead.error}: {dead.message}; on_error='null' gives null instead\n{dead.traceback}"
                )
            places += [index for index, _ in found.outputs]
            tables += [_cast(table, shipped.schema, name) for _, table in found.outputs]
        where = np.full(rows.num_rows, -1, dtype=np.int64)
        index = np.concatenate(places)
        where[index] = np.arange(len(index))
        outputs = picked(pa.concat_tables(tables).combine_chunks(), pa.array(where, mask=where < 0))
        return outputs.cast(pa.schema([pa.field(f.name, _plain(f.type)) for f in outputs.schema]))

    def _isolation(self, prepared: Prepared) -> Any:
        from gristmill.models.outofmemory import is_out_of_memory, release_memory
        from gristmill.worker.bisection import Isolation, Stage, length_error

        def call(index: np.ndarray) -> pa.Table:
            output = self._model.predict(prepared, index)
            if output.num_rows != len(index):
                raise length_error(self._shipped.spec.name, len(index), output.num_rows)
            self._good = (prepared, index[:1])
            return output

        def shrink(index: np.ndarray) -> None:
            release_memory()
            padded = None if prepared.lengths is None else padded_tokens(prepared.lengths, index)
            self._budgets = self._budgets.out_of_memory(len(index), padded)

        return Isolation(call, stage=Stage.MODEL, out_of_memory=is_out_of_memory, shrink=shrink, doubt=self._doubt)

    def _still_works(self) -> bool | None:
        if self._good is None:
            return None
        try:
            self._model.predict(*self._good)
        except Exception:  # any failure answers the question
            return False
        return True


def _device(spec: ModelSpec, on_gpu: bool) -> str:
    """The GPU that Spark has given this task, if the model may run on one; else the model's own device."""
    device = str(getattr(spec, "device", "auto"))
    if device != "auto":
        return device
    if not on_gpu:
        return "cpu"
    from pyspark import TaskContext

    context = TaskContext.get()
    gpus = context.resources().get("gpu") if context is not None else None
    return f"cuda:{gpus.addresses[0]}" if gpus is not None else "cpu"


def _cast(table: pa.Table, schema: pa.Schema, name: str) -> pa.Table:
    try:
        return fitted(table.select(schema.names), schema)
    except (KeyError, Lossy) as e:
        raise BadOutput(
            f"{name} returned other columns than Spark was told ({e}): call predict_udf with {_told(table.schema)}, "
            f"not {_told(schema)}"
        ) from e
