"""Which format a sink has: by name, else by suffix."""

from __future__ import annotations

import os

from gristmill.job.registry import Registry
from gristmill.sinks.contract import SinkFormat

__all__ = ["DEFAULT", "SINKS", "sink_format"]

DEFAULT = "parquet"

SINKS: Registry[type[SinkFormat]] = Registry(
    "sink format",
    "gristmill.sinks",
    {
        "parquet": "gristmill.sinks.parquet:ParquetSink",
        "jsonl": "gristmill.sinks.jsonl:JsonlSink",
        "npy": "gristmill.sinks.npy:NpySink",
        "openai-batch": "gristmill.sinks.openaibatch:OpenAIBatchSink",
    },
    needs=(
        "name",
        "suffixes",
        "tables",
        "decimal",
        "writer",
        "stored",
        "refused",
        "count",
        "misfit",
        "dataset",
        "merge",
    ),
    aliases={"ndjson": "jsonl", "jsonlines": "jsonl", "json": "jsonl", "pq": "parquet"},
)


def sink_format(name_or_uri: str) -> SinkFormat:
    """A sink format by name, or by a URI's suffix; parquet if it has none. Raises BadJob for unknown names."""
    if not any(c in name_or_uri for c in "/\\."):
        return SINKS.get(SINKS.known(name_or_uri))()
    suffix = os.path.splitext(name_or_uri.rstrip("/\\"))[1].lower()
    found = (SINKS.get(n) for n in (SINKS.ours if suffix else ()))
    return next((form for form in found if suffix in form.suffixes), SINKS.get(DEFAULT))()
