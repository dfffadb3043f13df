"""Records of a Kafka topic as rows: their values as JSON objects, Avro records, text or bytes, and beside them what the
broker knows of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.errors import BadJob, BadSource
from gristmill.job.formatoptions import known
from gristmill.shards.ranges import as_ranges, within
from gristmill.shards.sourcefiles import FileInfo, SourceFile
from gristmill.sources.blocks import kept, wanted
from gristmill.sources.contract import BadRow, Block, Reading
from gristmill.sources.jsonrecords import Objects
from gristmill.sources.jsontypes import infer
from gristmill.sources.kafkalog import OURS, Span, TopicLog
from gristmill.sources.lines import Lines
from gristmill.sources.paths import Storage
from gristmill.sources.schema import from_names
from gristmill.values import dataclass

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["KafkaSource"]

_VALUES, _KEYS = ("json", "avro", "text", "bytes"), ("text", "bytes")
_SAMPLE, _SAMPLE_RECORDS = 2 << 20, 2000  # that types are inferred from; option sample_bytes
_NEAR = 4096  # offsets between two ranges that are read and left out, since to begin anew elsewhere costs a request


class KafkaSource:
    """Ranges of a topic's partitions; a position is an offset. The columns are those of the values and `_key`,
    `_partition`, `_offset`, `_timestamp` and `_headers`.

    `value` says what values are: json (an object each, as in JSON Lines; a record without a value has null in all
    columns), avro, text or bytes (one column, `value`). A record whose value or key is not what it should be is a bad
    row. `keys` are text or bytes. Types of JSON are inferred from a sample; `types` fixes them.
    """

    name = "kafka"
    suffixes: tuple[str, ...] = ()
    compressed = by_bytes = written = typed = False

    def inspect(self, file: SourceFile, fs: Storage, options: Mapping[str, Any]) -> FileInfo:
        """From a sample of records at the beginning and the end of the range."""
        known(options, (*OURS, "types", "sample_bytes"), "kafka source")
        span, log = _of(file, fs)
        values, keys = _said(log, options)
        types = from_names(options.get("types"), file.path)
        if types and values != "json":
            raise BadJob(f"{file.path}: types are of values that are JSON, and these are {values}: leave them out")
        sample = _sampled(log, span, max(1, int(options.get("sample_bytes", _SAMPLE))))
        schema = _values(values, log).schema(file.path, sample, types)
        if span.low < span.high:
            schema = _beside(schema, file.path, keys)
        covered = sum(m[-1].offset() + 1 - m[0].offset() for m in sample if m)
        weight = sum(len(m) for part in sample for m in part)
        return FileInfo(
            file=file,
            extent=span.high,
            cuts=np.unique(np.array([span.low, span.high], dtype=np.int64)),
            divisible=True,
            schema=schema,
            cut_rows=np.zeros(0, dtype=np.int64) if span.low == span.high else None,
            row_bytes=covered / count if (count := sum(map(len, sample))) else 1.0,
            bytes=weight * (span.high - span.low) // covered if covered else 0,
        )

    def read(self, info: FileInfo, fs: Storage, ranges: np.ndarray, reading: Reading) -> Iterator[Block]:
        """Blocks of about `block_bytes` of values. Raises SourceChanged, after the last one at the latest, if the topic
        is no longer the one that was planned.
        """
        span, log = _of(info.file, fs)
        rows = _Rows(log, span.partition, reading)
        apart = as_ranges(ranges)
        for group in np.split(apart, 1 + np.flatnonzero(apart[1:, 0] - apart[:-1, 1] > _NEAR)) if len(apart) else ():
            part = Span(span.partition, int(group[0, 0]), min(int(group[-1, 1]), span.high))
            for messages in log.records(part, reading.block_bytes):
                offsets = np.fromiter((m.offset() for m in messages), dtype=np.int64, count=len(messages))
                if len(group) > 1 and not (inside := within(group, offsets)).all():
                    messages, offsets = [m for m, i in zip(messages, inside, strict=True) if i], offsets[inside]
                yield rows.block(messages, offsets)
        if len(apart):
            log.check(span)


def _of(file: SourceFile, fs: Storage) -> tuple[Span, TopicLog]:
    mount = fs.mount(file.path)
    log = mount.listing
    if not isinstance(log, TopicLog):
        raise BadSource(f"{file.path}: is not a range of a topic: kafka is the format of kafka://HOST:9092/TOPIC")
    return Span.of(mount.inner(file.path)), log


def _said(log: TopicLog, options: Mapping[str, Any]) -> tuple[str, str]:
    """What values and keys are. Raises BadJob for what there is none of."""
    given = {**log.said, **options}
    values, keys = str(given.get("value", "json")), str(given.get("keys", "text"))
    for name, text, kinds in (("value", values, _VALUES), ("keys", keys, _KEYS)):
        if text not in kinds:
            raise BadJob(f"{log.shown}: {name} is {text!r}: it must be one of {', '.join(kinds)}")
    return values, keys


def _sampled(log: TopicLog, span: Span, most: int) -> list[list[Any]]:
    """Records from the beginning and from the end of a range."""
    ends = [span]
    if span.high - span.low > 2 * _SAMPLE_RECORDS:
        ends = [replace(span, high=span.low + _SAMPLE_RECORDS), replace(span, low=span.high - _SAMPLE_RECORDS)]
    found = []
    for part in ends:
        records = log.records(part, most // len(ends))
        found.append(next(records, []))
        records.close()  # type: ignore[attr-defined]
    return found


# ---------------------------------------------------------------- what is beside the value


def _kinds(keys: str) -> dict[str, pa.DataType]:
    import pyarrow as pa

    return {
        "_key": pa.string() if keys == "text" else pa.binary(),
        "_partition": pa.int32(),
        "_offset": pa.int64(),
        "_timestamp": pa.timestamp("ms", "UTC"),
        "_headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    }


def _beside(schema: pa.Schema, path: str, keys: str) -> pa.Schema:
    import pyarrow as pa

    kinds = _kinds(keys)
    if both := next((n for n in schema.names if n in kinds), None):
        raise BadSource(
            f"{path}: values have {both!r}, which is also the name of one of the broker's columns: read values as text "
            "(value=text) and take them apart in a step"
        )
    return pa.schema([*schema, *(pa.field(n, k) for n, k in kinds.items())], metadata=schema.metadata)


def _time(message: Any) -> int | None:
    kind, at = message.timestamp()
    return at if kind else None


def _headers(message: Any) -> list[dict[str, Any]]:
    return [{"key": name, "value": value} for name, value in message.headers() or ()]


class _Rows:
    """Turns messages of a partition into blocks, as one `Reading` asks."""

    def __init__(self, log: TopicLog, partition: int, reading: Reading) -> None:
        import pyarrow as pa

        values, self._keys = _said(log, reading.options)
        self._partition, self._reading = partition, reading
        self._names, target = wanted(reading)
        self._kinds = {n: k for n, k in _kinds(self._keys).items() if n in target.names}
        own = [f for f in reading.schema if f.name not in _kinds(self._keys)]
        asked = tuple(n for n in target.names if n not in self._kinds)
        columns = None if reading.columns is None else asked
        self._inner = replace(
            reading, columns=columns, schema=pa.schema(own, metadata=reading.schema.metadata), where=None
        )
        # Where no column of the values is read they are not looked at, unless all columns are.
        self._decode = _values(values, log).reader(self._inner) if asked or columns is None else None

    def block(self, messages: Sequence[Any], offsets: np.ndarray) -> Block:
        """The messages as rows, filtered, or bad."""
        import pyarrow as pa

        bad: dict[int, BadRow] = {}
        beside = {n: self._column(n, messages, offsets, bad) for n in self._kinds}
        good = np.setdiff1d(np.arange(len(messages)), list(bad)) if bad else np.arange(len(messages))
        columns: dict[str, Any] = {}
        if self._decode is not None:
            some = [messages[i] for i in good.tolist()] if bad else messages
            found = self._decode(some, offsets[good])
            good = np.searchsorted(offsets, found.position)
            columns = dict(zip(found.rows.column_names, found.rows.columns, strict=True))
            bad |= {int(np.searchsorted(offsets, b.position)): b for b in found.bad}
        columns |= {n: column if len(good) == len(column) else column.take(good) for n, column in beside.items()}
        target = wanted(self._reading)[1]
        rows = pa.table([columns[n] for n in target.names], names=target.names)
        rows, position, filtered = kept(rows, offsets[good], self._reading.where, self._names)
        return Block(rows, position, filtered, tuple(bad[i] for i in sorted(bad)))

    def _column(self, name: str, messages: Sequence[Any], offsets: np.ndarray, bad: dict[int, BadRow]) -> Any:
        import pyarrow as pa

        kind = self._kinds[name]
        if name == "_offset":
            return pa.array(offsets, kind)
        if name == "_partition":
            return pa.array(np.full(len(messages), self._partition, dtype=np.int32))
        if name == "_timestamp":
            return pa.array([_time(m) for m in messages], pa.int64()).cast(kind)
        if name == "_headers":
            return pa.array([_headers(m) for m in messages], kind)
        keys = [m.key() for m in messages]
        return _texts(keys, messages, bad, "key", "keys=bytes") if self._keys == "text" else pa.array(keys, kind)


def _texts(found: list[bytes | None], messages: Sequence[Any], bad: dict[int, BadRow], what: str, way: str) -> pa.Array:
    """Texts; those that are not UTF-8 are bad rows, and null."""
    import pyarrow as pa

    try:
        return pa.array(found, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:
        pass
    texts: list[str | None] = []
    for i, (each, message) in enumerate(zip(found, messages, strict=True)):
        try:
            texts.append(None if each is None else each.decode())
        except UnicodeDecodeError as e:
            byte = f"byte 0x{e.object[e.start]:02x} at byte {e.start} of it"
            why = f"the {what} is not UTF-8: {byte}; {way} takes it as it is"
            bad[i] = BadRow(message.offset(), message.value() or b"", "UnicodeDecodeError", why)
            texts.append(None)
    return pa.array(texts, pa.string())


# ---------------------------------------------------------------- values

Decode = Callable[[Sequence[Any], np.ndarray], Block]
Types = Mapping[str, "pa.DataType"]


@dataclass(frozen=True)
class _Json:
    def schema(self, path: str, sample: Sequence[Sequence[Any]], types: Types) -> pa.Schema:
        full = [[m for m in part if m.value() is not None] for part in sample]
        lines = [_lines([m.value() for m in part], np.array([m.offset() for m in part]), {}) for part in full]
        some = [part for part in lines if len(part)]
        if some and not types and not any(part.line(i).lstrip()[:1] == b"{" for part in some for i in range(len(part))):
            shown = some[0].line(0)[:60].decode("utf-8", "backslashreplace")
            raise BadSource(
                f"{path}: values are not JSON objects (the first is {shown!r}): say what they are with value=text, "
                "value=bytes or value=avro, as in kafka://HOST:9092/TOPIC?value=text"
            )
        return infer(path, some, types, unit="offset")

    def reader(self, reading: Reading) -> Decode:
        objects = Objects(reading) if len(reading.schema) else None

        def decode(messages: Sequence[Any], offsets: np.ndarray) -> Block:
            bad: dict[int, BadRow] = {}
            found = _lines([m.value() for m in messages], offsets, bad)
            if objects is None:
                return _no_columns(found, bad)
            made = objects.block(found)
            return replace(made, bad=(*made.bad, *bad.values()))

        return decode


def _lines(values: Sequence[bytes | None], offsets: np.ndarray, bad: dict[int, BadRow]) -> Lines:
    """Values as if they were lines of a file, in which a record without a value is an object without keys."""
    texts = [b"{}" if v is None else v.strip(b" \t\r\n") for v in values]  # what JSON allows around a value
    if any(empty := [not text for text in texts]):
        for i in np.flatnonzero(empty).tolist():
            bad[i] = BadRow(int(offsets[i]), texts[i], "JSONDecodeError", "the value is empty, not a JSON object")
        full = np.flatnonzero(np.logical_not(empty))
        texts, offsets = [texts[i] for i in full.tolist()], offsets[full]
    sizes = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    start = np.concatenate([[0], np.cumsum(sizes[:-1] + 1)]) if texts else np.zeros(0, dtype=np.int64)
    return Lines(b"\n".join(texts), start, start + sizes, offsets)


def _no_columns(found: Lines, bad: dict[int, BadRow]) -> Block:
    """Values of which the sample knew no columns: any that has some is a bad row."""
    import pyarrow as pa

    empty = np.array([found.line(i).split() in ([b"{}"], [b"{", b"}"]) for i in range(len(found))], dtype=bool)
    why = "columns are found in a sample of records, and none of these had a key: give the types with types="
    others = [BadRow(int(found.position[i]), found.line(i), "UnknownKey", why) for i in np.flatnonzero(~empty).tolist()]
    rows = pa.Table.from_batches([], pa.schema([]))
    return Block(rows, found.position[empty], 0, (*others, *bad.values()))


@dataclass(frozen=True)
class _Plain:
    """Values as they are, in the column `value`."""

    text: bool

    def schema(self, path: str, sample: Sequence[Sequence[Any]], types: Types) -> pa.Schema:
        import pyarrow as pa

        return pa.schema([("value", pa.string() if self.text else pa.binary())])

    def reader(self, reading: Reading) -> Decode:
        import pyarrow as pa

        def decode(messages: Sequence[Any], offsets: np.ndarray) -> Block:
            values = [m.value() for m in messages]
            if not self.text:
                return Block(pa.table({"value": pa.array(values, pa.binary())}), offsets)
            bad: dict[int, BadRow] = {}
            texts = _texts(values, messages, bad, "value", "value=bytes")
            good = np.setdiff1d(np.arange(len(values)), list(bad))
            return Block(pa.table({"value": texts.take(good)}), offsets[good], 0, tuple(bad.values()))

        return decode


def _values(kind: str, log: TopicLog) -> Any:
    if kind == "avro":
        from gristmill.sources.avrovalues import AvroValues

        return AvroValues.of(log)
    return _Json() if kind == "json" else _Plain(kind == "text")
