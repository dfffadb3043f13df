"""Lines of OpenAI's batch files as a sink: requests for a provider to run, or what became of such requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gristmill.arrow.schemas import is_string, plain
from gristmill.errors import BadJob
from gristmill.files.contract import Files
from gristmill.sinks.contract import Writer
from gristmill.sinks.jsonl import JsonlSink
from gristmill.sinks.jsonmembers import value_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["REQUEST", "OpenAIBatchSink"]

REQUEST = ("custom_id", "method", "url", "body")
ANSWER = ("id", "custom_id", "response", "error")


class OpenAIBatchSink(JsonlSink):
    """JSON Lines with the columns custom_id, method, url and body, or id, custom_id, response and error. `body`,
    `response` and `error` are JSON in the file: made from text that is JSON, or from structs. Options as for jsonl.
    """

    name = "openai-batch"
    raw = frozenset({"body", "response", "error"})

    def writer(
        self, files: Files, folder: str, stem: str, nonce: str, schema: pa.Schema, options: Mapping[str, Any]
    ) -> Writer:
        """As for jsonl; the members of a line are in the order in which OpenAI writes them."""
        import pyarrow as pa

        first = REQUEST if "body" in schema.names else ANSWER
        names = [*(n for n in first if n in schema.names), *(n for n in schema.names if n not in first)]
        return super().writer(files, folder, stem, nonce, pa.schema([schema.field(n) for n in names]), options)

    def stored(self, rows: pa.Table, options: Mapping[str, Any]) -> pa.Schema:
        """As for jsonl. Raises BadJob, too, if the columns are neither those of requests nor those of answers."""
        if not any({*columns} <= {*rows.column_names} for columns in (REQUEST, ANSWER)):
            raise BadJob(
                f"an openai-batch sink writes {', '.join(REQUEST)}, or {', '.join(ANSWER)}, and the rows have "
                f"{', '.join(rows.column_names)}: make these columns in a step, or carry them over (keep)"
            )
        return super().stored(rows, options)

    def refused(self, rows: pa.Table, options: Mapping[str, Any]) -> dict[int, tuple[str, str]]:
        """As for jsonl, and rows with a text for JSON that is not JSON."""
        found = super().refused(rows, options)
        for name in self.raw.intersection(rows.column_names):
            if is_string(kind := plain(rows.schema.field(name).type)):
                texts = rows.column(name).cast(kind).cast("large_binary").to_pylist()
                wrong = {row: _wrong(text) for row, text in enumerate(texts) if text is not None and row not in found}
                found |= {row: ("NotJson", f"column {name!r} is not JSON: {why}") for row, why in wrong.items() if why}
        return found


def _wrong(text: bytes) -> str:
    try:
        return "" if value_of(text.decode()) is not None else "null is left out, not written as text"
    except ValueError as e:
        return str(e)
