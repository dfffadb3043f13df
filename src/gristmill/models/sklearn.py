"""scikit-learn estimators over feature columns. A pickle is opened only if that is allowed and its digest pinned."""

from __future__ import annotations

import json
import logging
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.arrow.rows import picked
from gristmill.arrow.topython import to_plain
from gristmill.errors import BadModel
from gristmill.fingerprint.code import code_in
from gristmill.fingerprint.diskcache import file_digest
from gristmill.fingerprint.modelfiles import digests_of, model_file
from gristmill.job.specs import SklearnModel
from gristmill.models.columns import check_columns, is_number, is_text
from gristmill.models.contract import ModelInfo, Place, Prepared
from gristmill.models.conversion import from_array
from gristmill.models.features import Ragged, Stacker, as_column, check_numbers, check_rows, in_calls, take
from gristmill.process.extras import installed, require

_LOG = logging.getLogger("gristmill.models")
LOADS_TO_DESCRIBE = True

# What a model usually consists of: scikit-learn itself checks which versions of these it was saved with.
_STACK = {"sklearn", "numpy", "scipy", "pandas", "joblib"}
# Each method's output column if the spec names none.
_COLUMNS = {
    "predict": "prediction",
    "predict_proba": "probabilities",
    "decision_function": "decision",
    "transform": "transformed",
}
# Estimators with one of these may take columns that are not numbers: pipelines, column transformers, gradient boosting
# over categories. Others only fail on them, row by row.
_TAKES_OTHERS = ("steps", "transformers", "categorical_features")


# ---------------------------------------------------------------- loading


def load_estimator(spec: SklearnModel) -> Any:
    """The estimator of a skops file, or of a joblib or pickle file that is allowed and pinned.

    Raises BadModel for any other file, before anything in it is executed.
    """
    path = model_file(spec.model, "scikit-learn", (".skops", ".joblib", ".pkl", ".pickle"))
    require("sklearn", "sklearn", spec.name)
    trusted = spec.allow_pickle and spec.sha256 is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        estimator = _from_skops(path, spec, trusted) if _is_skops(path) else _from_pickle(path, spec, trusted)
    _tell_versions(caught, spec.name)
    if not hasattr(estimator, spec.method):
        has = [m for m in _COLUMNS if hasattr(estimator, m)]
        kind = type(estimator).__name__
        raise BadModel(
            f"{spec.name}: {kind} has no method {spec.method!r}; of the usable ones it has {', '.join(has) or 'none'}"
        )
    return estimator


