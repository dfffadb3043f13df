"""Avro records as rows: types of all kinds, by the schema of a file."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.sources.contract import Reading
from gristmill.sources.kafkalog import TopicLog

fastavro = pytest.importorskip("fastavro")

MAPS = {"type": "array", "items": {"type": "map", "values": "string"}}
DEEP = {"type": "record", "name": "N", "fields": [{"name": "d", "type": MAPS}]}
FIELDS: list[tuple[str, Any, Any, str]] = [
    ("map", {"type": "map", "values": "int"}, {"a": 1}, "map<string, int32>"),
    ("enum", {"type": "enum", "name": "E", "symbols": ["A", "B"]}, "A", "string"),
    ("named", "E", "B", "string"),
    ("fixed", {"type": "fixed", "name": "F", "size": 4}, b"abcd", "binary"),
    ("deep", ["null", DEEP], {"d": [{"k": "ü"}]}, "struct<d: list<item: map<string, string>>>"),
    ("again", ["null", "N"], None, "struct<d: list<item: map<string, string>>>"),
    ("millis", {"type": "int", "logicalType": "time-millis"}, dt.time(1, 2, 3, 4000), "time64[us]"),
    ("micros", {"type": "long", "logicalType": "time-micros"}, dt.time(1, 2, 3, 4), "time64[us]"),
    ("at", {"type": "long", "logicalType": "timestamp-millis"}, dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc),
     "timestamp[ms, tz=UTC]"),
    ("local", {"type": "long", "logicalType": "local-timestamp-micros"}, dt.datetime(1, 1, 1), "timestamp[us]"),
    ("money", {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}, decimal.Decimal("-12.30"),
     "decimal128(10, 2)"),
    ("uuid", {"type": "string", "logicalType": "uuid"}, "12345678-1234-5678-1234-567812345678", "string"),
    ("big", "long", 2**63 - 1, "int64"),
]  # fmt: skip


class Message:
    """A record of a topic."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def value(self) -> bytes:
        return self._value

    def offset(self) -> int:
        return 7


def values(fields: list[tuple[str, Any]]) -> Any:
    """The reader of records with these fields."""
    from gristmill.sources.avrovalues import AvroValues

    schema = {"type": "record", "name": "R", "namespace": "a.b", "fields": [{"name": n, "type": t} for n, t in fields]}
    return AvroValues.of(TopicLog("host", "topic", {"schema": "r.avsc"}, json.dumps(schema)))


def test_types_of_all_kinds() -> None:
    """Each with a value that comes back as it was."""
    made = values([(name, kind) for name, kind, *_ in FIELDS])
    schema = made.schema("topic/0", [], {})
    assert {f.name: str(f.type).partition("\n")[0] for f in schema} == {name: told for name, *_, told in FIELDS}
    out = io.BytesIO()
    row = {name: value for name, _, value, _ in FIELDS}
    fastavro.schemaless_writer(out, made.one, row)
    block = made.reader(Reading(None, schema))([Message(out.getvalue())], np.array([7]))
    assert block.bad == () and block.position.tolist() == [7]
    assert block.rows.equals(pa.Table.from_pylist([row], schema))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (["int", "string"], "union of several types"),
        ({"type": "record", "name": "T", "fields": [{"name": "next", "type": ["null", "T"]}]}, "holds itself"),
    ],
)
def test_types_that_no_column_has(kind: Any, says: str) -> None:
    """Are told with the field."""
    with pytest.raises(gm.BadSource, match=f"field 'x'.*{says}"):
        values([("x", kind)]).schema("topic/0", [], {})


def test_what_is_no_schema_of_a_record() -> None:
    """Is told, in one line."""
    from gristmill.sources.avrovalues import AvroValues

    for text in ('"string"', "{", '{"type": "record"}', '{"type": "nonsense"}'):
        with pytest.raises(gm.BadSource, match=r"r.avsc: is not (an Avro schema|the schema of a record)") as told:
            AvroValues.of(TopicLog("host", "topic", {"schema": "r.avsc"}, text))
        assert "\n" not in str(told.value)
