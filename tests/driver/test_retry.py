"""Dead letters scored again: exactly the dead rows, at whatever stage they died, whatever steps made of them."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import expanding
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.driver.run import retry_dead

Poison = list[list[Any]]
KINDS = {"map": expanding.tasted, "filter": expanding.some, "flat_map": expanding.pieces, "rows": expanding.repeated}
POISON = st.lists(st.tuples(st.integers(0, 99), st.sampled_from([4, 10, 20])).map(list), max_size=2)


def job(out: Path, kinds: list[str], poison: Poison, shard_rows: int = 7) -> gm.Job:
    """Rows with a key through steps of these kinds, a model and a post step, poisoned at every stage."""
    make = {"filter": gm.filter, "flat_map": gm.flat_map}
    steps = [make.get(k, gm.step)(KINDS[k], place=i, poison=poison) for i, k in enumerate(kinds)]
    model = gm.model(expanding.scored, poison=poison, batch_format="arrow", returns={"y": "float64"})
    sink = gm.sink(str(out), keep=["key"], row_id="rid")
    return gm.Job(
        str(out.parent / "in.parquet"), model, sink, steps=steps, post=[gm.step(expanding.after, poison=poison)],
        gates={"min_ok": 0.0, "allow_empty": True}, workers=0, shard_rows=shard_rows, batch_rows=5,
    )  # fmt: skip


def source(folder: Path, rows: int) -> None:
    """Rows whose keys are their numbers, and one of which all works."""
    pq.write_table(pa.table({"key": [*map(str, range(rows)), "well"]}), folder / "in.parquet")


def rows_of(out: Path) -> Counter[Any]:
    """The published rows with their ids."""
    return Counter(tuple(row.values()) for row in gm.read(out).to_table().to_pylist())


def letters_of(out: Path) -> Counter[Any]:
    """Who is dead, where it died and of what."""
    names = ["source", "position", "copy", "copies", "digest", "stage", "step", "error", "message"]
    table = gm.dead(out).select(names)
    found = [(Path(row["source"]).name, *list(row.values())[1:]) for row in table.to_pylist()]
    assert len({row[:3] for row in found}) == len(found)  # no row is dead twice
    return Counter(found)


def adds_up(report: gm.Report, out: Path) -> None:
    """Counts are exact and not negative, and those of what can be read."""
    assert min(report.counts.values()) >= 0 and report.counts.discrepancy() is None, report.counts
    assert report.rows_ok == sum(rows_of(out).values())
    assert report.rows_dead == sum(letters_of(out).values()) == sum(report.errors.values())
    assert gm.verify(str(out)).ok


def split(row: dict[str, Any], drop: str = "", turned: bool = False) -> list[dict[str, Any]]:
    """The words of a text, those that are `drop` left out, in their order or turned."""
    words = [w for w in row["text"].split() if w != drop]
    return [{"word": w} for w in (words[::-1] if turned else words)]


def every_word(batch: dict[str, Any], drop: str = "", turned: bool = False) -> dict[str, Any]:
    """The same as a step on a batch."""
    made = [(i, p["word"]) for i, t in enumerate(batch["text"]) for p in split({"text": t}, drop, turned)]
    return {"_row": [i for i, _ in made], "word": [w for _, w in made]}


def checked(batch: dict[str, Any], bad: str) -> dict[str, Any]:
    """Raises for a bad word."""
    if bad in list(batch["word"]):
        raise ValueError(f"the word {bad!r}")
    return {"word": batch["word"]}


def length(batch: dict[str, Any]) -> dict[str, Any]:
    """Letters of each word."""
    return {"y": [len(w) for w in batch["word"]]}


TEXTS = ["one two three", "four five", "six", "seven bad eight nine worse ten"]


def words(out: Path, step: Any, before: str = "-", after: str = "-", **how: Any) -> gm.Job:
    """A job on words, of which a step before the model and one after it each fail for one."""
    given = out.parent / "in.parquet"
    if not given.exists():
        pq.write_table(pa.table({"text": TEXTS}), given)
    return gm.Job(
        str(given), length, gm.sink(str(out), keep=["word"], row_id="rid"), workers=0,
        steps=[step(split if step is gm.flat_map else every_word, **how), gm.step(checked, bad=before)],
        post=[gm.step(checked, bad=after)],
    )  # fmt: skip


STEPS = pytest.mark.parametrize("step", [gm.flat_map, gm.step])


@STEPS
def test_fault_43_copies_that_died_in_a_step_and_after_the_model_are_scored_once(tmp_path: Path, step: Any) -> None:
    """Each of two dead copies comes back alone and once, with the id it would have had; counts are those of a run
    without failures.
    """
    out, plain = tmp_path / "out", tmp_path / "plain"
    job = words(out, step, before="bad", after="worse")
    assert job.run(accept=True).rows_dead == 2
    letters = {x["stage"]: x for x in gm.dead(out).to_pylist()}
    assert {k: (x["copy"], x["copies"], x["step"]) for k, x in letters.items()} == {
        "derived": ("1", 6, "checked"), "after": ("4", 6, "checked")
    }  # fmt: skip
    report = retry_dead(words(out, step).spec, accept_code_change=True)
    assert report.counts == words(plain, step).run().counts
    assert rows_of(out) == rows_of(plain)
    adds_up(report, out)


@pytest.mark.few(2)
@STEPS
@pytest.mark.parametrize(
    ("how", "says"), [({"drop": "seven"}, "made 6 rows of it and makes 5 now"), ({"turned": True}, "makes 6 now, and")]
)
def test_fault_44_a_step_that_makes_other_rows_is_refused(
    tmp_path: Path, step: Any, how: dict[str, Any], says: str
) -> None:
    """A dead copy that is not made again, or whose place is another's now, is named, exit 4, nothing is published; a
    fix elsewhere then works.
    """
    out = tmp_path / "out"
    words(out, step, before="bad", after="worse").run(accept=True)
    was = rows_of(out)
    with pytest.raises(gm.PlanChanged, match=rf"in.parquet at 3: .*{says}.*[Cc]opy [14] is a dead letter") as refused:
        retry_dead(words(out, step, **how).spec, accept_code_change=True)
    assert refused.value.exit_code == 4
    assert rows_of(out) == was and gm.verify(str(out)).ok and gm.dead(out).num_rows == 2
    report = retry_dead(words(out, step).spec, accept_code_change=True)
    adds_up(report, out)
    assert (report.rows_ok, report.rows_dead) == (12, 0)


def test_fault_81_where_retried_rows_stand_is_said(tmp_path: Path) -> None:
    """They follow the others, in files of their own, and the report says so."""
    out = tmp_path / "out"
    words(out, gm.flat_map, before="two", after="four").run(accept=True)
    report = retry_dead(words(out, gm.flat_map).spec, accept_code_change=True)
    assert report.notes == ("2 retried rows stand after the others, in files of their own",)
    assert gm.read(out).to_table()["word"].to_pylist()[-2:] == ["two", "four"]


@pytest.mark.long
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from([*KINDS, "flat_map"]), max_size=4), st.integers(1, 24), st.lists(POISON, min_size=1,
    max_size=3), POISON,
)  # fmt: skip
def test_fault_43_a_retry_scores_exactly_the_dead_rows(
    kinds: list[str], rows: int, poisons: list[Poison], left: Poison
) -> None:
    """A run and retries, each with other poison: a retry with no poison but what was there at first leaves what a run
    with that alone leaves, and one without any what a run without any leaves: rows, ids, letters and counts.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, plain = Path(folder, "out"), Path(folder, "plain")
        source(out.parent, rows)
        first, *others = poisons
        adds_up(job(out, kinds, [*first, *left]).run(), out)
        for poison in others:
            adds_up(retry_dead(job(out, kinds, [*poison, *left]).spec, accept_code_change=True), out)
        half = retry_dead(job(out, kinds, left).spec, accept_code_change=True)
        adds_up(half, out)
        assert half.counts == job(plain, kinds, left, shard_rows=3).run().counts
        assert (rows_of(out), letters_of(out)) == (rows_of(plain), letters_of(plain))
        cured = retry_dead(job(out, kinds, []).spec, accept_code_change=True)
        adds_up(cured, out)
        assert cured.counts == job(plain, kinds, []).run(restart=True).counts
        assert rows_of(out) == rows_of(plain) and not letters_of(out)