def _is_skops(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return "schema.json" in archive.namelist()
    except (zipfile.BadZipFile, OSError):
        return False


def _from_skops(path: Path, spec: SklearnModel, trusted: bool) -> Any:
    require("skops", "sklearn", f"{spec.name}, a skops file,")
    from gristmill.models.skopsfile import io as skops_io

    unknown = skops_io.get_untrusted_types(file=path)
    asked = [kind for kind in unknown if kind != "numpy.dtype"]  # vectorizers and encoders have it, and it runs nothing
    if asked and not trusted:
        raise BadModel(
            f"{spec.name}: {path.name} has types that skops does not trust by default ({', '.join(asked)}): if you "
            f"trust the file, set allow_pickle: true and sha256: {file_digest(path)} (--allow-pickle --sha256)"
        )
    try:
        return skops_io.load(path, trusted=unknown)
    except Exception as e:
        raise BadModel(f"{spec.name}: skops cannot load {path}: {_line(e)}") from e


def _from_pickle(path: Path, spec: SklearnModel, trusted: bool) -> Any:
    if not trusted:
        raise BadModel(
            f"{spec.name}: {path.name} is a pickle (or not a model at all), and opening a pickle runs whatever code is "
            "in it: save the model with skops.io.dump, or, if you trust the file, set allow_pickle: true and "
            f"sha256: {file_digest(path)} (--allow-pickle --sha256)"
        )
    try:
        return require("joblib", "sklearn", spec.name).load(path)
    except Exception as e:
        import sklearn

        raise BadModel(
            f"{spec.name}: {path} cannot be loaded with scikit-learn {sklearn.__version__} "
            f"({type(e).__name__}: {_line(e)})"
        ) from e


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _tell_versions(caught: list[warnings.WarningMessage], name: str) -> None:
    """One line if another minor version of scikit-learn wrote the file, not a warning for each of its parts."""
    for warning in caught:
        saved = getattr(warning.message, "original_sklearn_version", None)
        current = getattr(warning.message, "current_sklearn_version", None)
        if saved and current and str(saved).split(".")[:2] != str(current).split(".")[:2]:
            _LOG.warning(
                "%s: saved with scikit-learn %s, but %s is installed: results may differ", name, saved, current
            )
            return


# ---------------------------------------------------------------- features


def features_of(spec: SklearnModel, estimator: Any) -> tuple[str, ...]:
    """The columns in the order of training. Raises BadModel if `features` are not those it was fitted with."""
    own = getattr(estimator, "feature_names_in_", None)
    count = getattr(estimator, "n_features_in_", None)
    if own is not None:
        own = tuple(str(n) for n in own)
        if spec.features is not None and set(spec.features) != set(own):
            missing = [n for n in own if n not in spec.features]
            extra = [n for n in spec.features if n not in own]
            told = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"also has {', '.join(extra)}"] * bool(extra)
            raise BadModel(f"{spec.name} was fitted with {', '.join(own)}, but features= {' and '.join(told)}")
        return own
    if spec.features is None:
        raise BadModel(
            f"{spec.name} was fitted without names on {count or 'some'} features: give features= with the columns in "
            "the order of training"
        )
    if count is not None and count != len(spec.features):
        raise BadModel(f"{spec.name} was fitted on {count} features, but features= names {len(spec.features)}")
    return tuple(spec.features)


def _whose(estimator: Any) -> str:
    """Who names its columns: those it was fitted with, or else the option."""
    return "was fitted with column" if hasattr(estimator, "feature_names_in_") else "is given by features= column"


def class_of(spec: SklearnModel, estimator: Any) -> int | None:
    """The place of the class `label` among the probabilities; None without one. Raises BadModel if it is not there."""
    if spec.label is None:
        return None
    if spec.method != "predict_proba":
        raise BadModel(f"{spec.name}: label is for predict_proba, but method is {spec.method!r}")
    classes = getattr(estimator, "classes_", None)
    if classes is None or isinstance(classes, list):
        raise BadModel(f"{spec.name}: it has no list of classes, so label cannot name one: leave it out")
    known = classes.tolist()
    if spec.label in known:
        return int(known.index(spec.label))
    names = [str(c) for c in known]  # on the command line all are texts
    if str(spec.label) not in names:
        raise BadModel(f"{spec.name}: label is {spec.label!r}, but its classes are {', '.join(names)}")
    return names.index(str(spec.label))


def takes_missing(estimator: Any) -> bool:
    """Whether the estimator, and each part of it, says that it takes NaN for a missing value, as tree models do. What a
    pipeline says of itself is what its first step says, and a scaler passes NaN on; an imputer before a part that takes
    none is found by trying (`scores_nulls`).
    """
    if not all(takes_missing(part) for part in _parts(estimator)):
        return False
    return _says(estimator, lambda tags: tags.allow_nan, lambda older: older.get("allow_nan"))


def _parts(estimator: Any) -> list[Any]:
    """What a pipeline, a union, an ensemble or a search consists of."""
    named = [
        getattr(estimator, name, None) or () for name in ("steps", "transformers", "transformer_list", "estimators")
    ]
    parts = [part[1] for one in named for part in one if isinstance(part, (tuple, list)) and len(part) > 1]
    parts.append(getattr(estimator, "best_estimator_", getattr(estimator, "estimator", None)))
    return [part for part in parts if hasattr(part, "fit")]  # not None, "drop", "passthrough"


