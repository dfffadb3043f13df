"""Two published results held against each other: what is joined, counted and measured, against pandas, numpy and
scikit-learn on the same rows.
"""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import cohen_kappa_score, confusion_matrix

import gristmill as gm
from gristmill.comparison import join, pairing, side
from gristmill.comparison.choice import Chosen
from gristmill.comparison.comparison import Comparison, Labels, Numbers, Vectors
from gristmill.comparison.quantiles import Spool
from gristmill.comparison.tallies import NumberTally, Worst

Publish = Callable[..., str]


def passed(table: pa.Table) -> pa.Table:
    """A model that answers with what it is given."""
    return table


@pytest.fixture
def publish(tmp_path: Path) -> Publish:
    """Columns published in a sink; returns its path."""

    def made(name: str, columns: Any, **options: Any) -> str:
        table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        sink, kept = str(tmp_path / name), {"on_null": "keep", "on_nan": "keep", "workers": 0}
        gates = {"min_ok": 0, "allow_empty": True}
        gm.apply(table, sink, fn=passed, batch_format="arrow", gates=gates, **kept, **options)
        return sink

    return made


# ---------------------------------------------------------------- joins


@dataclass(frozen=True)
class Rows:
    """A result that was not published: what a join and a pairing ask of one."""

    table: pa.Table
    name: str = "rows"
    step: ClassVar[int] = 3

    @property
    def schema(self) -> pa.Schema:
        return self.table.schema

    def stream(self, columns: list[str]) -> Iterator[tuple[int, pa.Table]]:
        for first in range(0, self.table.num_rows, self.step):
            yield first, self.table.select(columns).slice(first, self.step)


keys = st.lists(st.tuples(st.none() | st.integers(0, 4), st.none() | st.sampled_from(["x", "é", ""])), max_size=12)


@settings(max_examples=25)
@given(keys, keys)
def test_rows_are_joined_as_pandas_joins_them(tmp_path_factory: pytest.TempPathFactory, ours: Any, theirs: Any) -> None:
    """Whatever is missing, twice there, null, and in whatever order; null is a key as any other."""
    schema = {"k": pa.int64(), "t": pa.string()}
    made = [[pa.array([r[i] for r in rows], k) for i, k in enumerate(schema.values())] for rows in (ours, theirs)]
    a, b = (Rows(pa.table(columns, list(schema))) for columns in made)
    folder = str(tmp_path_factory.mktemp("joined"))
    if len(set(ours)) < len(ours) or len(set(theirs)) < len(theirs):
        with pytest.raises(gm.BadJob, match="share their key with another"):
            join.Join(a, b, schema, folder)  # type: ignore[arg-type]
        return
    frames = [pd.DataFrame({"k": [str(r) for r in rows], "n": range(len(rows))}) for rows in (ours, theirs)]
    merged = frames[0].merge(frames[1], on="k", how="outer", indicator=True)
    both = merged[merged["_merge"] == "both"].sort_values("n_x")
    with join.Join(a, b, schema, folder) as joined:  # type: ignore[arg-type]
        found = joined.matches("a", 0, 100)
        assert [n.tolist() for n in found] == [both["n_x"].tolist(), both["n_y"].tolist()]
        assert joined.in_order == (found[1].tolist() == sorted(found[1].tolist()))
        assert sorted(zip(*joined.matches("b", 0, 100), strict=True)) == sorted(zip(found[1], found[0], strict=True))
        for side_of, rows, others in (("a", ours, theirs), ("b", theirs, ours)):
            alone = [dict(zip(schema, r, strict=True)) for r in rows if r not in others]
            assert joined.alone(side_of, 3) == (len(alone), alone[:3])


