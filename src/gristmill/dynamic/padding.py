"""Features of a model as items and back: rows are separated, padded into one batch, and the answers handed out again.

numpy arrays and torch tensors keep their library, dtype and device; neither is imported before it is met.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import field
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from gristmill.dynamic.execution import Arguments, at_most
from gristmill.errors import WrongOutput
from gristmill.process.ownership import own
from gristmill.values import dataclass

MASK = "attention_mask"

Side = Literal["left", "right"]


@dataclass(frozen=True)
class Padding:
    """How rows of unequal shape become one array, and what is cut off again.

    `tokens` are the values to pad features with (0 for a feature without one); `side` is where they go, on every axis
    that differs. `sequence` names the feature whose first axis is an item's length (default: the first that has one).
    `mask` is the name under which the function is given an attention mask, int64 [items, longest], 1 where a row has
    values of its own; None for no mask, and a mask that a caller brings is kept. `unpad` are the outputs (True: all)
    whose second axis is the padded length; they are cut back to each row's own. With `spread`, features are keywords.
    """

    tokens: Mapping[str, Any] = field(default_factory=dict)
    side: Side = "right"
    sequence: str | None = None
    mask: str | None = None
    unpad: bool | Sequence[str | int] = False
    spread: bool = False

    def __post_init__(self) -> None:
        if self.side not in get_args(Side):
            raise ValueError(f"padding_side is {self.side!r}: it must be {' or '.join(map(repr, get_args(Side)))}")
        if isinstance(self.unpad, str):  # one name, not its letters
            object.__setattr__(self, "unpad", (self.unpad,))


class Row:
    """One item: a value for each feature, without the axis of items. Rows of equal `kind` can share a batch."""

    __slots__ = ("features", "kind", "length")

    def __init__(self, features: dict[str, Any], kind: Any, length: int) -> None:
        self.features = features
        self.kind = kind
        self.length = length


class Whole(Row):
    """The features of a call without rows: what the function returns for them is the call's result."""


class Parted(NamedTuple):
    """One row of several outputs. `keys`: a tuple of names, or the type list or tuple."""

    keys: Any
    values: Sequence[Any]


class Cut(NamedTuple):
    """One row of a per-token output, cut back to its own length."""

    value: Any


class Features:
    """The layout of `inference.dynamically`: items are `Row`s, the function takes a dict of padded features."""

    def __init__(self, padding: Padding) -> None:
        self.padding = padding

    def items(self, features: Mapping[str, Any]) -> list[Row]:
        """The rows of a call's features. Raises TypeError for anything but a dict of features, else ValueError."""
        given: Any = features
        if not isinstance(given, Mapping) or not given:
            raise TypeError(f"features are {given!r:.200}: give a dict of arrays or tensors, or keyword arguments")
        columns = {name: _column(name, value) for name, value in features.items()}
        counts = {name: len(column.values) for name, column in columns.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"features have different numbers of rows: {counts}")
        sequence = self._sequence(columns)
        if not any(counts.values()):
            return [Whole({name: _array(value) for name, value in features.items()}, object(), 0)]
        kinds = zip(*(column.kinds for column in columns.values()), strict=True)
        rows = zip(*(column.values for column in columns.values()), strict=True)
        names = tuple(columns)
        return [
            Row(made := dict(zip(names, row, strict=True)), (names, kind), _length(made, sequence))
            for row, kind in zip(rows, kinds, strict=True)
        ]

    def groups(self, items: Sequence[Row]) -> Sequence[Sequence[int]]:
        first = items[0].kind
        if all(item.kind == first for item in items):
            return (range(len(items)),)
        groups: dict[Any, list[int]] = {}
        for place, item in enumerate(items):
            groups.setdefault(item.kind, []).append(place)
        return list(groups.values())

    def gather(self, items: Sequence[Row]) -> Arguments:
        padding = self.padding
        if isinstance(items[0], Whole):
            features = dict(items[0].features)
        else:
            features = {
                name: pad([item.features[name] for item in items], padding.tokens.get(name, 0), padding.side, name)
                for name in items[0].features
            }
        if padding.mask is not None and padding.mask not in features:
            features[padding.mask] = self._mask(features, items)
        return ((), features) if padding.spread else ((features,), {})

    def rows(self, outputs: Any, items: Sequence[Row]) -> list[Any]:
        if isinstance(items[0], Whole):
            return [own(outputs)]
        return _Taken(self.padding, [item.length for item in items]).apart(outputs, None)

    def length(self, item: Row) -> float:
        return item.length

    def key(self, item: Row) -> Any:
        return item.features

    def result(self, items: Sequence[Row], rows: Sequence[Any], *, ragged: bool) -> Any:
        """What the caller gets: the function's kind of output, with the rows of this call. Raises ValueError.

        `ragged`: the caller gave lists of arrays, so per-token outputs come back as lists of arrays too.
        """
        return rows[0] if isinstance(items[0], Whole) else together(rows, ragged=ragged)

    def ragged(self, features: Mapping[str, Any]) -> bool:
        """Whether the caller's rows may have lengths of their own, because they are lists of arrays."""
        return any(isinstance(value, (list, tuple)) for value in features.values())

    def _sequence(self, columns: Mapping[str, _Column]) -> str | None:
        name = self.padding.sequence
        if name is not None and name not in columns:
            raise ValueError(f"sequence_feature is {name!r}: this call has {', '.join(columns)}")
        return name

    def _mask(self, features: Mapping[str, Any], items: Sequence[Row]) -> Any:
        name = self.padding.sequence or next((key for key, value in features.items() if value.ndim > 1), None)
        like = features[name] if name is not None else next(iter(features.values()))
        width = like.shape[1] if like.ndim > 1 else 1
        lengths = [item.length for item in items][: len(like)]
        if torch := _torch(like):
            places = torch.arange(width, device=like.device)
            own = torch.tensor(lengths, device=like.device, dtype=torch.int64)[:, None]
        else:
            import numpy as np

            places = np.arange(width)
            own = np.asarray(lengths, dtype=np.int64)[:, None]
        mask = places < own if self.padding.side == "right" else places >= width - own
        return mask.to(torch.int64) if torch else mask.astype("int64")


