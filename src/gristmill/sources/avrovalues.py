"""Avro records as rows: values of one schema, or, framed as Confluent's serializers do, of schemas in a registry."""

from __future__ import annotations

import base64
import io
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np

from gristmill.arrow.schemas import wider
from gristmill.errors import BadJob, BadSource
from gristmill.process.extras import require
from gristmill.sources.contract import BadRow, Block, Reading
from gristmill.sources.kafkalog import REGISTRY, REGISTRY_USER, TopicLog
from gristmill.sources.patience import patiently
from gristmill.values import dataclass

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["AvroValues"]

_FRAME = 5  # bytes before a value that names its schema: 0, and a big-endian number
_REGISTRY_SECONDS = 10.0


@dataclass(frozen=True)
class AvroValues:
    """Values of the schema that the address names (`schema=FILE`), or whose first bytes name theirs in a registry (the
    property `schema.registry.url`). All are records; a record without a value has null in all columns.
    """

    log: TopicLog
    one: Any = None
    known: dict[int, Any] = field(default_factory=dict, compare=False)

    @staticmethod
    def of(log: TopicLog) -> AvroValues:
        """Raises BadJob if neither is named, or the schema is none."""
        fastavro = require("fastavro", "kafka", f"{log.shown}: value=avro")
        if not log.schema and REGISTRY not in log.client:
            raise BadJob(
                f"{log.shown}: value=avro needs the values' schema: schema=FILE.avsc in the address, or {REGISTRY!r} "
                "in storage"
            )
        return AvroValues(log, _parsed(fastavro, log.schema, log.said.get("schema", "")) if log.schema else None)

    def schema(self, path: str, sample: Sequence[Sequence[Any]], types: Mapping[str, pa.DataType]) -> pa.Schema:
        """The columns of the schemas of the sampled values, in the order of their fields."""
        import pyarrow as pa

        schemas = [self.one] if self.one is not None else []
        for message in (m for part in sample for m in part) if self.one is None else ():
            if message.value() is None:
                continue
            found, _ = self._framed(message.value())
            if not any(found is other for other in schemas):
                schemas.append(found)
        kinds: dict[str, pa.DataType] = {}
        for each in schemas:
            for name, kind in _columns(each, path).items():
                both = wider(kinds.get(name, kind), kind, text=False)
                if both is None:
                    raise BadSource(f"{path}: field {name!r} is {kinds[name]} in one schema and {kind} in another")
                kinds[name] = both
        return pa.schema(list(kinds.items()))

    def reader(self, reading: Reading) -> Callable[[Sequence[Any], np.ndarray], Block]:
        """What turns messages into rows of the wanted columns."""
        import fastavro
        import pyarrow as pa

        names = list(reading.schema.names if reading.columns is None else reading.columns)
        target = pa.schema([reading.schema.field(n) for n in names])
        every = reading.columns is None

        def row(value: bytes | None) -> dict[str, Any]:
            if value is None:
                return {}
            schema, at = (self.one, 0) if self.one is not None else self._framed(value)
            stream = io.BytesIO(value)
            stream.seek(at)
            found: Any = fastavro.schemaless_reader(stream, schema, None)
            if stream.tell() != len(value):
                raise ValueError(f"{len(value) - stream.tell()} bytes are left behind the record")
            if not isinstance(found, dict):
                raise ValueError("is not a record")
            if every and (other := next((n for n, v in found.items() if v is not None and n not in names), None)):
                raise ValueError(f"field {other!r} has no column: it is in no schema of the sampled records")
            return found

        def decode(messages: Sequence[Any], offsets: np.ndarray) -> Block:
            rows, good, bad = [], [], []
            for i, message in enumerate(messages):
                try:
                    rows.append(row(message.value()))
                    good.append(i)
                except BadSource:
                    raise
                except Exception as e:  # whatever a decoder meets in bytes that are not of the schema
                    bad.append(_bad(message, e))
            try:
                return Block(pa.Table.from_pylist(rows, target), offsets[good], 0, tuple(bad))
            except (pa.ArrowException, OverflowError, TypeError, ValueError):
                return _one_by_one(rows, target, [messages[i] for i in good], bad)

        return decode

    def _framed(self, value: bytes) -> tuple[Any, int]:
        """The schema of a value that names it, and where the record begins."""
        if len(value) < _FRAME or value[0] != 0:
            raise ValueError("does not begin with the number of a schema: name one with schema=FILE.avsc")
        number = int.from_bytes(value[1:_FRAME], "big")
        if number not in self.known:
            self.known[number] = self._registered(number)
        return self.known[number], _FRAME

    def _registered(self, number: int) -> Any:
        url = f"{str(self.log.client[REGISTRY]).rstrip('/')}/schemas/ids/{number}"
        request = urllib.request.Request(url)
        if user := self.log.client.get(REGISTRY_USER):
            request.add_header("Authorization", f"Basic {base64.b64encode(str(user).encode()).decode()}")

        def asked() -> bytes:
            try:
                with urllib.request.urlopen(request, timeout=_REGISTRY_SECONDS) as answer:
                    text: bytes = answer.read()
                    return text
            except urllib.error.HTTPError as e:
                if e.code in (408, 429) or e.code >= 500:
                    raise
                raise BadSource(
                    f"{self.log.shown}: the registry has no schema {number} for us: {e.code} {e.reason}"
                ) from e

        import fastavro

        answer = json.loads(patiently(self.log.shown, asked))
        return _parsed(fastavro, answer["schema"], f"schema {number} of the registry")


