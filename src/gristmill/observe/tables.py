"""Text tables: drawn by rich on a terminal, as plain aligned columns elsewhere, never wider than allowed."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any, TextIO

from gristmill.observe import units
from gristmill.observe.streams import PIPE_WIDTH, is_terminal, width_of
from gristmill.values import dataclass

LEAST_CELL = 6  # columns of a cell below which a table column is left out rather than narrowed further
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Table:
    """Cells of text. `right` are the columns aligned right; columns that do not fit are left out and counted."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
    title: str = ""

    def plain(self, width: int = PIPE_WIDTH) -> str:
        """The table as lines of at most `width` columns."""
        table, left_out = fitted(self, width)
        lines = [clip(self.title, width)] if self.title else []
        widths = _widths(table)
        if any(table.headers):
            lines.append(_line(table.headers, widths, table.right))
            lines.append(_line(["-" * w for w in widths], widths))
        lines += [_line(row, widths, table.right) for row in table.rows]
        if left_out:
            lines.append(clip(left_out, width))
        return "\n".join(line.rstrip() for line in lines)

    def show(self, stream: TextIO) -> None:
        """Write the table to a stream. Raises what writing raises (a closed pipe is the caller's to judge)."""
        if not is_terminal(stream):
            stream.write(self.plain(width_of(stream)) + "\n")
            return
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        console = Console(file=stream, highlight=False, markup=False, emoji=False)
        table, left_out = fitted(self, console.width - 2, between=3)
        drawn = RichTable(
            box=box.SIMPLE_HEAD if any(table.headers) else None, show_header=any(table.headers), pad_edge=False
        )
        for i, header in enumerate(table.headers):
            drawn.add_column(Text(header), justify="right" if i in table.right else "left", no_wrap=True)
        for row in table.rows:
            drawn.add_row(*(Text(cell) for cell in row))
        if self.title:
            console.print(Text(clip(self.title, console.width), style="bold"))
        console.print(drawn)
        if left_out:
            console.print(Text(clip(left_out, console.width), style="dim"))


def of_arrow(table: Any, cell_width: int = 60, title: str = "") -> Table:
    """An Arrow table as text: long texts and vectors shortened, numbers aligned right."""
    from gristmill.arrow.topython import to_plain

    names = tuple(clean(name) for name in table.column_names)
    columns = [[cell(value, cell_width) for value in to_plain(column)] for column in table.columns]
    rows = tuple(zip(*columns, strict=True)) if columns else ()
    numbers = frozenset(i for i, f in enumerate(table.schema) if _is_number(str(f.type)))
    return Table(names, rows, numbers, title)


def _is_number(kind: str) -> bool:
    return bool(re.fullmatch(r"u?int\d+|float|double|halffloat|decimal.*", kind))


def cell(value: Any, width: int = 60) -> str:
    """A value in at most `width` columns: vectors by their first numbers and their length, floats to 4 digits."""
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (bytes, bytearray)):
        return clip(f"{len(value):,} bytes {bytes(value[:8]).hex()}", width)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(cell(item, 12) for item in value[:3])
        return clip(f"[{inner}, … {len(value)} in all]" if len(value) > 3 else f"[{inner}]", width)
    if isinstance(value, dict):
        return clip("{" + ", ".join(f"{k}: {cell(v, 16)}" for k, v in value.items()) + "}", width)
    return clip(str(value), width)


def clean(text: str) -> str:
    """Text for one line: characters that move the cursor, or change the direction of writing, become spaces."""
    return _CONTROL.sub(" ", text)


def clip(text: str, width: int) -> str:
    """Text in one line of at most `width` columns of a terminal, with … where text was cut off."""
    text = clean(text)
    if columns(text) <= width:
        return text
    out, used = [], 0
    for character in text:
        used += _columns(character)
        if used > width - 1:
            break
        out.append(character)
    return "".join(out) + "…" if width > 0 else ""


def columns(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cf", "Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def fitted(table: Table, width: int, between: int = 2) -> tuple[Table, str]:
    """The table with its widest columns shortened until it fits; if that is not enough, some in the middle left out.

    The first columns identify the row, the last ones were computed: both are kept longest.
    """
    widths = _widths(table)
    shown = list(range(len(widths)))
    while len(shown) > 1 and sum(min(widths[i], LEAST_CELL) for i in shown) + between * (len(shown) - 1) > width:
        del shown[(len(shown) - 1) // 2]
    missing = [header for i, header in enumerate(table.headers) if i not in shown]
    widths = [widths[i] for i in shown]
    room = max(1, width - between * (len(shown) - 1))
    while sum(widths) > room:
        widest = max(widths)
        second = max((w for w in widths if w < widest), default=0)
        many = widths.count(widest)
        over = sum(widths) - room
        to = max(second, widest - -(-over // many), 1)
        widths = [to if w == widest else w for w in widths]
        if to == widest:
            break
    headers, *rows = (
        tuple(clip(row[i], w) for i, w in zip(shown, widths, strict=True)) for row in (table.headers, *table.rows)
    )
    right = frozenset(at for at, i in enumerate(shown) if i in table.right)
    note = f"({units.plural(len(missing), 'more column')}: {', '.join(missing)})" if missing else ""
    return Table(headers, tuple(rows), right, table.title), note


def _widths(table: Table) -> list[int]:
    rows = [table.headers, *table.rows]
    return [max(columns(row[i]) for row in rows) for i in range(len(table.headers))]


def _line(row: Sequence[str], widths: Sequence[int], right: frozenset[int] = frozenset()) -> str:
    cells = []
    for i, (text, width) in enumerate(zip(row, widths, strict=True)):
        pad = " " * (width - columns(text))
        cells.append(pad + text if i in right else text + pad)
    return "  ".join(cells)
