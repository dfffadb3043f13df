"""What changed between two results, against sets and dicts of the same rows."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.cli.app import main
from gristmill.comparison.diff import same_numbers
from gristmill.errors import BadJob, BadSource


def passed(table):
    """A model that answers with what it is given."""
    return table


def scored(batch):
    """A model that answers with a number that it is given."""
    return {"score": batch["x"]}


def other(table):
    """Another one, that answers the same."""
    return table.append_column("more", pa.array([1] * table.num_rows))


def publish(sink, columns, fn=passed, **options):
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    kept = {"on_null": "keep", "on_nan": "keep", "workers": 0, "gates": {"min_ok": 0, "allow_empty": True}}
    gm.apply(table, str(sink), fn=fn, batch_format="arrow", **kept, **options)
    return str(sink)


NIGHT = st.dictionaries(
    st.integers(0, 9), st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 2)), min_size=1, max_size=10
)


@settings(max_examples=15, phases=[Phase.explicit, Phase.generate], suppress_health_check=[HealthCheck.too_slow])
@given(NIGHT, NIGHT, st.randoms(use_true_random=False))
@pytest.mark.long
def test_rows_are_sorted_as_dicts_sort_them(tmp_path_factory, one, two, shuffle):
    """New, gone, changed and same, whatever the order; examples are of each sort, with the values of both."""
    at = tmp_path_factory.mktemp("nights")
    sinks = []
    for name, night in (("a", one), ("b", two)):
        ids = list(night)
        shuffle.shuffle(ids)
        columns = {"id": (ids, pa.int64()), "label": ([night[i][0] for i in ids], pa.string())}
        columns["n"] = ([night[i][1] for i in ids], pa.int64())
        sinks.append(publish(at / name, pa.table({k: pa.array(v, t) for k, (v, t) in columns.items()})))
    found = gm.diff(*sinks, on="id", columns=["label", "n"], examples=10)
    both = one.keys() & two.keys()
    changed = {i for i in both if one[i] != two[i]}
    assert (found.new, found.gone) == (len(two.keys() - one.keys()), len(one.keys() - two.keys()))
    assert (found.changed, found.same) == (len(changed), len(both - changed))
    assert found.columns == {"label": sum(one[i][0] != two[i][0] for i in both),
                             "n": sum(one[i][1] != two[i][1] for i in both)}  # fmt: skip
    assert {key["id"] for key in found.new_rows} == two.keys() - one.keys()
    assert {key["id"] for key in found.gone_rows} == one.keys() - two.keys()
    for row in found.changed_rows:
        before, after = one[row.key["id"]], two[row.key["id"]]
        assert row.before == {n: v for n, v, w in zip(("label", "n"), before, after, strict=True) if v != w}
        assert row.after == {n: w for n, v, w in zip(("label", "n"), before, after, strict=True) if v != w}
    assert {row.key["id"] for row in found.changed_rows} == changed


@given(st.lists(st.tuples(*[st.none() | st.floats(width=32)] * 2), max_size=20), st.sampled_from([0.0, 1e-5, 0.5]))
def test_numbers_are_the_same_as_the_tolerance_says(values, tolerance):
    """Null beside null, NaN beside NaN, one infinity beside itself, and numbers no further apart."""
    one, two = (pa.array([v[i] for v in values], pa.float64()) for i in (0, 1))

    def same(x, y):
        if x is None or y is None:
            return x is y
        return x == y or (x != x and y != y) or abs(x - y) <= tolerance

    assert same_numbers(one, two, tolerance).tolist() == [same(x, y) for x, y in values]


def test_vectors_and_nested_values_are_compared(tmp_path):
    """A vector is changed if one of its numbers is, or its length; nested values if anything in them is."""
    kind = pa.list_(pa.float32())
    one = {"id": [1, 2, 3, 4], "v": pa.array([[1, 2], [1, 2], None, [1, 2]], kind), "s": [{"a": [1]}] * 4}
    two = {"id": [4, 3, 2, 1], "v": pa.array([[1], None, [1, 2.1], [1, 2 + 1e-6]], kind),
           "s": [{"a": [1]}, {"a": [2]}, {"a": [1]}, {"a": [1]}]}  # fmt: skip
    found = gm.diff(publish(tmp_path / "a", one), publish(tmp_path / "b", two), on="id", columns=["v", "s"])
    assert found.columns == {"v": 2, "s": 1} and found.changed == 3
    assert [row.key["id"] for row in found.changed_rows] == [2, 3, 4]
    strict = gm.diff(str(tmp_path / "a"), str(tmp_path / "b"), on="id", columns=["v"], tolerance=0)
    assert strict.changed == 3


def test_what_differs_but_the_rows_is_told(tmp_path, monkeypatch, capsys):
    """Columns, code, and the files that were read."""
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    pq.write_table(pa.table({"id": [1], "x": [1.0]}), "in/a.parquet")
    pq.write_table(pa.table({"id": [2], "x": [1.0]}), "in/b.parquet")
    model = gm.model(passed, batch_format="arrow")
    gm.Job("in/", model, "one", workers=0).run()
    Path("in/a.parquet").unlink()
    pq.write_table(pa.table({"id": [2], "x": [5.0]}), "in/b.parquet")
    pq.write_table(pa.table({"id": [3], "x": [1.0]}), "in/c.parquet")
    gm.Job("in/", gm.model(other, batch_format="arrow"), "two", workers=0).run()
    found = gm.diff("one", "two", on="id")
    told = "\n".join(found.about)
    assert "column: more is new (int64)" in told
    for line in ("1 file new: ", "c.parquet", "1 file gone: ", "a.parquet", "1 file written anew: ", "code: "):
        assert line in told
    assert (found.new, found.gone, found.changed, found.same) == (1, 1, 1, 0)
    assert main(["diff", "one", "two", "--on", "id"]) == 0
    text = capsys.readouterr().out
    assert "changed   1" in text and "new       1  id=3" in text and "gone      1  id=1" in text
    assert main(["diff", "one", "two", "--on", "id", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changed_rows"][0]["after"] == {"x": 5.0}
    assert str(found).splitlines()[:3] == ["a         one", "b         two", "by        id"]


def test_two_generations_of_one_sink(tmp_path, monkeypatch):
    """`SINK@1` and what is there now, in both commands; a generation whose files are gone is told."""
    monkeypatch.chdir(tmp_path)
    for n, table in enumerate(({"id": [1, 2], "x": [1, 2]}, {"id": [2, 3], "x": [5, 3]}, {"id": [3], "x": [3]})):
        gm.apply(pa.table(table), "out", fn=passed, batch_format="arrow", workers=0, restart=n > 0)
        if n == 1:
            found = gm.diff("out@1", "out", on="id")
            assert (found.new, found.gone, found.changed) == (1, 1, 1)
            assert gm.compare("out/@1", "out@2", on="id").matched == 1
    with pytest.raises(BadSource, match="files of generation 1 are gone"):
        gm.diff("out@1", "out", on="id")
    Path("named@3").mkdir()
    with pytest.raises(BadSource, match="no result"):
        gm.diff("named@3", "out", on="id")


def test_keys_that_repeat_and_columns_that_no_two_answer_in_are_refused(tmp_path):
    """As in `compare`: one line with the way out."""
    one = publish(tmp_path / "a", {"id": [1, 1], "x": [1, 2]})
    two = publish(tmp_path / "b", {"id": [1, 2], "x": [1, 2]})
    with pytest.raises(BadJob, match="rows share their key"):
        gm.diff(one, two, on="id")
    with pytest.raises(BadJob, match="give --on"):
        gm.diff(one, two)


def test_neither_result_is_held_in_memory(tmp_path):
    """What Python holds while two results of 20 MB in different orders are compared is a fraction of them."""
    rows = 20_000
    values = np.random.default_rng(0).random((rows, 128))
    order = np.random.default_rng(1).permutation(rows)
    kind = pa.list_(pa.float64(), 128)
    for name, at in (("a", np.arange(rows)), ("b", order)):
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(values[at].ravel()), type=kind)
        publish(tmp_path / name, pa.table({"id": at, "v": vectors}), format="parquet")
    held = pa.total_allocated_bytes()
    tracemalloc.start()
    found = gm.diff(str(tmp_path / "a"), str(tmp_path / "b"), on="id", columns=["v"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found.same, found.changed, found.new, found.gone) == (rows, 0, 0, 0)
    assert peak + pa.total_allocated_bytes() - held < 60 << 20


def test_what_a_gate_holds_back(tmp_path: Path) -> None:
    """It is read and held against what is published by its name, until it is; nothing else is staged."""
    source, sink = tmp_path / "in.parquet", tmp_path / "out"

    def night(scores: list[float], **verbs: Any) -> gm.Report:
        pq.write_table(pa.table({"id": range(len(scores)), "x": scores}), source)
        job = gm.Job(str(source), scored, gm.sink(str(sink), keep=["id"]), update={"key": ["id"]}, workers=0,
                     audit=[lambda staged: len(scores) < 4 or "accept" in verbs])  # fmt: skip
        return job.run(**verbs)

    night([1.0, 2.0, 3.0])
    with pytest.raises(gm.BadSource, match="nothing is staged there"):
        gm.read(f"{sink}@staged")
    with pytest.raises(gm.GateFailed):
        night([1.0, 5.0, 3.0, 4.0])
    assert gm.read(f"{sink}/@staged").to_table().column("score").to_pylist() == [1.0, 5.0, 3.0, 4.0]
    assert gm.read(str(sink)).count_rows() == 3
    found = gm.diff(str(sink), f"{sink}@staged")  # by the key of update
    assert (found.on, found.new, found.gone, found.changed, found.same) == (("id",), 1, 0, 1, 2)
    assert found.changed_rows[0].before["score"] == 2.0 and found.changed_rows[0].after["score"] == 5.0
    assert any(line.startswith("input") for line in found.about)
    with pytest.raises(gm.BadSource, match="once it is published"):
        gm.prove(f"{sink}@staged", 1)
    night([1.0, 5.0, 3.0, 4.0], accept=True)
    assert gm.read(str(sink)).to_table().column("score").to_pylist() == [1.0, 5.0, 3.0, 4.0]
    assert gm.diff(f"{sink}@1", str(sink)).changed == 1 and gm.prove(str(sink), 1).ok
    with pytest.raises(gm.BadSource, match="nothing is staged there"):
        gm.read(f"{sink}@staged")


@pytest.mark.parametrize("sink", [{"partition_by": ["half"]}, {"merge": True}, {"format": "jsonl"}])
def test_what_is_staged_in_other_forms(tmp_path: Path, sink: dict[str, Any]) -> None:
    """Parts that are joined when they are published, folders and lines of JSON are read as well; and an append's rows
    beside those that are there.
    """
    (tmp_path / "in").mkdir()

    def night(ids: range, **gates: Any) -> gm.Report:
        rows = {"id": ids, "half": [i % 2 for i in ids], "x": [float(i) for i in ids]}
        pq.write_table(pa.table(rows), tmp_path / "in" / f"{ids.start}.parquet")
        out = gm.sink(str(tmp_path / "out"), keep=["id", "half"], **sink)
        return gm.Job(str(tmp_path / "in"), scored, out, workers=0, shard_rows=5, on_new_files="append", **gates).run()

    night(range(20))
    with pytest.raises(gm.GateFailed):
        night(range(20, 30), audit=[lambda staged: False])
    told = gm.read(f"{tmp_path / 'out'}@staged").to_table().to_pydict()
    assert sorted(told["id"]) == list(range(30)) and told["score"] == [float(i) for i in told["id"]]
    assert gm.diff(str(tmp_path / "out"), f"{tmp_path / 'out'}@staged", on="id").new == 10
