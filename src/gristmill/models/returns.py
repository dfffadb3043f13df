"""What `returns=` declares about a function's answers."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from gristmill.arrow.typetext import column_type
from gristmill.errors import BadModel, BadOutput


class Undeclared(BadOutput):
    """Answers are not as `returns=` or `output=` declares. Where the first rows' are not, the job is written wrong."""


def parse_schema(returns: Mapping[str, str]) -> pa.Schema:
    """The schema that `returns=` describes. Raises BadModel, naming the column and the type."""
    fields = []
    for name, text in returns.items():
        try:
            fields.append(pa.field(name, column_type(text)[0]))
        except ValueError as e:
            raise BadModel(f"returns gives column {name!r} the type {text!r}: {e}") from e
    return pa.schema(fields)
