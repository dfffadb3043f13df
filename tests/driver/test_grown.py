"""A source folder that grows between commands by files of other column orders, other types, fewer and more columns."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.errors import GristmillError

REFUSED, GATED = {2, 4}, 3
VALUES = {
    "whole": lambda n: n,
    "fraction": lambda n: n + 0.5,
    "text": lambda n: f"t{n}",
    "digits": lambda n: f"{n}",
    "null": lambda n: None,
}
File = tuple[str, list[str], dict[str, str]]  # its name, its columns in order, what is in them
NAMES = st.permutations(["x", "y", "z"]).flatmap(lambda names: st.integers(1, 3).map(lambda n: ["id", *names[:n]]))
FILES = st.tuples(
    st.sampled_from("abcde"),
    NAMES.flatmap(st.permutations),
    st.fixed_dictionaries({name: st.sampled_from([*VALUES]) for name in "xyz"}),
)
COMMANDS = st.sampled_from(["run", "append", "retry", "gated append"])
PLAIN = dict.fromkeys("xyz", "whole")


@pytest.fixture(autouse=True)
def away() -> Iterator[None]:
    """Nothing of one test is left for the next."""
    yield
    os.environ.pop("AWAY", None)


def seen(batch: Any) -> list[dict[str, Any]]:
    """What each row has, place by place; those of every third id fail while the service is away."""
    rows = batch if isinstance(batch, list) else batch.to_pylist()
    if "AWAY" in os.environ and any(int(row["id"]) % 3 == 0 for row in rows):
        raise ConnectionError("away")
    return [{"of": int(row["id"]), "seen": json.dumps(list(row.items()))} for row in rows]


class Source:
    """The folder, and by their ids all rows as their own files have them."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.folder.mkdir()
        self.rows: dict[int, dict[str, Any]] = {}

    def add(self, file: File) -> None:
        """A file, unless there is one of that name."""
        name, columns, kinds = file
        path = self.folder / f"{name}.{self.kind}"
        if path.exists():
            return
        ids = [100 * (ord(name) - 96) + n for n in range(4)]
        table = pa.table({c: ids if c == "id" else [VALUES[kinds[c]](i) for i in ids] for c in columns})
        if self.kind == "parquet":
            pq.write_table(table, path)
        elif self.kind == "csv":
            pcsv.write_csv(table, path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
        self.rows.update((row["id"], row) for row in table.to_pylist())


def plain(value: Any) -> Any:
    """The same for a number, also for one that a column of text or of fractions holds, and for what is not there."""
    try:
        return None if value in (None, "") else float(value)
    except ValueError:
        return value


def holds(found: pa.Table, rows: dict[int, dict[str, Any]], order: list[str]) -> None:
    """Each row is there once at most, and its answer is of itself, its columns in the order of the first run."""
    ids = found["of"].to_pylist()
    assert len(ids) == len({*ids})
    for number, told in zip(ids, found["seen"].to_pylist(), strict=True):
        given = json.loads(told)
        names = [name for name, _ in given]
        assert [n for n in names if n in order] == [n for n in order if n in names], (names, order)
        now = {name: plain(value) for name, value in given}
        own = {name: plain(value) for name, value in rows[number].items() if name in now}
        assert {**dict.fromkeys(now), **own} == now, (number, rows[number], given)
        assert {*rows[number]} & {*order} <= {*names}


@pytest.mark.long
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@example(
    "csv", False, "rows", None, [("b", ["id", "x"], PLAIN)], [(("a", ["x", "id"], PLAIN), "append"), (None, "retry")]
)
@given(
    st.sampled_from(["csv", "parquet", "jsonl"]),
    st.booleans(),
    st.sampled_from(["rows", "arrow"]),
    st.none() | st.just(["x", "id"]),
    st.lists(FILES, min_size=1, max_size=2),
    st.lists(st.tuples(st.none() | FILES, COMMANDS), min_size=1, max_size=4),
)
def test_rows_are_their_own_whatever_files_come(
    kind: str,
    evolve: bool,
    given: str,
    columns: list[str] | None,
    first: list[File],
    later: list[tuple[File | None, str]],
) -> None:
    """Over runs, appends and retries, each with a new file or without: a command is refused, or its rows are right, and
    all those that it is about are there.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Source(Path(folder, "in"), kind)
        for file in first:
            source.add(file)

        def job(min_ok: float = 0.0) -> gm.Job:
            sink = gm.sink(str(Path(folder, "out")), evolve=evolve)
            model, read = gm.model(seen, batch_format=given), gm.source(f"{source.folder}/", columns=columns)
            return gm.Job(read, model, sink, workers=0, shard_rows=3, gates={"min_ok": min_ok})

        os.environ["AWAY"] = "1"
        try:
            job().run()
        except GristmillError as e:
            assert e.exit_code in REFUSED, e
            return
        order = [name for name, _ in json.loads(gm.read(job()).to_table()["seen"][0].as_py())]
        for file, command in later:
            if file is not None:
                source.add(file)
            os.environ.pop("AWAY", None)
            try:
                if command == "retry":
                    assert gm.retry_dead(job()).rows_dead == 0
                elif command == "gated append":
                    os.environ["AWAY"] = "1"
                    job(1.0).run(append=True)
                else:
                    report = job().run(append=command == "append")
                    assert command == "run" or report.rows_ok + report.rows_dead == len(source.rows)
            except GristmillError as e:
                assert e.exit_code in (REFUSED | {GATED} if command == "gated append" else REFUSED), e
            holds(gm.read(job()).to_table(), source.rows, order)


class Summed:
    """What a batch's first two columns hold, by their places; it cannot be loaded while the service is away."""

    def __init__(self) -> None:
        if "AWAY" in os.environ:
            raise ConnectionError("away")

    def __call__(self, batch: Any) -> dict[str, Any]:
        return {"s": [f"{a!r} {b!r}" for a, b in zip(*(c.to_pylist() for c in batch.columns[:2]), strict=True)]}


def summed(folder: Path, **named: Any) -> gm.Job:
    """A job over the folder's files."""
    model = gm.model(Summed, batch_format="arrow")
    return gm.Job(gm.source(str(folder / "in"), **named), model, str(folder / "out"), workers=0)


def test_an_append_that_failed_before_it_was_planned_takes_no_files_that_differ(tmp_path: Path) -> None:
    """Files that came since then are looked at as those of a new append would be: numbers are not given as text."""
    (tmp_path / "in").mkdir()
    job = summed(tmp_path)
    pq.write_table(pa.table({"x": [1, 2], "y": [3, 4]}), tmp_path / "in" / "a.parquet")
    assert job.run().rows_ok == 2
    pq.write_table(pa.table({"x": [5], "y": [6]}), tmp_path / "in" / "b.parquet")
    os.environ["AWAY"] = "1"
    with pytest.raises(GristmillError, match="away"):
        job.run(append=True)
    del os.environ["AWAY"]
    pq.write_table(pa.table({"x": ["five"], "y": [8]}), tmp_path / "in" / "c.parquet")
    with pytest.raises(gm.BadSource, match="the files of the source differ: column 'x'"):
        job.run(append=True)
    (tmp_path / "in" / "c.parquet").unlink()
    assert sorted(job.run(append=True).read().to_table()["s"].to_pylist()) == ["1 3", "2 4", "5 6"]


def test_columns_that_are_named_later_are_in_the_order_of_the_first_run(tmp_path: Path) -> None:
    """Also after an append of files in another order, whose names come first: no other order is taken for it."""
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"x": [1], "y": [2]}), tmp_path / "in" / "b.parquet")
    assert summed(tmp_path).run().rows_ok == 1
    pq.write_table(pa.table({"y": [4], "x": [3]}), tmp_path / "in" / "a.parquet")
    report = summed(tmp_path).run(append=True)
    assert sorted(report.read().to_table()["s"].to_pylist()) == ["1 2", "3 4"]
    assert summed(tmp_path).run().state == "nothing to do"
    assert summed(tmp_path, columns=["x", "y"]).run().state == "nothing to do"
    with pytest.raises(gm.PlanChanged, match="columns"):
        summed(tmp_path, columns=["y", "x"]).run()