class _Taken:
    """The outputs of one batch, to be taken apart into rows of the given lengths."""

    def __init__(self, padding: Padding, lengths: Sequence[int]) -> None:
        self.padding = padding
        self.lengths = lengths
        self.width = max(lengths)

    def apart(self, outputs: Any, name: str | int | None, *, cut: bool | None = None) -> list[Any]:
        """One row per item. `name` is the output's if there are several; `cut` is decided by the outermost name."""
        if cut is None and (name is not None or not isinstance(outputs, (Mapping, list, tuple))):
            cut = self._is_cut(name)
        if isinstance(outputs, Mapping):
            columns = [self.apart(value, key, cut=cut) for key, value in outputs.items()]
            return self._parted(tuple(outputs), columns)
        if isinstance(outputs, (list, tuple)) and any(_holds_rows(value) for value in outputs):
            columns = [self.apart(value, place, cut=cut) for place, value in enumerate(outputs)]
            return self._parted(list if isinstance(outputs, list) else tuple, columns)
        if outputs is None and name is not None:  # an output that the model did not make this time
            return [None] * len(self.lengths)
        return self._rows(outputs, name, cut=bool(cut))

    def _is_cut(self, name: str | int | None) -> bool:
        unpad = self.padding.unpad
        return unpad if isinstance(unpad, bool) else name in unpad

    def _parted(self, keys: Any, columns: list[list[Any]]) -> list[Any]:
        if not columns:
            raise WrongOutput(f"the function returned no output for {len(self.lengths)} rows")
        return [Parted(keys, values) for values in zip(*columns, strict=True)]

    def _rows(self, output: Any, name: str | int | None, *, cut: bool) -> list[Any]:
        what = "the function's output" if name is None else f"output {name!r}"
        count = len(self.lengths)
        if _is_array(output) and not output.ndim:
            raise WrongOutput(f"{what} is a single number for {count} rows")
        if _is_array(output) and len(output) != count:
            raise WrongOutput(f"{what} has shape {tuple(output.shape)}: its first axis must be the {count} rows")
        rows = at_most(output, count + 1)
        if len(rows) != count:
            hint = "; a list of arrays is taken as several outputs, each with all rows" if name is not None else ""
            raise WrongOutput(f"{what} has {min(len(rows), count)} or more rows for {count}{hint}")
        return [Cut(row) for row in self._cut(output, rows, what)] if cut else rows

    def _cut(self, output: Any, rows: list[Any], what: str) -> list[Any]:
        if not _is_array(output) or output.ndim < 2 or output.shape[1] != self.width:
            shape = tuple(output.shape) if _is_array(output) else type(output).__name__
            raise WrongOutput(
                f"{what} is {shape}, not cut back to each row's length: its second axis is not the padded length "
                f"{self.width}. Name the per-token outputs in unpad_outputs"
            )
        if self.padding.side == "right":
            return [row[:length] for row, length in zip(rows, self.lengths, strict=True)]
        return [row[self.width - length :] for row, length in zip(rows, self.lengths, strict=True)]