LATER = {  # what comes after the first run, its place among the files, and what becomes of the columns
    "other order": ("day0", {"y": [40, 50], "x": [7, 8]}),
    "other types": ("day2", {"x": [4.5, 5.5], "y": [1.5, 2.5]}),
    "text": ("day2", {"x": ["?", "7"], "y": [1, 2]}),
    "one more": ("day2", {"x": [7, 8], "y": [1, 2], "z": [1, 2]}),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize("later", LATER)
def test_a_retry_gives_the_rows_as_the_run_gave_them(
    later: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever files have come since: the function finds columns in the order, and of the types, which they had."""
    name, columns = LATER[later]
    _written(tmp_path / "in", "day1", {"x": [1, 2, 3], "y": [4, 5, 6]}, kind)
    monkeypatch.setenv("DOWN", "1")

    def scored(rows: Any) -> Any:
        if "DOWN" in os.environ and 3 in rows["x"].tolist():
            raise ConnectionError("away")
        seen = [str(row) for row in zip(*(rows[c].tolist() for c in rows), strict=True)]
        return {"seen": seen, "names": [" ".join(rows)] * len(rows)}

    job = gm.Job(f"{tmp_path / 'in'}/", gm.model(scored, batch_format="pandas"), str(tmp_path / "out"), workers=0,
                 gates={"min_ok": 0.5})  # fmt: skip
    assert job.run().rows_dead == 1
    monkeypatch.delenv("DOWN")
    _written(tmp_path / "in", name, columns, kind)
    assert gm.retry_dead(job).rows_ok == 3
    found = gm.read(job).to_table()
    assert found["seen"].to_pylist() == ["(1, 4)", "(2, 5)", "(3, 6)"]
    assert set(found["names"].to_pylist()) == {"x y"}
    if later == "other order":
        assert job.run(append=True).rows_ok == 5
        assert sorted(gm.read(job).to_table()["seen"].to_pylist())[3:] == ["(7, 40)", "(8, 50)"]


@pytest.mark.parametrize("stops", [False, True])
def test_each_night_s_dead_rows_are_given_as_that_night_was(
    stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later night's wider type, or a column that only it has, makes no other text or piece of an earlier night's row;
    a retry that was stopped between the nights is gone on with.
    """
    source = tmp_path / "in"
    source.mkdir()
    monkeypatch.setenv("DOWN", "1")

    def pieces(row: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"id": row["id"], "said": f"{part} {row['s']} {sorted(row)}"} for part in "ab"]

    def scored(rows: list[dict[str, Any]]) -> list[Any]:
        if "STOPS" in os.environ and any(row["id"] == 12 for row in rows):
            raise KeyboardInterrupt
        bad = {2, 12} if "DOWN" in os.environ else ()
        return [ConnectionError("away") if r["id"] in bad else {"key": r["said"], "id": r["id"]} for r in rows]

    job = gm.Job(f"{source}/", gm.model(scored, batch_format="rows"), str(tmp_path / "out"), workers=0,
                 steps=[gm.flat_map(pieces)], gates={"min_ok": 0.1})  # fmt: skip
    (source / "1.jsonl").write_text("".join(json.dumps({"id": i, "s": 7}) + "\n" for i in range(4)))
    assert job.run().rows_dead == 2
    (source / "2.jsonl").write_text("".join(json.dumps({"id": i, "s": 1.5, "z": 1}) + "\n" for i in range(10, 14)))
    assert job.run(append=True).rows_dead == 4
    (source / "3.jsonl").write_text("".join(json.dumps({"id": i, "s": "x"}) + "\n" for i in range(20, 22)))
    monkeypatch.delenv("DOWN")
    if stops:
        monkeypatch.setenv("STOPS", "1")
        with pytest.raises(gm.RunFailed, match="KeyboardInterrupt"):
            gm.retry_dead(job)
        monkeypatch.delenv("STOPS")
        assert gm.dead(job).num_rows == 4
    assert gm.retry_dead(job).rows_dead == 0
    assert gm.retry_dead(job).state == "nothing to do"
    found = gm.read(job).to_table().to_pylist()
    says = {**dict.fromkeys(range(4), "7 ['id', 's']"), **dict.fromkeys(range(10, 14), "1.5 ['id', 's', 'z']")}
    assert sorted((r["id"], r["key"]) for r in found) == [(i, f"{p} {text}") for i, text in says.items() for p in "ab"]
    (source / "3.jsonl").unlink()
    assert gm.verify(job, deep=True, source=True).ok


def _written(folder: Path, name: str, columns: dict[str, Any], kind: str) -> None:
    folder.mkdir(exist_ok=True)
    table, path = pa.table(columns), folder / f"{name}.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "csv":
        pcsv.write_csv(table, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


@pytest.mark.long
def test_a_retry_of_a_row_that_a_post_step_has_no_memory_for_ends(tmp_path: Path) -> None:
    """Beside one that kills, so that no worker has seen the step at work: rows from elsewhere have shown that it is the
    row that is to blame, and that holds for every step.
    """
    pq.write_table(pa.table({"x": range(40)}), tmp_path / "in.parquet")

    def kills(batch: Any) -> Any:
        if (batch["x"] == 7).any():
            os.kill(os.getpid(), signal.SIGSEGV)
        return {"y": batch["x"]}

    def hungry(batch: Any) -> Any:
        if (batch["x"] == 9).any():
            raise MemoryError("no room")
        return {"z": batch["y"] + 1}

    job = gm.Job(str(tmp_path / "in.parquet"), kills, gm.sink(str(tmp_path / "out"), keep=["x"]), post=[hungry],
                 workers=2, gates={"min_ok": 0.9})  # fmt: skip
    assert job.run().rows_dead == 2
    assert gm.retry_dead(job).rows_dead == 2
    assert sorted(gm.dead(job)["error"].to_pylist()) == ["MemoryError", "WorkerDied"]


def _echo(batch: pa.Table) -> pa.Table:
    """All columns but the id, and twice that; not for 3, as long as there is a file `away`."""
    ids = batch["id"].to_pylist()
    if 3 in ids and Path("away").exists():
        raise ValueError("away")
    return batch.drop_columns(["id"]).append_column("y", pa.array([2 * i for i in ids]))


def test_rows_of_a_night_before_a_column_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead row of a night before the result got a column is scored again, and has null in it as its night has."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "away").touch()

    def job() -> gm.Job:
        sink = gm.sink(str(tmp_path / "out"), keep=["id"], evolve=True)
        return gm.Job(str(tmp_path / "in"), gm.model(_echo, batch_format="arrow"), sink, workers=0, gates={"min_ok": 0})

    pq.write_table(pa.table({"id": range(10), "a": ["x"] * 10}), tmp_path / "in" / "0.parquet")
    job().run()
    pq.write_table(pa.table({"id": range(10, 20), "a": ["x"] * 10, "new": [1.5] * 10}), tmp_path / "in" / "1.parquet")
    job().run(append=True)
    (tmp_path / "away").unlink()
    assert gm.retry_dead(job()).rows_dead == 0
    found = {row["id"]: (row["y"], row["new"]) for row in gm.read(tmp_path / "out").to_table().to_pylist()}
    assert found == {i: (2 * i, None if i < 10 else 1.5) for i in range(20)}
    assert gm.verify(tmp_path / "out").ok


def _typed(batch: dict[str, Any]) -> dict[str, Any]:
    """Twice the id; for 3 and 7 an error, or once the file `away` is gone, text for 7."""
    ids = batch["id"].tolist()
    if {3, 7} & set(ids) and Path("away").exists():
        raise ValueError("away")
    return {"y": ["n/a" if i == 7 else 2 * i for i in ids]}


def test_a_retry_whose_answers_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry that ends with an answer of another type is given up: later nights are appended, its rows stay dead, and
    it may be tried again.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "away").touch()

    def job() -> gm.Job:
        sink = gm.sink(str(tmp_path / "out"), keep=["id"])
        gates = {"min_ok": 0.5}
        return gm.Job(str(tmp_path / "in"), gm.model(_typed), sink, workers=0, gates=gates, batch_rows=1)

    pq.write_table(pa.table({"id": range(10)}), tmp_path / "in" / "0.parquet")
    job().run()
    (tmp_path / "away").unlink()
    with pytest.raises(gm.GristmillError, match="other types than before"):
        gm.retry_dead(job())
    assert job().run().state == "nothing to do"
    pq.write_table(pa.table({"id": range(10, 20)}), tmp_path / "in" / "1.parquet")
    report = job().run(append=True)
    assert (report.rows_ok, report.rows_dead) == (18, 2)
    with pytest.raises(gm.GristmillError, match="other types than before"):
        gm.retry_dead(job())
    assert sorted(gm.read(tmp_path / "out").to_table()["id"].to_pylist()) == [i for i in range(20) if i not in (3, 7)]
    assert sorted(gm.dead(tmp_path / "out")["position"].to_pylist()) == [3, 7]
    assert gm.verify(tmp_path / "out").ok