def test_rows_in_another_order_are_found_in_pieces(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of all sorts, read in small batches and put in order through many files, meet those of their own row."""
    monkeypatch.setattr(side, "BATCH_ROWS", (7, 7))
    monkeypatch.setattr(pairing, "PIECE_BYTES", 500)
    monkeypatch.setattr(join, "STEP", 64)
    n = 300
    order = np.random.default_rng(3).permutation(n)
    columns = {
        "id": pa.array(range(n)), "text": pa.array([f"é{i}" * (i % 5) for i in range(n)]),
        "pair": pa.array([{"x": [i] * (i % 3), "y": None} for i in range(n)]),
        "grid": pa.array([[[i, 1.0], [2.0, 3.0]] for i in range(n)], pa.list_(pa.list_(pa.float32(), 2), 2)),
        "vector": pa.array([[float(i), 1.0, 2.0] for i in range(n)], pa.list_(pa.float32(), 3)),
    }  # fmt: skip
    table = pa.table(columns)
    found = gm.compare(publish("a", table.slice(0, 290)), publish("b", table.take(order).slice(20)), on="id")
    assert found.matched == len(set(range(290)) & set(order[20:].tolist()))
    assert [(c.name, c.equal, c.agreement) for c in found.columns] == [
        (name, found.matched, 1.0) for name in ("text", "pair", "grid", "vector")
    ]
    assert [key["id"] for key in found.missing_in_b] == sorted(i for i in order[:20].tolist() if i < 290)[:5]


@pytest.mark.parametrize(("memory", "fails"), [("40MB", False), ("1MB", True)])
def test_keys_beyond_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str, fails: bool) -> None:
    """Are joined on disk; where even that does not do, the error says what there was, and where."""
    monkeypatch.setattr(join, "MEMORY", memory)
    monkeypatch.setattr(Rows, "step", 100_000)
    keys = np.arange(600_000)
    rows, turned = Rows(pa.table({"k": keys})), Rows(pa.table({"k": keys[::-1]}))
    if fails:
        with pytest.raises(gm.RunFailed, match=r"joined in 1MB of memory and the temporary folder .*TMPDIR"):
            join.Join(rows, turned, {"k": pa.int64()}, str(tmp_path))  # type: ignore[arg-type]
        return
    with join.Join(rows, turned, {"k": pa.int64()}, str(tmp_path)) as joined:  # type: ignore[arg-type]
        assert joined.matched == 600_000 and any((tmp_path / "spilled").iterdir())
        assert joined.matches("a", 0, 2)[1].tolist() == [599_999, 599_998]


@pytest.mark.parametrize(
    "value", [2**53 + 1, "na\0ïve 日本", b"\xff\x00", datetime.date(1, 1, 1), Decimal("1.10"), True]
)
def test_keys_of_all_sorts(publish: Publish, value: Any) -> None:
    """Each is itself, and only that: no neighbour, no rounded number."""
    near = {int: lambda v: v - 1, str: lambda v: v + " ", bytes: lambda v: v[:1], bool: lambda v: not v}
    other = near.get(type(value), lambda v: v + (Decimal(1) if isinstance(v, Decimal) else datetime.timedelta(1)))(
        value
    )
    found = gm.compare(publish("a", {"k": [value], "v": [1]}), publish("b", {"k": [other, value], "v": [1, 1]}), on="k")
    assert (found.matched, found.only_b, found.missing_in_a) == (1, 1, ({"k": other},))


def test_nanoseconds_and_other_types_of_one_key(publish: Publish) -> None:
    """Instants a nanosecond apart are two; int32 joins int64, and whole floats join whole numbers exactly."""
    times = pa.array([1, 2], pa.timestamp("ns", "UTC"))
    a = publish("a", {"at": times.slice(0, 1), "i": pa.array([7], pa.int32()), "w": [2**53 + 1], "v": [1]})
    b = publish("b", {"at": times, "i": pa.array([7, 7]), "w": pa.array([2.0**53, 5.0]), "v": [1, 1]})
    assert gm.compare(a, b, on=["at", "i"], columns="v").matched == 1
    c = publish("c", {"w": pa.array([2.0**53, 5.0]), "v": [1, 1]})
    assert gm.compare(a, c, on="w", columns="v").matched == 0
    with pytest.raises(gm.BadJob, match=r"--on w: it is double in .* compared as int64"):
        gm.compare(a, publish("d", {"w": [0.5], "v": [1]}), on="w", columns="v")


def test_keys_that_repeat_are_refused_with_an_example(publish: Publish) -> None:
    """How many, which, and the columns that could tell them apart."""
    a = publish("a", {"id": [1, 2, 2, None, None, None], "chunk": [0, 0, 1, 0, 1, 2], "v": [1] * 6})
    with pytest.raises(gm.BadJob) as e:
        gm.compare(a, a, on="id")
    assert "5 rows share their key with another: id=2 is that of 2; add a column to --on" in str(e.value)
    assert "chunk, v" in str(e.value)
    assert gm.compare(a, a, on=["id", "chunk"], columns="v").matched == 6


# ---------------------------------------------------------------- what is chosen


def score(batch: dict[str, Any]) -> dict[str, Any]:
    """A row-wise function."""
    return {"score": batch["x"] * 2}


def test_the_key_is_what_both_jobs_tell_rows_apart_by(tmp_path: Path) -> None:
    """A row id, or the columns of a key that are kept; else the error names what both have."""
    (tmp_path / "in.csv").write_text("id,x\na,1\nb,2\n")
    source, sinks = str(tmp_path / "in.csv"), {}
    for name, options in {
        "ids": {"row_id": "rid"},
        "key": {"row_id": "rid", "key": ["id"], "keep": ["id"]},
        "other": {"row_id": "oid", "key": ["id"], "keep": ["id"]},
        "plain": {"keep": ["id"]},
    }.items():
        gm.apply(source, str(tmp_path / name), fn=score, workers=0, **options)
        sinks[name] = str(tmp_path / name)
    assert gm.compare(sinks["ids"], sinks["ids"]).on == ("rid",)
    found = gm.compare(sinks["key"], sinks["other"])
    assert (found.on, [c.name for c in found.columns], found["score"].agreement) == (("id",), ["score"], 1.0)
    for mine, other, both in (("key", "plain", "id"), ("key", "ids", "rid")):  # ids of a place are not those of a key
        with pytest.raises(gm.BadJob, match=rf"give --on \(on=\), the columns that tell .* apart: both have {both}$"):
            gm.compare(sinks[mine], sinks[other])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no such key": ({"on": "ide"}, "names 'ide', which a does not have: it has id, x, t; did you mean 'id'?"),
    "no such column": ({"on": "id", "columns": ["y"]}, "columns= names 'y', which a does not have"),
    "a key": ({"on": "id", "columns": "id"}, "names id, which is a key"),
    "types": ({"on": "id", "columns": "t"}, "t cannot be compared: it is string in a and int64 in b"),
    "types of a key": ({"on": "t"}, "--on t: it is string in a and int64 in b, which cannot be compared"),
    "twice": ({"on": ["id", "id"]}, "is id, id: name each key column once"),
    "nothing": ({"on": []}, "is empty: name each"),
    "tolerance": ({"on": "id", "tolerance": math.nan}, "(tolerance=) is nan: give a number of at least 0"),
    "share": ({"on": "id", "min_agreement": 95}, "(min_agreement=) is 95: give a number from 0 to 1"),
    "examples": ({"on": "id", "examples": 2.5}, "(examples=) is 2.5: give a whole number"),
    "name": ({"key": "id"}, "compare has no option 'key'"),
}


@pytest.fixture
def pair(publish: Publish, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sinks a and b in the current folder, in which t has two types."""
    publish("a", {"id": [1, 2], "x": [1.0, 2.0], "t": ["1", "2"]})
    publish("b", {"id": [1, 2], "x": [1.0, 2.5], "t": [1, 2]})
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_compared_is_told(pair: None, case: str) -> None:
    """With the value, the sinks, and what there is instead."""
    options, said = WRONG[case]
    with pytest.raises(gm.BadJob) as e:
        gm.compare("a", "b", **options)
    assert said.replace("columns=", "") in str(e.value).replace("(columns=)", "").replace("--columns ", "")


def test_columns_of_two_sorts_are_left_out_by_name(pair: None) -> None:
    """Where nobody asked for them; the others are compared."""
    found = gm.compare("a", "b", on="id")
    assert [c.name for c in found.columns] == ["x"] and found.left_out == {"t": "it is string in a and int64 in b"}
    assert "left out  t: it is string in a and int64 in b" in str(found)


def test_results_without_common_answers_or_rows(publish: Publish) -> None:
    """No column that both answered in is an error that names theirs; no row in both is told, and never agrees."""
    a, b = publish("a", {"id": [1], "x": [1.0]}), publish("b", {"id": [2], "x": [1.0]})
    found = gm.compare(a, b, on="id")
    assert (found.matched, found["x"].agreement, found["x"].rows) == (0, None, 0) and "no row is in both" in str(found)
    with pytest.raises(gm.GateFailed, match="nothing agrees"):
        gm.compare(a, b, on="id", min_agreement=0)
    empty = pa.table({"id": pa.array([], pa.int64()), "x": pa.array([], pa.float64())})
    typed = {"returns": {"id": "int64", "x": "float64"}}
    for sinks in ((a, publish("c", empty, **typed)), (publish("d", empty, **typed), publish("e", empty, **typed))):
        found = gm.compare(*sinks, on="id")
        assert (found.matched, [c.name for c in found.columns]) == (0, ["x"])
    with pytest.raises(gm.BadJob, match=r"no column in which both models answered: that of \S+ answered in id, x"):
        gm.compare(a, publish("f", {"id": [1], "y": [1]}), on="id")


# ---------------------------------------------------------------- labels


def frame_of(rng: np.random.Generator, n: int, kinds: list[Any]) -> pd.Series[Any]:
    return pd.Series([kinds[i] for i in rng.integers(0, len(kinds), n)], dtype=object)


@pytest.mark.parametrize(
    "kinds", [["fresh", "rotten", "日本", "", None], [1, -5, 2**53 + 1, 2**53, None], [True, False]]
)
def test_labels_as_scikit_learn_counts_them(publish: Publish, kinds: list[Any]) -> None:
    """Agreement, confusion and kappa; null is a label, and is counted apart, too."""
    rng = np.random.default_rng(1)
    ours, theirs = (frame_of(rng, 400, kinds) for _ in range(2))
    tables = [{"id": range(400), "label": pa.array(s.tolist())} for s in (ours, theirs)]
    column = gm.compare(publish("a", tables[0]), publish("b", tables[1]), on="id", examples=3)["label"]
    codes = [[str(kinds.index(v)) for v in s] for s in (ours, theirs)]
    names = sorted(set(codes[0] + codes[1]))
    table = confusion_matrix(*codes, labels=names)
    wanted = {(kinds[int(a)], kinds[int(b)]): n for a, line in zip(names, table.tolist(), strict=True)
              for b, n in zip(names, line, strict=True) if n}  # fmt: skip
    assert isinstance(column.measured, Labels)
    assert {(a, b): n for a, b, n in column.measured.pairs} == wanted
    assert column.measured.kappa == pytest.approx(cohen_kappa_score(*codes))
    assert column.agreement == column.equal / 400 == np.trace(table) / 400
    none = [s.isna() for s in (ours, theirs)]
    assert column.null_both == (none[0] & none[1]).sum() and column.null_only_a == (none[0] & ~none[1]).sum()
    first = [i for i in range(400) if codes[0][i] != codes[1][i]][:3]
    assert [(e.key["id"], e.a, e.b) for e in column.examples] == [(i, ours[i], theirs[i]) for i in first]


def test_labels_of_two_types(publish: Publish) -> None:
    """int32 beside int64, uint64 beside int64, floats beside whole numbers, dictionaries beside text: by value."""
    big = 2**63 + 2
    a = {"id": [1, 2, 3], "i": pa.array([1, 2, 3], pa.int32()), "u": pa.array([1, 2, big], pa.uint64()),
         "f": pa.array([1, 2**53 + 1, None]), "d": pa.array(["x", "y", None]).dictionary_encode()}  # fmt: skip
    b = {"id": [1, 2, 3], "i": [1, 2, 4], "u": pa.array([1, -2, 3]), "f": [1.0, 2.0**53, None], "d": ["x", "z", None]}
    found = gm.compare(publish("a", a), publish("b", b), on="id", columns=["i", "u", "f", "d"], tolerance=0)
    assert {c.name: c.equal for c in found.columns} == {"i": 2, "u": 1, "f": 2, "d": 2}
    assert (big, 3, 1) in found["u"].measured.pairs  # type: ignore[union-attr]
    assert [type(c.measured) for c in found.columns] == [Labels, Labels, Numbers, Labels]


def test_free_text_is_no_label(publish: Publish) -> None:
    """With too many sorts only the share that is equal is told, and examples."""
    texts = [f"answer {i}" for i in range(2000)]
    a, b = publish("a", {"id": range(2000), "t": texts}), publish("b", {"id": range(2000), "t": [*texts[:-1], "other"]})
    column = gm.compare(a, b, on="id")["t"]
    assert (column.kind, column.measured, column.equal, len(column.examples)) == ("values", None, 1999, 1)


# ---------------------------------------------------------------- numbers and vectors


odd = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e200, -1e200, 5e-324, None])
numbers = st.lists(st.tuples(*[odd | st.floats(-1e6, 1e6)] * 2), min_size=1, max_size=30)


