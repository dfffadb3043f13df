"""What a callable declares that it takes (`takes=`): columns by name, type and whether a null may be among them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from gristmill.arrow.rows import picked
from gristmill.arrow.schemas import plain, wider
from gristmill.arrow.typetext import column_type
from gristmill.errors import BadModel
from gristmill.job.specs import Call
from gristmill.models.columns import check_columns, is_text, of_texts
from gristmill.models.contract import Refusal
from gristmill.values import dataclass


@dataclass(frozen=True)
class Takes:
    """The declared columns of a callable, which is given these and no others.

    `types` are Arrow types, None if any will do; `filled` are the columns in which a null is refused.
    """

    name: str
    types: Mapping[str, pa.DataType | None]
    filled: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Their names, in the order declared."""
        return tuple(self.types)

    def check(self, schema: pa.Schema | None) -> None:
        """Raises BadModel for a column that is missing, or of a type that cannot become the declared one without loss.
        Without a schema nothing is known yet.
        """
        check_columns(schema, self.columns, self.name, "takes column")
        for column, wanted in self.types.items():
            if schema is None or wanted is None:
                continue
            found = plain(schema.field(column).type)
            if not (
                wider(found, wanted) == wanted
                or (is_text(found) and pa.types.is_string(wanted))
                or (pa.types.is_integer(found) and pa.types.is_floating(wanted))  # row by row, see `_inexact`
            ):
                raise BadModel(
                    f"{self.name} takes column {column!r} as {wanted}, but the source has it as {found}, which does "
                    f"not fit without loss: cast it in a step, or correct takes={of_texts(column, found, wanted)}"
                )

    def nulls(self, rows: pa.Table) -> np.ndarray:
        """Which rows hold a null where none is allowed, bool [rows]."""
        bad = np.zeros(rows.num_rows, dtype=bool)
        for column in self.filled:
            values = rows.column(column)
            if values.null_count:
                bad |= values.is_null().to_numpy(zero_copy_only=False)
        return bad

    def refused(self, rows: pa.Table, keep_nulls: bool = False) -> tuple[Refusal, ...]:
        """A refusal for each row with such a null (unless `keep_nulls`), naming the first column that is null, or with
        a whole number that the declared float would round.
        """
        found = {}
        for row in np.flatnonzero(self.nulls(rows)).tolist() if not keep_nulls else ():
            column = next(c for c in self.filled if not rows.column(c)[row].is_valid)
            found[row] = Refusal(row, "null", "NullColumn", self.null_message(column))
        for column, inexact in self._inexact(rows).items():
            for row in np.flatnonzero(inexact).tolist():
                text = f"column {column!r} is {rows.column(column)[row]}, which {self.types[column]} would round"
                found.setdefault(row, Refusal(row, "invalid", "InexactNumber", f"{text}: {self.name} takes it as that"))
        return tuple(found[row] for row in sorted(found))

    def _inexact(self, rows: pa.Table) -> dict[str, np.ndarray]:
        """Which whole numbers may differ from the declared floats, bool [rows], by column."""
        import pyarrow.compute as pc

        found = {}
        for column, wanted in self.types.items():
            values = rows.column(column)
            kind = values.type
            if wanted is None or not (pa.types.is_integer(kind) and pa.types.is_floating(wanted)):
                continue
            most = 2 ** {16: 11, 32: 24, 64: 53}[wanted.bit_width]
            if kind.bit_width > most.bit_length():
                beyond = pc.greater(values, pa.scalar(most, kind))
                if pa.types.is_signed_integer(kind):
                    beyond = pc.or_(beyond, pc.less(values, pa.scalar(-most, kind)))
                if pc.any(beyond).as_py():
                    found[column] = beyond.fill_null(False).to_numpy()
        return found

    def null_message(self, column: str) -> str:
        """The message for a null where none is allowed."""
        return f"column {column!r} is null, and {self.name} takes no nulls there"

    def given(self, rows: pa.Table) -> pa.Table:
        """The declared columns of `rows` as the declared types. Raises BadModel as `check` does."""
        self.check(rows.schema)
        made = {}
        for column, wanted in self.types.items():
            values = rows.column(column)
            safe = wanted is None or not pa.types.is_floating(wanted)  # numbers that a float rounds are refused
            made[column] = values if wanted is None or values.type == wanted else values.cast(wanted, safe=safe)
        return pa.table(made) if made else rows.select([])

    def without_nulls(self, rows: pa.Table) -> pa.Table:
        """`rows` with refused ones replaced by one that is not refused, so that no null changes a column's type."""
        bad = self.nulls(rows)
        if not bad.any() or bad.all():
            return rows
        index = np.arange(rows.num_rows)
        index[bad] = int(np.flatnonzero(~bad)[0])
        return picked(rows, index)


def takes_of(call: Call, name: str = "") -> Takes | None:
    """What a call, known to people as `name`, declares; None if it takes whatever there is. Raises BadModel
    for types that do not exist.
    """
    if call.takes is None:
        return None
    types: dict[str, pa.DataType | None] = {}
    filled = []
    for column, text in call.takes.items():
        try:
            types[column], not_null = column_type(text, read=True)
        except ValueError as e:
            raise BadModel(f"{call.name}: takes= gives column {column!r} the type {text!r}: {e}") from e
        filled += [column] if not_null else []
    return Takes(name or call.name, types, tuple(filled))
