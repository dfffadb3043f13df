"""OpenAI's batch files as a source: one request per line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.errors import BadJob
from gristmill.job.formatoptions import known
from gristmill.shards.sourcefiles import FileInfo, SourceFile
from gristmill.sinks.jsonmembers import members, value_of
from gristmill.sources.blocks import kept, wanted
from gristmill.sources.contract import BadRow, Block, Reading
from gristmill.sources.jsonl import looked_at
from gristmill.sources.jsonrecords import trimmed
from gristmill.sources.lines import Lines, selected
from gristmill.sources.paths import Storage
from gristmill.sources.stream import opened

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["OpenAIBatchSource"]

_TEXTS = ("custom_id", "method", "url")


class OpenAIBatchSource:
    """The columns custom_id, method, url and body, as texts: the body is JSON, as it is written. Blank lines are not
    rows. A line that is no request (not JSON, a member missing or of another kind) is a bad row; with the option
    `invalid: keep` it is a row, and the column `invalid` says what is wrong. Other members of a line are left out.
    """

    name = "openai-batch"
    suffixes: tuple[str, ...] = ()
    compressed = by_bytes = typed = True
    written = False

    def inspect(self, file: SourceFile, fs: Storage, options: Mapping[str, Any]) -> FileInfo:
        """As for jsonl; the columns are always the same."""
        known(options, ("invalid",), f"{self.name} source")
        schema = _schema(options)
        return looked_at(file, fs, lambda sample: schema)

    def read(self, info: FileInfo, fs: Storage, ranges: np.ndarray, reading: Reading) -> Iterator[Block]:
        """Blocks of about `block_bytes` of text; a longer line is a block of its own."""
        with opened(info.file, fs) as stream:
            for found in selected(stream, ranges, info.extent, reading.block_bytes):
                yield _block(trimmed(found), reading)


def _schema(options: Mapping[str, Any]) -> pa.Schema:
    import pyarrow as pa

    if (given := options.get("invalid", "refuse")) not in ("keep", "refuse"):
        raise BadJob(f"openai-batch source invalid is {given!r}: it must be keep or refuse")
    names = [*_TEXTS, "body", *(["invalid"] if given == "keep" else [])]
    return pa.schema([(name, pa.string()) for name in names])


def _block(found: Lines, reading: Reading) -> Block:
    import pyarrow as pa

    names, _ = wanted(reading)
    schema = _schema(reading.options)
    keep = "invalid" in schema.names
    rows, position, bad = [], [], []
    for i in range(len(found)):
        at, line = int(found.position[i]), found.line(i)
        row, wrong = _request(line)
        if wrong and not keep:
            bad.append(BadRow(at, line, "NoRequest", wrong))
            continue
        rows.append({**row, "invalid": wrong or None})
        position.append(at)
    table = pa.table({name: [row.get(name) for row in rows] for name in schema.names}, schema=schema)
    table, places, filtered = kept(table, np.array(position, dtype=np.int64), reading.where, names)
    return Block(table, places, filtered, tuple(bad))


def _request(line: bytes) -> tuple[dict[str, str], str]:
    """What a line says, as far as it can be read, and what is wrong with it, if anything is."""
    row: dict[str, str] = {}
    try:
        found = members(line.decode())
    except UnicodeDecodeError as e:
        return row, f"the line is not UTF-8 (byte {e.start})"
    except ValueError as e:
        return row, f"the line is not a JSON object: {e}"
    wrong = []
    for name in _TEXTS:
        value = value_of(found.get(name, "null"))
        if isinstance(value, str) and _is_unicode(value):
            row[name] = value
        else:
            wrong.append(f"{name} is {found[name][:80]}, not text" if name in found else f"there is no {name}")
    if found.get("body", "").startswith("{"):
        row["body"] = found["body"]
    else:
        wrong.append(f"body is {found['body'][:80]}, not an object" if "body" in found else "there is no body")
    return row, "; ".join(wrong)


def _is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