def together(rows: Sequence[Any], *, ragged: bool) -> Any:
    """Rows as one output, the reverse of taking them apart. Raises ValueError if arrays do not have one shape."""
    first = rows[0]
    if isinstance(first, Parted):
        columns = [together(column, ragged=ragged) for column in zip(*(row.values for row in rows), strict=True)]
        return dict(zip(first.keys, columns, strict=True)) if isinstance(first.keys, tuple) else first.keys(columns)
    if isinstance(first, Cut):
        values = [row.value for row in rows]
        return values if ragged else _stack(values)
    if not _is_array(first):
        return None if all(row is None for row in rows) else list(rows)
    return _stack(rows)


def pad(values: Sequence[Any], token: Any, side: str, name: str = "") -> Any:
    """Arrays or tensors of one rank and dtype as one, with a new first axis; shorter ones are padded on every axis.

    Raises ValueError if the token is not a value of the dtype.
    """
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) == 1:
        return _stack(values)
    widest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    batch = _filled(values, (len(values), *widest), token, name)
    for place, value in enumerate(values):
        where = (place, *_span(value.shape, widest, side))
        batch[where] = value
    return batch


def _span(shape: Sequence[int], widest: Sequence[int], side: str) -> tuple[slice, ...]:
    if side == "right":
        return tuple(slice(0, size) for size in shape)
    return tuple(slice(most - size, most) for size, most in zip(shape, widest, strict=True))


def _filled(values: Sequence[Any], shape: tuple[int, ...], token: Any, name: str) -> Any:
    """An array like `values`, full of the pad token."""
    first = values[0]
    if _torch(first):
        dtype: Any = first.dtype
        whole = not dtype.is_floating_point and not dtype.is_complex
        full = first.new_full
        quiet: Any = nullcontext()
    else:
        import numpy as np

        dtype = np.result_type(*{value.dtype for value in values})
        if token == 0:  # in any dtype: an empty text, False, the epoch
            return np.zeros(shape, dtype)
        whole = dtype.kind in "iub"
        full = partial(np.full, dtype=dtype)
        quiet = np.errstate(invalid="ignore")
    try:
        with quiet:
            held = full((), token).item()
    except (OverflowError, RuntimeError, TypeError, ValueError):
        held = None
    if held is None or (whole and held != token):
        raise ValueError(f"the pad token of {name!r} is {token!r}, which {dtype} cannot hold")
    return full(shape, token)


def _stack(values: Sequence[Any]) -> Any:
    torch = _torch(values[0])
    try:
        if torch:
            return torch.stack(tuple(values))
        import numpy as np

        return np.stack(values)
    except (RuntimeError, ValueError) as error:
        shapes = sorted({tuple(value.shape) for value in values})
        raise ValueError(
            f"the rows of one call came back in different shapes {shapes}, because their batches were padded to "
            "different lengths: unpad_outputs=True cuts per-token outputs back to each row's own length"
        ) from error


@dataclass(frozen=True)
class _Column:
    """One feature: a value per row, and what decides which rows it can share an array with."""

    values: Sequence[Any]
    kinds: Sequence[Any]


def _column(name: str, value: Any) -> _Column:
    if isinstance(value, (list, tuple)):
        values = _arrays(value)
        return _Column(values, [_kind(one) for one in values])
    array = _array(value)
    if not array.ndim:
        raise ValueError(f"feature {name!r} is {value!r:.200}: its first axis must be the rows of the call")
    values = list(array)
    return _Column(values, [_kind(values[0])] * len(values) if values else [])


def _kind(value: Any) -> Any:
    if _torch(value):
        return ("torch", value.dtype, value.ndim, value.device)
    kind = value.dtype.kind
    # Texts of unequal width have different dtypes, but are of one kind.
    return ("numpy", kind if kind in "SU" else value.dtype.str, value.ndim)


def _length(features: Mapping[str, Any], sequence: str | None) -> int:
    values = (features[sequence],) if sequence is not None else features.values()
    return next((int(value.shape[0]) for value in values if value.ndim), 1)


def _arrays(values: Sequence[Any]) -> list[Any]:
    arrays = [_array(value) for value in values]
    if any(_is_array(value) for value in values):
        return arrays
    import numpy as np

    # Lists of numbers share one dtype: an empty list, or one without fractions, must not have another.
    kinds = {array.dtype for array in arrays if array.size}
    return [array.astype(np.result_type(*kinds), copy=False) for array in arrays] if kinds else arrays


def _array(value: Any) -> Any:
    if _is_array(value):
        return value
    import numpy as np

    return np.asarray(value)


def _is_array(value: Any) -> bool:
    if _torch(value):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _holds_rows(value: Any) -> bool:
    """Whether an element of a list is an output of its own, not one row: lists of numbers or texts are rows."""
    if isinstance(value, (list, tuple)):
        return any(_holds_rows(one) for one in value)
    return _is_array(value) and value.ndim > 0


def _torch(value: Any) -> Any:
    """The torch module if the value is a tensor, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(value, torch.Tensor) else None