def takes_documents(estimator: Any) -> bool:
    """Whether it takes one text per row, as a vectorizer does, and not a table of columns."""
    return _says(
        estimator, lambda tags: tags.string and not tags.two_d_array, lambda older: older.get("X_types") == ["string"]
    )


def takes_categories(estimator: Any) -> bool:
    """Whether its columns may be text: it says so, as encoders do, or has parts that may take text."""
    return any(hasattr(estimator, a) for a in _TAKES_OTHERS) or _says(
        estimator,
        lambda tags: tags.categorical or tags.string,
        lambda older: {"categorical", "string"} & {*older.get("X_types", ())},
    )


def _says(estimator: Any, tag: Callable[[Any], bool], older: Callable[[dict[str, Any]], Any]) -> bool:
    steps = getattr(estimator, "steps", None)
    if steps:
        first = next((s for _, s in steps if s not in (None, "passthrough")), None)
        return first is not None and _says(first, tag, older)
    try:
        return bool(tag(estimator.__sklearn_tags__().input_tags))  # scikit-learn 1.6 and later
    except Exception:  # older, or a custom estimator: what it says is not known
        return bool(older(getattr(estimator, "_get_tags", dict)()))


def scores_nulls(spec: SklearnModel, estimator: Any, schema: pa.Schema) -> bool:
    """Whether it answers a row of nothing but nulls: only trying shows what its parts do with them."""
    if takes_documents(estimator):
        return False
    features = features_of(spec, estimator)
    kinds = [schema.field(c).type for c in features]
    rows: Any = np.full((1, len(features)), np.nan)
    if not all(is_number(k) or pa.types.is_null(k) for k in kinds):
        rows = pa.table([pa.nulls(1, k) for k in kinds], names=list(features)).to_pandas()
    elif hasattr(estimator, "feature_names_in_") and installed("pandas"):
        import pandas as pd

        rows = pd.DataFrame(rows, columns=list(features))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            column = as_column(getattr(estimator, spec.method)(rows), 1, spec.name, "answer")
    except Exception:  # whatever it raises, the answer is no
        return False
    while pa.types.is_fixed_size_list(column.type):
        column = column.flatten()
    finite = not pa.types.is_floating(column.type) or bool(pc.all(pc.is_finite(column)).as_py())
    return column.null_count == 0 and finite


# ---------------------------------------------------------------- in the driver


def describe(spec: SklearnModel, schema: pa.Schema | None) -> ModelInfo:
    """Compares the features the model was fitted with and the source's columns. Raises BadModel, MissingExtra.

    The model is loaded for this, if that is allowed; loading is the main cost of these small models.
    """
    if spec.method not in _COLUMNS:
        raise BadModel(f"{spec.name}: method is {spec.method!r}: it must be one of {', '.join(_COLUMNS)}")
    path = model_file(spec.model, "scikit-learn", (".skops", ".joblib", ".pkl", ".pickle"))
    digests = digests_of(path.parent, [path], spec.sha256, spec.name)  # before the file is opened
    estimator = load_estimator(spec)
    # Before it is called: what its parts create at their first call is not part of the file.
    code = tuple(c for c in code_in(estimator) if not _of_stack((c.__module__ or "").partition(".")[0]))
    features = features_of(spec, estimator)
    class_of(spec, estimator)
    check_columns(schema, features, spec.name, _whose(estimator))
    if schema is not None and takes_documents(estimator):
        _check_documents(spec, features, schema)
    elif schema is not None and not takes_categories(estimator):
        check_numbers(schema, features, spec.name)
    missing = takes_missing(estimator)
    asked = not missing and schema is not None and scores_nulls(spec, estimator, schema)
    return ModelInfo(
        spec.name,
        columns=features,
        outputs=(_output(spec),),
        digest=digests.all,
        digests=digests.by_file,
        keeps_columns=True,
        filled=() if missing or asked else features,
        notes=(f"{spec.name} accepts nulls (it scored a row of them), so rows with nulls are scored",) if asked else (),
        code=code,
        on_gpu=False,
    )