def _parsed(fastavro: Any, text: str, what: str) -> Any:
    try:
        schema = fastavro.parse_schema(_texts_for_uuids(json.loads(text)))
    except (ValueError, KeyError, TypeError, fastavro.schema.SchemaParseException, fastavro.schema.UnknownType) as e:
        raise BadSource(f"{what}: is not an Avro schema: {e}") from e
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise BadSource(f"{what}: is not the schema of a record, whose fields would be columns")
    return schema


def _texts_for_uuids(schema: Any) -> Any:
    """A schema whose UUIDs are the texts that they are stored as."""
    if isinstance(schema, list):
        return [_texts_for_uuids(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    left_out = "logicalType" if schema.get("logicalType") == "uuid" else ""
    return {name: _texts_for_uuids(part) for name, part in schema.items() if name != left_out}


def _bad(message: Any, error: BaseException) -> BadRow:
    text = " ".join(str(error).split()) or "the bytes are not a record of the schema"
    return BadRow(message.offset(), message.value() or b"", type(error).__name__, text)


def _one_by_one(rows: list[dict[str, Any]], target: pa.Schema, messages: Sequence[Any], bad: list[BadRow]) -> Block:
    """The rows whose values fit the columns; the others are bad."""
    import pyarrow as pa

    tables, offsets = [target.empty_table()], []
    for row, message in zip(rows, messages, strict=True):
        try:
            tables.append(pa.Table.from_pylist([row], target))
            offsets.append(message.offset())
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as e:
            bad.append(_bad(message, e))
    return Block(pa.concat_tables(tables), np.array(offsets, dtype=np.int64), 0, tuple(bad))


# ---------------------------------------------------------------- types


def _columns(schema: Any, path: str) -> dict[str, pa.DataType]:
    named: dict[str, Any] = {}
    return {
        f["name"]: _kind(f["type"], f"{path}: field {f['name']!r}", named) for f in _entered(schema, named)["fields"]
    }


def _entered(schema: Any, named: dict[str, Any]) -> Any:
    named[schema["name"]] = schema
    return schema


def _kind(kind: Any, where: str, named: dict[str, Any], inside: tuple[str, ...] = ()) -> pa.DataType:
    """The Arrow type of an Avro one. Raises BadSource for one that Arrow does not have."""
    import pyarrow as pa

    if isinstance(kind, list):
        some = [k for k in kind if k != "null"]
        if len(some) != 1:
            raise BadSource(f"{where}: is a union of several types, which a column is not: name other columns=")
        return _kind(some[0], where, named, inside)
    if isinstance(kind, str) and kind in named:
        kind = named[kind]
    name = kind if isinstance(kind, str) else kind["type"]
    if isinstance(kind, dict) and (logical := _logical(kind)) is not None:
        return logical
    if name == "record":
        if kind["name"] in inside:
            raise BadSource(f"{where}: holds itself ({kind['name']}), which a column cannot: name other columns=")
        deeper = (*inside, kind["name"])
        fields = _entered(kind, named)["fields"]
        return pa.struct([(f["name"], _kind(f["type"], f"{where}.{f['name']}", named, deeper)) for f in fields])
    if name in ("enum", "fixed"):
        _entered(kind, named)
        return pa.string() if name == "enum" else pa.binary()
    if name == "array":
        return pa.list_(_kind(kind["items"], where, named, inside))
    if name == "map":
        return pa.map_(pa.string(), _kind(kind["values"], where, named, inside))
    plain = {"null": pa.null(), "boolean": pa.bool_(), "int": pa.int32(), "long": pa.int64(), "float": pa.float32(),
             "double": pa.float64(), "bytes": pa.binary(), "string": pa.string()}  # fmt: skip
    if not isinstance(name, str):
        return _kind(name, where, named, inside)
    if name not in plain:
        raise BadSource(f"{where}: is of the type {name!r}, which is not known")
    return plain[name]


def _logical(kind: Mapping[str, Any]) -> pa.DataType | None:
    """The type that fastavro's values of a logical type have; None for one that it leaves as it is stored."""
    import pyarrow as pa

    name = kind.get("logicalType")
    if name == "decimal":
        return pa.decimal128(int(kind["precision"]), int(kind.get("scale", 0)))
    return {
        "date": pa.date32(),
        "time-millis": pa.time64("us"),
        "time-micros": pa.time64("us"),
        "timestamp-millis": pa.timestamp("ms", "UTC"),
        "timestamp-micros": pa.timestamp("us", "UTC"),
        "local-timestamp-millis": pa.timestamp("ms"),
        "local-timestamp-micros": pa.timestamp("us"),
    }.get(str(name))
