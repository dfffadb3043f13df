"""A key finds the row whose key it equals, and no other: in all stores, for all types and values."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import itertools
import json
import shutil
import subprocess
import sys
import uuid
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.errors import BadKey
from gristmill.stores.keys import exact

ZONE = dt.timezone(dt.timedelta(hours=2))
NOON = dt.datetime(2026, 1, 1, 12, 0, 0)
DAY = dt.date(2026, 1, 1)
# For each key type the keys that rows have.
HELD: dict[pa.DataType, list[Any]] = {
    **{kind: [5, 6, 0, 127] for kind in (pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32())},
    pa.int64(): [5, -1, 2**53, 2**63 - 1],
    pa.uint64(): [5, 0, 2**53 + 1, 2**64 - 1],
    pa.float16(): [5.0, 1.5, 0.0, 2048.0],
    pa.float32(): [5.0, 0.10000000149011612, -0.0, 1.0],
    pa.float64(): [5.0, 0.1, 0.0, 2.0**53],
    pa.decimal128(10, 2): [Decimal("5.00"), Decimal("0.10"), Decimal("1.50"), Decimal("12345678.00")],
    pa.decimal256(40, 2): [Decimal("5.00"), Decimal("0.10"), Decimal("1.50"), Decimal(10) ** 30],
    pa.decimal32(5, 2): [Decimal("5.00"), Decimal("0.10"), Decimal("1.50"), Decimal("-999.99")],
    pa.bool_(): [True, False, True, False],
    **{kind: ["5", "a", "", "é🙂"] for kind in (pa.string(), pa.large_string(), pa.string_view())},
    pa.dictionary(pa.int8(), pa.string()): ["5", "a", "", "é🙂"],
    **{kind: [b"5", b"a", b"", b"\xff\x00"] for kind in (pa.binary(), pa.large_binary(), pa.binary_view())},
    pa.binary(2): [b"55", b"ab", b"\x00\x00", b"\xff\x00"],
    pa.date32(): [DAY, dt.date(1970, 1, 1), dt.date(1, 1, 1), dt.date(9999, 12, 31)],
    pa.date64(): [DAY, dt.date(1970, 1, 1), dt.date(1, 1, 1), dt.date(9999, 12, 31)],
    **{pa.timestamp(u): [NOON, NOON.replace(hour=0), dt.datetime(1970, 1, 1), NOON.replace(second=1)] for u in
       ("s", "ms", "us", "ns")},
    **{pa.timestamp(u, "UTC"): [NOON.replace(tzinfo=dt.timezone.utc), dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc),
                                NOON.replace(tzinfo=ZONE), NOON.replace(second=1, tzinfo=ZONE)] for u in ("s", "us")},
    **{kind: [dt.time(12), dt.time(0), dt.time(23, 59, 59), dt.time(12, 0, 1)] for kind in
       (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"))},
    **{pa.duration(u): [dt.timedelta(0), dt.timedelta(5), dt.timedelta(seconds=-1), dt.timedelta(seconds=5)] for u in
       ("s", "ms", "us", "ns")},
}  # fmt: skip
VALUES: list[Any] = [
    *itertools.chain.from_iterable(HELD.values()),
    None, 1, 300, 2**63, 2**64, 2**70, -(2**70), 5.5, -0.5, 5.0, 2.0**70, float("nan"), float("inf"), -float("inf"),
    Decimal("5.5"), Decimal("5.001"), Decimal("0.1"), Decimal("1E+2000000"), Decimal("NaN"), Decimal("sNaN"),
    Decimal("-Infinity"), Decimal("1." + "0" * 5000), np.int64(5), np.uint8(6), np.int8(-1), np.float64(5.5),
    np.float64(0.1), np.float32(0.1), np.float16(1.5), np.bool_(True), np.str_("a"), np.bytes_(b"a"), bytearray(b"a"),
    "5.5", "5 ", " 5", "0x5", "5_0", "1e400", "true", "False", "2026-01-01", "2026-01-01T12:00:00", "12:00", "x" * 600,
    "2026-01-01T12:00:00Z", "2026-01-01T12:00:00.5", "12:00:00.5", "\ud800", "a\0b", b"abc", b"5" * 600, DAY,
    NOON.replace(microsecond=1), NOON.replace(tzinfo=dt.timezone.utc, microsecond=1), dt.datetime(9999, 1, 1),
    dt.datetime(2026, 1, 1, 23, 59), dt.time(12, 0, 0, 5), dt.time(12, tzinfo=dt.timezone.utc),
    dt.timedelta(microseconds=1), dt.timedelta(days=999_999_999), np.datetime64("2026-01-01"),
    np.datetime64("2026-01-01T12:00:00"), np.datetime64("2026-01-01T12:00:00.000000001"), np.datetime64("NaT"),
    np.timedelta64(5, "s"), np.timedelta64(5, "D"), np.timedelta64(1, "ps"), uuid.UUID(int=5), 5j, (1, 2), {"a"},
]  # fmt: skip


def same(value: Any, held: Any) -> bool:
    """Whether a Python value equals a key, as Python says it; true is no number, and numpy's values are Python's."""
    if isinstance(value, np.datetime64):
        if np.isnat(value) or (isinstance(held, dt.datetime) and held.tzinfo):
            return False
        dates = np.datetime_data(value.dtype)[0] == "D"
        if not isinstance(held, dt.datetime):
            return dates and type(held) is dt.date and value == np.datetime64(held)
        return bool(value == np.datetime64(held))
    if isinstance(value, np.timedelta64):
        return isinstance(held, dt.timedelta) and bool(value == np.timedelta64(held))
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, Decimal) and value.is_snan():
        return False
    return isinstance(value, bool) == isinstance(held, bool) and bool(value == held)


def tried(find: Any, value: Any) -> Any:
    """What is found, or "BadKey"."""
    try:
        return find(value)
    except BadKey:
        return "BadKey"


def right(value: Any, found: Any, held: list[Any], kind: pa.DataType) -> bool:
    """Whether that is what is to be found among the keys held: the row, by its number, None or "BadKey"."""
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    if isinstance(value, str) and not (text or pa.types.is_dictionary(kind)):
        return found in (None, "BadKey") or spelled(value, held[found])
    of = [n for n, key in enumerate(held) if same(value, key)]
    return found in of if of else found in (None, "BadKey")


def spelled(text: str, held: Any) -> bool:
    """Whether a text is one way to write a key."""
    if isinstance(held, bytes):
        return text.encode("utf-8", "surrogatepass") == held
    if isinstance(held, bool):
        return text.lower() == str(held).lower()
    if isinstance(held, (int, float, Decimal)):
        return Decimal(text) == held or np.float32(text) == held
    if isinstance(held, dt.datetime):
        return dt.datetime.fromisoformat(text) == held
    return type(held).fromisoformat(text) == held


@pytest.mark.parametrize("kind", HELD, ids=str)
def test_a_value_becomes_itself_or_no_key(kind: pa.DataType) -> None:
    """For each key type and each Python value: the key that equals it, none, or an error; and never another key."""
    held = pa.array(HELD[kind], kind).to_pylist()
    for value in VALUES:

        def find(value: Any) -> int | None:
            made = exact([(value,)], {"k": kind}, "there")["k"].to_pylist()[0]
            return next((n for n, key in enumerate(held) if made is not None and key == made), None)

        assert right(value, tried(find, value), held, kind), (kind, value)


def test_what_is_no_key_is_said() -> None:
    """The error names the place, the column and its type, the value and what to give."""
    with pytest.raises(BadKey, match=r"there: column 'k' is int64, and a key is not: b'5' is of type bytes: give"):
        exact([(5,), (b"5",)], {"k": pa.int64()}, "there")
    with pytest.raises(BadKey, match=r"of type datetime: give a date"):
        exact([(dt.datetime(2026, 1, 1, 23, 59),)], {"k": pa.date32()}, "there")
    assert BadKey.exit_code == 2 and issubclass(BadKey, gm.BadJob)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One result with a column of each key type, in a sink and in stores that hold them; and what each could hold."""
    folder = tmp_path_factory.mktemp("keys")
    kinds = {f"c{n}": kind for n, kind in enumerate(HELD) if len(set(HELD[kind])) == 4}
    rows = pa.table({"n": range(4), **{name: pa.array(HELD[kind], kind) for name, kind in kinds.items()}})
    stores = ("duckdb", "sqlite", "delta", "lance")
    found: dict[str, Any] = {}
    gm.Job(rows, numbered, gm.sink(folder / "all", keep=["n", *kinds])).run()
    found["sink"] = (str(folder / "all"), kinds)
    for store in stores:
        left = {n: k for n, k in kinds.items() if store != "lance" or not pa.types.is_decimal32(k)}  # it has none
        while True:
            sink, uri = folder / store, f"{store}://{folder}/{store}.db{'' if store == 'delta' else '#t'}"
            shutil.rmtree(sink, ignore_errors=True)
            gm.Job(rows.select(["n", *left]), numbered, gm.sink(sink, keep=["n", *left])).run()
            try:
                gm.deliver(sink, uri)
                break
            except gm.BadJob as e:
                name = next(name for name in left if f"{name!r}" in str(e))
                del left[name]
        found[store] = (uri, left)
    return found