@settings(max_examples=15)
@given(numbers)
def test_differences_as_numpy_has_them(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    """Of the rows in which both are finite; every other row is counted once, by what it is."""
    tally = NumberTally(
        Chosen("v", "numbers", pa.float64(), ("double", "double")), Worst(3, ("id",), ()),
        str(tmp_path_factory.mktemp("numbers") / "spool"), 0.5,
    )  # fmt: skip
    ids = pa.table({"id": range(len(rows))})
    for at in range(0, len(rows), 7):
        columns = (pa.chunked_array([pa.array([r[i] for r in rows[at : at + 7]], pa.float64())]) for i in (0, 1))
        tally.add(*columns, ids.slice(at, 7))
    column = tally.column()
    m = column.measured
    assert isinstance(m, Numbers)
    both = [(x, y) for x, y in rows if x is not None and y is not None]
    finite = np.array([(x, y) for x, y in both if math.isfinite(x) and math.isfinite(y)]).reshape(-1, 2)
    with np.errstate(over="ignore"):
        apart = np.abs(finite[:, 0] - finite[:, 1])
        wanted = (apart.mean(), np.median(apart), apart.max()) if len(apart) else (None, None, None)
    assert m.compared == len(finite) and (m.mean, m.median, m.max) == pytest.approx(wanted)
    nan = [(math.isnan(x), math.isnan(y)) for x, y in both]
    told = (m.nan_only_a, m.nan_only_b, m.nan_both)
    assert told == tuple(map(nan.count, ((True, False), (False, True), (True, True))))
    nulls = column.null_only_a + column.null_only_b + column.null_both
    assert m.compared + m.infinite + m.nan_only_a + m.nan_only_b + m.nan_both + nulls == len(rows)
    same = sum(x == y or (x is not None and y is not None and x != x and y != y) for x, y in rows)
    assert column.equal == same and m.within == same + sum(0 < d <= 0.5 for d in apart)


def test_correlation_as_numpy_has_it(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged over batches, far from zero; a side that does not vary has none."""
    monkeypatch.setattr(side, "BATCH_ROWS", (50, 50))
    rng = np.random.default_rng(0)
    x = rng.normal(size=1000) + 1e6
    y = x + rng.normal(size=1000)
    a, b = (
        publish("a", {"id": range(1000), "v": x, "c": x}),
        publish("b", {"id": range(1000), "v": y, "c": [1.0] * 1000}),
    )
    found = gm.compare(a, b, on="id")
    assert found["v"].measured.correlation == pytest.approx(np.corrcoef(x, y)[0, 1])  # type: ignore[union-attr]
    assert found["c"].measured.correlation is None  # type: ignore[union-attr]
    worst = np.argsort(-np.abs(x - y))[:5]
    assert [e.key["id"] for e in found["v"].examples] == worst.tolist()
    assert [e.difference for e in found["v"].examples] == pytest.approx(np.abs(x - y)[worst].tolist())


@settings(max_examples=50)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=60))
def test_quantiles_as_numpy_has_them(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    """From a file, in several steps, negative ones and repeats too."""
    spool = Spool(str(tmp_path_factory.mktemp("spool") / "numbers"))
    spool.add(np.array(values[:7]))
    spool.add(np.array(values[7:]))
    shares = (0.0, 0.01, 0.5, 0.9, 1.0)
    assert spool.quantiles(shares) == pytest.approx(np.quantile(values, shares).tolist())


@pytest.mark.parametrize("kind", [pa.list_(pa.float32(), 8), pa.list_(pa.float64()), pa.list_(pa.float16(), 8)])
def test_cosines_as_numpy_has_them(publish: Publish, kind: pa.DataType) -> None:
    """Mean, least, quantiles and the lowest rows; vectors without a cosine are told apart."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(300, 8)).astype(np.float16).astype(np.float32)
    y = (x + rng.normal(size=(300, 8)) * 0.3).astype(np.float16).astype(np.float32)
    y[0], x[1], y[1] = 0, 0, 0
    y[2, 3] = math.nan
    width = np.float16 if "half" in str(kind) else np.float32
    tables = [{"id": range(302), "v": pa.array([*v.astype(width), *more], kind)}
              for v, more in ((x, [None, None]), (y, [None, y[5].astype(width)]))]  # fmt: skip
    column = gm.compare(publish("a", tables[0]), publish("b", tables[1]), on="id")["v"]
    m = column.measured
    assert isinstance(m, Vectors)
    wide, other = x[3:].astype(float), y[3:].astype(float)
    cosine = (wide * other).sum(1) / np.linalg.norm(wide, axis=1) / np.linalg.norm(other, axis=1)
    assert (m.compared, m.undefined, m.lengths_differ, column.null_only_a, column.null_both) == (297, 3, 0, 1, 1)
    assert (m.mean, m.min) == pytest.approx((cosine.mean(), cosine.min()))
    assert list(m.quantiles.values()) == pytest.approx(np.quantile(cosine, list(m.quantiles)).tolist())
    assert column.agreement == pytest.approx((cosine.sum() + 2) / 302)  # two zero vectors, and two nulls
    assert [e.key["id"] for e in column.examples] == (np.argsort(cosine)[:5] + 3).tolist()


def test_vectors_of_other_lengths(publish: Publish) -> None:
    """Ragged ones by row; two models of different widths are no error, but have no cosine."""
    a = publish("a", {"id": range(4), "v": [[1.0, 0.0], [1.0], [], [3.0, 4.0]]})
    b = publish("b", {"id": range(4), "v": [[0.0, 1.0], [1.0, 2.0], [], [6.0, 8.0]]})
    column = gm.compare(a, b, on="id")["v"]
    m = column.measured
    assert isinstance(m, Vectors) and (m.compared, m.undefined, m.lengths_differ) == (2, 2, 1)
    assert (m.min, m.mean, column.equal) == (0.0, 0.5, 1)
    wide = {n: publish(str(n), {"id": [1], "v": pa.array([[1.0] * n], pa.list_(pa.float32(), n))}) for n in (2, 3)}
    assert gm.compare(wide[2], wide[3], on="id")["v"].measured.lengths_differ == 1  # type: ignore[union-attr]


def test_other_values_are_compared_for_equality(publish: Publish) -> None:
    """Nested ones by what they hold, NaN and null inside; times by their instant."""
    nested = [{"a": [1.0, math.nan], "b": None}, {"a": [], "b": "x"}, None, {"a": [2.0], "b": "y"}]
    changed = [{"a": [1.0, math.nan], "b": None}, {"a": [None], "b": "x"}, None, {"a": [2.0], "b": None}]
    kind = pa.struct([("a", pa.list_(pa.float64())), ("b", pa.string())])
    at = pa.array([1, 2, 3, 4], pa.timestamp("ms"))
    pairs = pa.array([[("k", 1)], [], None, [("k", None)]], pa.map_(pa.string(), pa.int64()))
    other = pa.array([[("k", 1)], [("k", 1)], None, [("k", None)]], pa.map_(pa.string(), pa.int64()))
    a = publish("a", {"id": range(4), "n": pa.array(nested, kind), "at": at, "m": pairs})
    b = publish("b", {"id": range(4), "n": pa.array(changed, kind), "at": at.cast(pa.timestamp("us")), "m": other})
    found = gm.compare(a, b, on="id")
    assert {c.name: (c.kind, c.equal, c.null_both) for c in found.columns} == {
        "n": ("values", 2, 1), "at": ("values", 4, 0), "m": ("values", 3, 1)
    }  # fmt: skip
    assert [e.key["id"] for e in found["n"].examples] == [1, 3] and found["n"].examples[0].b == {"a": [None], "b": "x"}


# ---------------------------------------------------------------- real models


@pytest.mark.real_model
def test_int8_beside_float32(tmp_path: Path, reviews: pa.Table, minilm_onnx: Path, minilm_int8: Path) -> None:
    """MiniLM over reviews in both precisions: cosines as numpy computes them from the two sinks, with the texts."""
    rows = reviews.filter(pa.compute.less(pa.compute.utf8_length(reviews["text"]), 60)).slice(0, 24)
    for name, model in (("fp32", minilm_onnx), ("int8", minilm_int8)):
        gm.embed(rows, str(tmp_path / name), text="text", model=str(model), keep=["review_id", "text"], workers=0)
    found = gm.compare(tmp_path / "fp32", tmp_path / "int8", on="review_id")
    x, y = (gm.read(tmp_path / name).to_numpy("embedding").astype(float) for name in ("fp32", "int8"))
    cosine = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
    m = found["embedding"].measured
    assert isinstance(m, Vectors) and (m.mean, m.min) == pytest.approx((cosine.mean(), cosine.min())) and m.mean > 0.99
    lowest = int(cosine.argmin())
    assert found["embedding"].examples[0].inputs == {"text": rows["text"][lowest].as_py()}


@pytest.mark.real_model
def test_two_classifiers(tmp_path: Path, reviews: pa.Table, sentiment_classifier_onnx: Path) -> None:
    """One that reads whole reviews beside one that reads eight tokens of them, as pandas counts their labels."""
    rows = reviews.slice(0, 16)
    for name, options in (("whole", {"max_length": 64}), ("short", {"max_length": 8})):
        model = str(sentiment_classifier_onnx)
        gm.classify(rows, str(tmp_path / name), text="text", model=model, keep=["review_id"], workers=0, **options)
    found = gm.compare(tmp_path / "whole", tmp_path / "short", on="review_id")
    a, b = (gm.read(tmp_path / name).to_pandas().set_index("review_id") for name in ("whole", "short"))
    crossed = Counter(zip(a["label"], b["label"], strict=True))
    assert found["label"].agreement == (a["label"] == b["label"]).mean()
    assert {(x, y): n for x, y, n in found["label"].measured.pairs} == crossed  # type: ignore[union-attr]
    score = found["score"].measured
    assert isinstance(score, Numbers) and score.max == pytest.approx((a["score"] - b["score"]).abs().max(), rel=1e-6)


# ---------------------------------------------------------------- the value


def test_a_comparison_is_frozen_prints_itself_and_is_json(publish: Publish) -> None:
    """In a notebook as at a prompt; as JSON that every reader takes, whatever the values."""
    values = {"id": [b"\xff", b"b"], "x": [math.nan, 1.0], "at": pa.array([1, 2], pa.timestamp("us", "UTC"))}
    a = publish("a", values)
    b = publish("b", {**values, "x": [math.inf, math.inf], "at": pa.array([1, 3], pa.timestamp("us", "UTC"))})
    found = gm.compare(a, b, on="id")
    assert isinstance(found, Comparison)
    with pytest.raises(AttributeError):
        found.matched = 3  # type: ignore[misc]
    told = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert told["columns"][0]["examples"][0] == {
        "key": {"id": "/w=="}, "a": "NaN", "b": "Infinity", "difference": None, "inputs": {}
    }  # fmt: skip
    assert told["columns"][1]["examples"][0]["a"].startswith("1970-01-01T00:00:00.000002")
    assert "x: rows furthest apart" in str(found) and found["x"].name == "x"


def test_a_gate_has_the_comparison(pair: None) -> None:
    """As the error's report; what agrees enough passes, and is returned."""
    with pytest.raises(gm.GateFailed, match=r"agreement of x 50\.00 % in 2 rows: at least 95\.00 %") as e:
        gm.compare("a", "b", on="id", min_agreement=0.95)
    assert e.value.exit_code == 3 and e.value.report["x"].agreement == 0.5
    assert gm.compare("a", "b", on="id", min_agreement=0.5).matched == 2