def _of_stack(package: str) -> bool:
    cython = package.startswith("_cython_")  # the type of Cython's functions, which any of it may hold
    return package in _STACK or cython


def _check_documents(spec: SklearnModel, features: Sequence[str], schema: pa.Schema) -> None:
    kinds = [str(schema.field(c).type) for c in features]
    if len(features) != 1 or not is_text(_plain(schema.field(features[0]).type)):
        raise BadModel(
            f"{spec.name} takes one text a row (its first step is a vectorizer); features= names "
            f"{', '.join(f'{c} ({k})' for c, k in zip(features, kinds, strict=True))}: name the one column of text"
        )


def _output(spec: SklearnModel) -> str:
    return spec.output or ("probability" if spec.label is not None else _COLUMNS[spec.method])


# ---------------------------------------------------------------- in a worker

_OBJECTS = b"gristmill.objects"  # marks a column that pandas is to hold as objects


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _whole(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def open_model(spec: SklearnModel, place: Place) -> LoadedEstimator:
    """Loads the estimator, after comparing the pinned digest once more."""
    return LoadedEstimator(spec, place)


class LoadedEstimator:
    """A `SklearnModel` at work. Rows have no lengths."""

    def __init__(self, spec: SklearnModel, place: Place) -> None:
        path = model_file(spec.model, "scikit-learn")
        digests_of(path.parent, [path], spec.sha256, spec.name)
        self._name = spec.name
        self._output = _output(spec)
        self._estimator = load_estimator(spec)
        self._features = features_of(spec, self._estimator)
        self._class = class_of(spec, self._estimator)
        self._named = hasattr(self._estimator, "feature_names_in_") and installed("pandas")
        self._index: Any = None
        self._spec, self._keep_nulls = spec, place.keep_nulls
        self._documents = takes_documents(self._estimator)
        self._missing = takes_missing(self._estimator)
        self._asked = self._missing or self._documents
        self._call = getattr(self._estimator, spec.method)
        self._metadata = self._labels(spec.method)
        self._threads = require("threadpoolctl", "sklearn", spec.name).threadpool_limits(place.threads)
        self.about = {"backend": "sklearn", "device": "cpu", "threads": place.threads}

    def prepare(self, rows: pa.Table) -> Prepared:
        """Numbers stacked; a table if some columns are not numbers, or if the estimator was fitted on a frame and some
        columns are whole numbers. The form of a row depends on the row and on the columns' types, never on other rows:
        see `_given`, `_table`. Rows with a null among their whole numbers, if the model takes it, go in calls of their
        own, in which whole numbers are floats.

        Rows with null, NaN or infinite features are refused, unless the model takes missing values itself.
        """
        check_columns(rows.schema, self._features, self._name, _whose(self._estimator))
        if not self._asked:
            self._missing, self._asked = scores_nulls(self._spec, self._estimator, rows.schema), True
        whole = [rows.column(c) for c in self._features if _whole(_plain(rows.schema.field(c).type))]
        holed = np.zeros(rows.num_rows, dtype=bool)
        for column in whole if self._missing or self._keep_nulls else ():
            holed |= column.is_null().to_numpy() if column.null_count else False
        if not holed.any():
            stacker = self._stacker(rows)
            return Prepared(rows.num_rows, self._given(rows, stacker, holed=False), None, stacker.refused)
        parts, refused = {}, []
        for kind in np.unique(holed).astype(int).tolist():
            at = np.flatnonzero(holed == bool(kind))
            some = picked(rows, at)
            stacker = self._stacker(some)
            parts[kind] = at, self._given(some, stacker, holed=bool(kind))
            refused += [replace(r, row=int(at[r.row])) for r in stacker.refused]
        return Prepared(
            rows.num_rows, Ragged.of(rows.num_rows, parts), None, tuple(sorted(refused, key=lambda r: r.row))
        )

    def predict(self, prepared: Prepared, index: np.ndarray) -> pa.Table:
        """One output for each row at `index`; several values a row as a fixed-size list."""
        return in_calls([prepared.inputs], index, lambda some: self._answers(take(prepared.inputs, some)))

    def _answers(self, rows: Any) -> pa.Table:
        count = rows.num_rows if isinstance(rows, pa.Table) else len(rows)
        values = self._called(rows)
        if isinstance(values, list):
            raise BadModel(f"{self._name}: a method that gives several arrays (several targets) is not supported")
        check_rows(values, count, self._name, self._output)
        if self._class is not None:
            values = np.asarray(values)[:, self._class]
        column = as_column(values, count, self._name, self._output)
        return pa.table([column], schema=pa.schema([pa.field(self._output, column.type, metadata=self._metadata)]))

    def close(self) -> None:
        """Gives the thread limits back."""
        self._threads.restore_original_limits()

    def _called(self, rows: Any) -> Any:
        if self._documents:
            return self._call(to_plain(rows.column(0)))
        if isinstance(rows, pa.Table):
            frame = rows.to_pandas(ignore_metadata=True).copy()  # null is NaN, as estimators are fitted
            objects = [f.name for f in rows.schema if f.metadata and _OBJECTS in f.metadata]
            return self._call(frame.astype(dict.fromkeys(objects, object)))
        rows = np.array(rows)  # an estimator may work in place (copy=False), and the rows may be scored again
        if self._named:
            import pandas as pd

            if self._index is None:  # made of names once, not in each call
                self._index = pd.Index(self._features)
            return self._call(pd.DataFrame(rows, columns=self._index, copy=False))
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="X does not have valid feature names"
            )  # they were compared before
            return self._call(rows)

    def _stacker(self, rows: pa.Table) -> Stacker:
        return Stacker(rows, self._name, missing=self._missing, keep=self._keep_nulls)

    def _given(self, rows: pa.Table, stacker: Stacker, *, holed: bool) -> Any:
        """Rows, either all with a null among their whole numbers or all without, as `_called` takes them."""
        kinds = {c: _plain(rows.schema.field(c).type) for c in self._features}
        if not all(is_number(k) for k in kinds.values()):
            return self._table(rows, stacker, holed)
        whole = {c: np.dtype(str(k)) for c, k in kinds.items() if _whole(k) and not holed}
        if whole and self._named:  # each column of its own type, as pandas has them
            arrays = [stacker.column(c, str(whole.get(c, "float64"))) for c in self._features]
            return pa.table([from_array(np.asarray(a)) for a in arrays], names=list(self._features))
        if len(whole) == len(kinds):
            return stacker.matrix(self._features, str(np.result_type(*whole.values())))
        narrow = all(k in (pa.float32(), pa.float16()) for k in kinds.values())
        return stacker.matrix(self._features, "float32" if narrow else "float64")

    def _table(self, rows: pa.Table, stacker: Stacker, holed: bool) -> pa.Table:
        """Columns as pandas has them; with nulls among them (`holed`), whole numbers are floats, booleans objects."""
        table = rows.select(list(self._features))
        for i, field in enumerate(table.schema):
            kind = field.type
            if pa.types.is_floating(kind) or (pa.types.is_integer(kind) and holed):
                array = stacker.column(field.name, "float64")
                if pa.types.is_integer(kind):
                    table = table.set_column(i, field.name, from_array(np.asarray(array)))
                continue
            stacker.check_present(field.name)
            if pa.types.is_boolean(kind) and holed:
                table = table.set_column(i, field.with_metadata({_OBJECTS: b""}), table.column(i))
        return table

    def _labels(self, method: str) -> dict[str, str] | None:
        classes = getattr(self._estimator, "classes_", None)
        if method == "predict" or self._class is not None or classes is None or isinstance(classes, list):
            return None
        return {"labels": json.dumps([str(c) for c in classes], ensure_ascii=False)}