def numbered(batch: Any) -> Any:
    """A function of rows."""
    return {"y": batch["n"] * 2}


@pytest.mark.parametrize("store", ["sink", "duckdb", "sqlite", "delta", "lance"])
@pytest.mark.long
def test_the_same_row_in_every_store(places: dict[str, Any], store: str) -> None:
    """Each key type that a store holds, looked up by each Python value: the row whose key equals it, none or an error;
    the same one value at a time and all at once.
    """
    uri, kinds = places[store]
    assert len(kinds) > 10
    for name, kind in kinds.items():
        held = pa.array(HELD[kind], kind).to_pylist()
        refused = [tried(lambda value, kind=kind: exact([(value,)], {"k": kind}, "") and None, v) for v in VALUES]
        values = [value for value, said in zip(VALUES, refused, strict=True) if said != "BadKey"]
        with gm.lookup(uri, key=name) as looking:
            found = [row and row["n"] for row in looking.get_many([[value] for value in values])]
            for value, number in zip(values, found, strict=True):
                assert right(value, number, held, kind), (store, kind, value, number)
            for value, number in list(zip(values, found, strict=True))[:: len(values) // 3]:
                row = looking.get([value])
                assert (row and row["n"]) == number, (store, kind, value, row)
            with pytest.raises(BadKey):
                looking.get_many([[values[0]], [{"a"}]])


@pytest.mark.long
def test_the_same_row_by_bytes(tmp_path: Any) -> None:
    """The same where keys are found by their bytes: in LMDB, and by the index of a sink."""
    kinds = {f"c{n}": k for n, k in enumerate(HELD) if len(set(HELD[k])) == 4 and not pa.types.is_floating(k)}
    kinds = {name: kind for name, kind in kinds.items() if not pa.types.is_decimal256(kind)}  # DuckDB has none
    there = [0, 1, 3]  # not the empty text, which LMDB has no key for
    held = {name: pa.array([HELD[kind][n] for n in there], kind) for name, kind in kinds.items()}
    rows = pa.table({"n": range(3), **held})
    gm.Job(rows, numbered, gm.sink(tmp_path / "out", keep=["n", *kinds])).run()
    for name, kind in kinds.items():
        uri = f"lmdb://{tmp_path}/{name}.lmdb"
        gm.deliver(tmp_path / "out", uri, key=name)
        places = [uri]
        if kind in (pa.int64(), pa.string(), pa.date32()):
            gm.Job(rows, numbered, gm.sink(tmp_path / "out", keep=["n", *kinds], index=name)).run()
            places.append(str(tmp_path / "out"))
        for place in places:
            with gm.lookup(place) as looking:
                for value in VALUES:  # one by one, as some have a way of their own
                    row = tried(looking.get, [value])
                    number = row["n"] if isinstance(row, dict) else row
                    assert right(value, number, held[name].to_pylist(), kind), (place, kind, value, row)


@pytest.fixture
def pairs(tmp_path: Any) -> list[str]:
    """Rows found by two columns, with an index, without one, and in stores."""
    rows = pa.table({"a": [1, 2], "b": [2, 1], "n": [12, 21]})
    gm.Job(rows, numbered, gm.sink(tmp_path / "out", keep=["a", "b"], index=["a", "b"])).run()
    gm.Job(rows, numbered, gm.sink(tmp_path / "plain", keep=["a", "b"])).run()
    stores = [f"sqlite://{tmp_path}/s.sqlite#t", f"lmdb://{tmp_path}/s.lmdb", f"duckdb://{tmp_path}/s.duckdb#t"]
    for store in stores:
        gm.deliver(tmp_path / "out", store, key=["a", "b"])
    return [str(tmp_path / "out"), str(tmp_path / "plain"), *stores]


def test_a_mapping_is_matched_by_its_names(pairs: list[str]) -> None:
    """A dict finds the same row in any order of its names, and is refused with other names than the key's."""
    for at in pairs:
        with gm.lookup(at, key=["a", "b"]) as looking:
            assert looking.get({"b": 2, "a": 1})["y"] == looking.get({"a": 1, "b": 2})["y"] == looking.get((1, 2))["y"]
            several = looking.get_many([{"b": 2, "a": 1}, [2, 1], (2**70, 1), (1, None)])
            assert [row and row["y"] for row in several] == [24, 42, None, None]
            with pytest.raises(BadKey, match=r"'aa' is no column of the key: the key has 2.*a, b; did you mean 'a'\?$"):
                looking.get({"aa": 1, "b": 2})
            with pytest.raises(BadKey, match=r"'b' is missing: the key has 2 columns: a, b"):
                looking.get({"a": 1})
            assert looking.get((1.7, 2.9)) is None


@pytest.mark.long
def test_awaited_and_typed_keys_are_the_same(pairs: list[str]) -> None:
    """`gm.aio.lookup` and the command line find by the same rule."""

    async def awaited(at: str) -> list[Any]:
        async with gm.aio.lookup(at, key=["a", "b"]) as looking:
            found = [await looking.get(key) for key in ({"b": 2, "a": 1}, (1.5, 2))]
            with contextlib.suppress(BadKey):
                found.append(await looking.get({"a": 1}))
            return [row and row["y"] for row in found]

    for at in pairs:
        assert asyncio.run(awaited(at)) == [24, None]
    command = [sys.executable, "-m", "gristmill", "lookup", pairs[0], "--json"]
    typed = subprocess.run([*command, '["1", 2]'], capture_output=True, text=True)
    assert typed.returncode == 0 and json.loads(typed.stdout)["y"] == 24
    typed = subprocess.run([*command, "[1.5, 2]"], capture_output=True, text=True)
    assert typed.returncode == 2 and "column 'a' is int64" in typed.stderr and "give a whole number" in typed.stderr


def test_several_rows_of_a_key_are_refused_alike(tmp_path: Any) -> None:
    """A sink without an index refuses such a key as a table does, with the way out; one with an index has the last."""
    rows = pa.table({"carrier": ["AA", "AA", "B"], "n": [1, 2, 3]})
    gm.Job(rows, numbered, gm.sink(tmp_path / "out", keep=["carrier"])).run()
    with gm.lookup(tmp_path / "out", key="carrier") as looking:
        assert looking.get("B") == {"carrier": "B", "y": 6}
        with pytest.raises(gm.BadSource, match=r"several rows have carrier = 'AA'.*--index"):
            looking.get("AA")
    gm.Job(rows, numbered, gm.sink(tmp_path / "out", keep=["carrier"], index="carrier")).run()
    with gm.lookup(tmp_path / "out") as looking:
        assert looking.get("AA") == {"carrier": "AA", "y": 4}
