"""TorchScript files over feature columns."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.errors import BadModel
from gristmill.fingerprint.modelfiles import digests_of, model_file
from gristmill.job.specs import TorchScriptModel
from gristmill.models.contract import ModelInfo, Place, Prepared
from gristmill.models.features import Stacker, as_column, check_numbers, check_rows, in_calls, take
from gristmill.models.torch import open_device
from gristmill.process.extras import installed, require

DEFAULT_OUTPUT = "output"
_DTYPES = {"auto": None, "float32": "float32", "fp32": "float32", "float16": "float16", "fp16": "float16",
           "bfloat16": "bfloat16", "bf16": "bfloat16"}  # fmt: skip


def inputs_of(spec: TorchScriptModel) -> tuple[tuple[str, ...] | str, ...]:
    """For each tensor, the columns stacked in it, or the one column that it is made from."""
    if (spec.features is None) == (spec.inputs is None):
        raise BadModel(
            f"{spec.name}: TorchScript does not name its inputs: give features= (columns stacked to one tensor) or "
            "inputs= (a column, or a list of columns, for each tensor), one of the two"
        )
    if spec.features is not None:
        return (tuple(spec.features),)
    return tuple(i if isinstance(i, str) else tuple(str(c) for c in i) for i in spec.inputs or ())


def _path(spec: TorchScriptModel) -> Path:
    path = model_file(spec.model, "TorchScript", (".pt", ".pth", ".jit", ".ts"))
    if spec.dtype not in _DTYPES:
        raise BadModel(f"{spec.name}: dtype is {spec.dtype!r}: it must be one of auto, float32, float16, bfloat16")
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError):
        names = []
    if not any("/code/" in n for n in names):
        what = (
            "holds weights or a pickled model without its code"
            if any(n.endswith("data.pkl") for n in names)
            else "is none"
        )
        raise BadModel(
            f"{spec.name}: {path.name} {what}, but a TorchScript file is needed: write one with "
            "torch.jit.save(torch.jit.trace(model, example), path)"
        )
    return path


def describe(spec: TorchScriptModel, schema: pa.Schema | None) -> ModelInfo:
    """Checks file and columns; digests the file. Raises BadModel, MissingExtra."""
    path = _path(spec)
    if not installed("torch"):
        require("torch", "torch", spec.name)
    columns = [c for i in inputs_of(spec) for c in ((i,) if isinstance(i, str) else i)]
    check_numbers(schema, columns, spec.name)
    digests = digests_of(path.parent, [path], spec.sha256, spec.name)
    return ModelInfo(
        spec.name,
        columns=tuple(dict.fromkeys(columns)),
        digest=digests.all,
        digests=digests.by_file,
        keeps_columns=True,
        filled=tuple(dict.fromkeys(columns)),
        library="torch",
    )


def open_model(spec: TorchScriptModel, place: Place) -> LoadedTorchScript:
    """Loads the file onto the place's device."""
    return LoadedTorchScript(spec, place)


class LoadedTorchScript:
    """A `TorchScriptModel` at work. Rows have no lengths."""

    def __init__(self, spec: TorchScriptModel, place: Place) -> None:
        self._name = spec.name
        self._output = spec.output or DEFAULT_OUTPUT
        self._inputs = inputs_of(spec)
        path = _path(spec)
        if spec.sha256 is not None:
            digests_of(path.parent, [path], spec.sha256, spec.name)  # it may have changed since the driver looked
        self._torch = require("torch", "torch", spec.name)
        self._device = open_device(place, spec.name)
        dtype = _DTYPES[spec.dtype]
        self._dtype = None if dtype is None else getattr(self._torch, dtype)
        try:
            model = self._torch.jit.load(str(path), map_location=self._device).eval()
        except RuntimeError as e:
            raise BadModel(f"{spec.name}: torch cannot load {path}: {str(e).strip().partition(chr(10))[0]}") from e
        self._model = model if self._dtype is None else model.to(self._dtype)
        self._keep_nulls = place.keep_nulls
        self.about = {
            "backend": "torchscript",
            "device": str(self._device),
            "dtype": spec.dtype,
            "threads": place.threads,
        }

    def prepare(self, rows: pa.Table) -> Prepared:
        """One array for each tensor: floats as float32, integer columns as int64; bad rows are refused."""
        stacker = Stacker(rows, self._name, keep=self._keep_nulls)
        arrays = [
            stacker.column(i, _dtype_of(rows, i)) if isinstance(i, str) else stacker.matrix(i, "float32")
            for i in self._inputs
        ]
        return Prepared(rows.num_rows, arrays, None, stacker.refused)

    def predict(self, prepared: Prepared, index: np.ndarray) -> pa.Table:
        """A tensor becomes the output column; a tuple `output_0`, `output_1`, …; a dict one column per key. Rows whose
        lists have other lengths go in other calls.
        """
        return in_calls(prepared.inputs, index, lambda some: self._answers(prepared, some))

    def _answers(self, prepared: Prepared, index: np.ndarray) -> pa.Table:
        tensors = [self._tensor(take(values, index)) for values in prepared.inputs]
        with self._torch.inference_mode():
            result = self._model(*tensors)
        columns = {}
        for name, values in _named(result, self._output).items():
            check_rows(values, len(index), self._name, name)
            columns[name] = as_column(values, len(index), self._name, name)
        return pa.table(columns)

    def close(self) -> None:
        """Nothing is held open."""

    def _tensor(self, values: np.ndarray) -> Any:
        # A copy: torch wants memory that it may write, and Arrow's is not.
        tensor = self._torch.from_numpy(np.array(values, order="C")).to(self._device)
        return tensor if self._dtype is None or not tensor.is_floating_point() else tensor.to(self._dtype)


def _dtype_of(rows: pa.Table, column: str) -> str:
    if column not in rows.column_names:
        return "float32"  # the stacker reports that it is missing
    kind = rows.schema.field(column).type
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    if pa.types.is_boolean(kind):
        return "bool"
    return "int64" if pa.types.is_integer(kind) else "float32"


def _named(result: Any, output: str) -> Mapping[str, Any]:
    if isinstance(result, Mapping):
        return {str(k): v for k, v in result.items()}
    if isinstance(result, (tuple, list)):
        return {f"{output}_{i}": value for i, value in enumerate(result)}
    return {output: result}
