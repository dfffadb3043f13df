"""A model kind: text in capitals, with some exclamation marks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.errors import BadModel
from gristmill.job.specs import ModelSpec
from gristmill.models.contract import Model, ModelInfo, Place, Prepared, Refusal


@dataclass(frozen=True)
class Shout:
    """What a job says: `model: {shout: COLUMN, volume: 2}`, or `Shout("column", volume=2)`."""

    home: ClassVar[str] = __name__  # the module that has describe and open_model: this one
    not_shaping: ClassVar[Mapping[str, str]] = {}  # fields that do not change what is written, with the reason

    column: str = field(metadata={"help": "The column that holds the text"})
    volume: int = field(default=1, metadata={"help": "How many exclamation marks"})
    output: str = "shouted"

    @property
    def name(self) -> str:
        """How errors and reports call it."""
        return f"shout {self.column}"


def describe(spec: Shout, schema: pa.Schema | None) -> ModelInfo:
    """In the driver, without loading anything; `schema` is None where steps may change the columns before."""
    if spec.volume < 0:
        raise BadModel(f"{spec.name}: volume is {spec.volume}: give at least 0")
    if schema is not None and spec.column not in schema.names:
        raise BadModel(f"{spec.name}: there is no column {spec.column!r}: the source has {', '.join(schema.names)}")
    return ModelInfo(
        spec.name,
        columns=(spec.column,),
        outputs=(spec.output,),
        schema=pa.schema([(spec.output, pa.string())]),
        keeps_columns=True,
        filled=(spec.column,),
        on_gpu=False,
    )


def open_model(spec: Shout, place: Place) -> Shouting:
    """In a worker, once; `place` says device, threads and precision."""
    return Shouting(spec, place)


class Shouting:
    """The loaded model."""

    def __init__(self, spec: Shout, place: Place) -> None:
        self._spec = spec
        self._keep_nulls = place.keep_nulls

    def prepare(self, rows: pa.Table) -> Prepared:
        """Rows made ready, in a thread of its own; what is refused here is a dead letter, or as `on_null` says."""
        texts = rows.column(self._spec.column)
        nulls = np.flatnonzero(texts.is_null().to_numpy() & (not self._keep_nulls)).tolist()
        refused = [Refusal(n, "null", "NullText", f"column {self._spec.column!r} is null") for n in nulls]
        return Prepared(rows.num_rows, texts, refused=tuple(refused))

    def predict(self, prepared: Prepared, index: np.ndarray) -> pa.Table:
        """One output row for each number in `index`, in that order."""
        texts = prepared.inputs.take(pa.array(index))
        loud = pc.binary_join_element_wise(pc.utf8_upper(texts), "!" * self._spec.volume, "")
        return pa.table({self._spec.output: loud})

    def close(self) -> None:
        """Nothing is held open."""


_: tuple[type[ModelSpec], type[Model]] = (Shout, Shouting)  # for mypy
