"""What `returns=` says of a function's answers."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from gristmill.errors import BadModel
from gristmill.io.typenames import parse_type


def parse_schema(returns: Mapping[str, str]) -> pa.Schema:
    """The schema that `returns=` describes. Raises BadModel, naming the column and the type."""
    fields = []
    for name, text in returns.items():
        if isinstance(text, pa.DataType):
            fields.append(pa.field(name, text))
            continue
        try:
            fields.append(pa.field(name, parse_type(str(text))))
        except ValueError as e:
            raise BadModel(f"returns gives column {name!r} the type {text!r}: {e}") from e
    return pa.schema(fields)
