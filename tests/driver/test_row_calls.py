"""Functions of one row: many rows in flight, each answer at its row's place, each failure its own row's."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rowwise

import gristmill as gm
from gristmill.errors import BadJob, BadModel, PlanChanged, RunFailed

ROWS = 1500
pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A file of whole numbers in order."""
    pq.write_table(pa.table({"x": range(ROWS)}), tmp_path / "rows.parquet", row_group_size=400)
    return str(tmp_path / "rows.parquet")


def wait_until(done: Callable[[], bool]) -> None:
    """Wait for something that another process does."""
    until = time.monotonic() + 60
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)


def of(sink: Path) -> dict[int, dict[str, Any]]:
    """The rows of a sink, by the number that they came from; each only once."""
    found = gm.read(str(sink)).to_pandas().to_dict("records")
    assert len({row["x"] for row in found}) == len(found)
    return {row["x"]: row for row in found}


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_every_answer_is_at_its_row(rows: str, tmp_path: Path, workers: int) -> None:
    """Whatever order they come in, and whatever other rows raise: of all kinds of exceptions."""
    gates = {"min_ok": 0.9}
    report = gm.apply(rows, tmp_path / "out", fn=rowwise.odd, keep=["x"], workers=workers, shard_rows=300, gates=gates)
    bad = {x for x in range(ROWS) if x % 50 == 11 or x % 97 == 5 or x % 89 == 6}
    assert {x: (row["y"], row["said"]) for x, row in of(tmp_path / "out").items()} == {
        x: (x * 2, f"row {x}") for x in range(ROWS) if x not in bad
    }
    dead = gm.dead(str(tmp_path / "out")).to_pylist()
    assert {json.loads(letter["payload"])["x"] for letter in dead} == bad and report.rows_dead == len(bad)
    assert {letter["error"] for letter in dead} == {"ValueError", "SystemExit", "asyncio.exceptions.CancelledError"}
    gm.verify(str(tmp_path / "out"))


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_plain_function_is_called_in_threads(rows: str, tmp_path: Path, workers: int) -> None:
    """With a concurrency; an interrupt that it raises itself is its row's failure."""
    gm.apply(
        rows, tmp_path / "out", fn=rowwise.in_threads, concurrency=8, keep=["x"], workers=workers, gates={"min_ok": 0.9}
    )
    found = of(tmp_path / "out")
    assert {x: row["y"] for x, row in found.items()} == {x: 2 * x for x in range(ROWS) if x != 13}
    assert 2 <= len({row["thread"] for row in found.values()}) <= 8


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 3])
def test_no_more_are_in_flight_than_asked_for(rows: str, tmp_path: Path, workers: int) -> None:
    """In all workers together; and nearly as many are; what a class opened is closed in its loop."""
    (tmp_path / "seen").mkdir()
    gm.apply(
        gm.source(rows, limit=600), tmp_path / "out", fn=rowwise.Beside, args={"folder": str(tmp_path / "seen")},
        concurrency=12, workers=workers, keep=["x"], output="y", shard_rows=200,
    )  # fmt: skip
    assert {x: row["y"] for x, row in of(tmp_path / "out").items()} == {x: 2 * x for x in range(600)}
    most = [int(line) for file in (tmp_path / "seen").glob("most-*") for line in file.read_text().split()]
    assert 12 // workers <= max(most) <= 12
    asked, closed = ({p.name.partition("-")[2] for p in (tmp_path / "seen").glob(f"{n}-*")} for n in ("most", "closed"))
    assert asked and asked <= closed  # a worker may have come too late for any row


@pytest.mark.long
def test_a_slow_row_keeps_no_other_waiting(rows: str, tmp_path: Path) -> None:
    """Rows of later batches, windows and shards are asked for meanwhile: the last one long before the slow one is
    answered.
    """
    order = tmp_path / "order"

    async def ask(row: dict[str, Any]) -> int:
        import asyncio

        if row["x"] == 40:
            await asyncio.sleep(5)
        with open(order, "a") as file:
            file.write(f"{row['x']}\n")
        return int(row["x"])

    source = gm.source(rows, limit=900)
    gm.apply(source, tmp_path / "out", fn=ask, concurrency=16, workers=1, shard_rows=300, keep=["x"])
    assert [int(x) for x in order.read_text().split()][-1] == 40
    assert len(of(tmp_path / "out")) == 900


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_without_an_answer_is_given_up_alone(rows: str, tmp_path: Path, workers: int) -> None:
    """After batch_timeout, while all others are answered; no worker dies for it."""
    gates = {"min_ok": 0.9}
    report = gm.apply(
        rows, tmp_path / "out", fn=rowwise.stuck, keep=["x"], workers=workers, batch_timeout=1, gates=gates
    )
    assert report.rows_ok == ROWS - 1
    assert "no answer within 1 s" in gm.dead(str(tmp_path / "out")).to_pylist()[0]["message"]


def test_an_endpoint_that_is_down_stops_the_job(rows: str, tmp_path: Path) -> None:
    """With the error that every row had, and not with dead letters for all of them."""
    with pytest.raises(RunFailed, match=r"fails on every one of the first rows: ConnectionError: refused"):
        gm.apply(rows, tmp_path / "out", fn=rowwise.fails, workers=1)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_endpoint_that_goes_down_stops_the_job(
    rows: str, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle: the next run scores the rest, and none of it is a dead letter."""
    monkeypatch.chdir(tmp_path)
    job = gm.Job(
        rows, gm.model(rowwise.at_first, folder="."), gm.sink(str(tmp_path / "out"), keep=["x"]),
        workers=workers, shard_rows=300, gates={"min_ok": 0.5},
    )  # fmt: skip
    with pytest.raises(RunFailed, match="ConnectionError: refused"):
        job.run()
    (tmp_path / "again").touch()
    report = job.run()
    assert report.rows_dead == 0 and report.shards_resumed > 0
    assert {x: row["output"] for x, row in of(tmp_path / "out").items()} == {x: 3 * x for x in range(ROWS)}


def test_a_row_that_ends_its_process_is_found(rows: str, tmp_path: Path) -> None:
    """By careful attempts, which ask for few rows at a time."""
    gates = {"min_ok": 0.9}
    report = gm.apply(rows, tmp_path / "out", fn=rowwise.deadly, workers=1, keep=["x"], shard_rows=500, gates=gates)
    assert {json.loads(d["payload"])["x"] for d in gm.dead(str(tmp_path / "out")).to_pylist()} == {301}
    assert report.rows_ok == ROWS - 1
    assert all(row["output"] == x + 1 for x, row in of(tmp_path / "out").items())


def test_what_was_probed_is_not_asked_for_again(rows: str, tmp_path: Path) -> None:
    """Each row is asked for once in a run, and the answers of a number of rows are as those of one."""
    gm.apply(rows, tmp_path / "out", fn=rowwise.asked, args={"file": str(tmp_path / "asked")}, workers=1)
    assert sorted(map(int, (tmp_path / "asked").read_text().split())) == list(range(ROWS))


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1])
def test_an_interrupt_waits_for_no_answer(rows: str, tmp_path: Path, workers: int) -> None:
    """Ctrl-C ends the run within seconds, although each row takes half a minute."""
    script = (
        "import sys, gristmill as gm, rowwise\n"
        f"gm.apply({rows!r}, {str(tmp_path / 'out')!r}, fn=rowwise.slow, workers={workers})\n"
    )
    here = str(Path(__file__).parent)
    run = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {here!r})\n{script}"], stderr=subprocess.PIPE
    )
    time.sleep(4)
    assert run.poll() is None
    begun = time.monotonic()
    run.send_signal(2)
    run.communicate(timeout=30)
    assert time.monotonic() - begun < 15 and run.returncode != 0


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("how", ["exits", "raises", "is cancelled", "exits, of a batch"])
def test_a_close_that_fails_harms_no_row(tmp_path: Path, workers: int, how: str) -> None:
    """All of them are committed by then."""
    fn = rowwise.Closing if how != "exits, of a batch" else rowwise.BatchClosing
    found = gm.apply({"x": [1, 2, 3]}, fn=fn, args={} if "batch" in how else {"how": how}, workers=workers, output="y")
    assert found["y"].to_pylist() == [2, 4, 6]


def test_no_rows(tmp_path: Path) -> None:
    """A source without any."""
    none = {"x": pa.array([], pa.int64())}
    gates = {"allow_empty": True}
    assert gm.apply(none, fn=rowwise.asked, args={"file": "-"}, workers=0, gates=gates).num_rows == 0


def test_what_does_not_fit_is_said_at_once(rows: str) -> None:
    """A batch format for a function of one row, an async step, an async generator."""

    async def made(row: dict[str, Any]) -> Any:
        yield row

    with pytest.raises(BadModel, match="called with one row as a dict: leave out batch_format"):
        gm.plan(gm.Job(rows, gm.model(rowwise.odd, batch_format="pandas"), "out"))
    with pytest.raises(BadJob, match=r"concurrency is 4: .* leave out batch_format"):
        gm.model(rowwise.in_threads, batch_format="arrow", concurrency=4)
    with pytest.raises(BadJob, match=r"concurrency is 0: give a whole number of at least 1"):
        gm.model(rowwise.in_threads, concurrency=0)
    with pytest.raises(BadModel, match="async function: give a plain one"):
        gm.apply(rows, fn=made)
    with pytest.raises(BadModel, match="async function: give a plain one"):
        gm.apply(rows, fn=rowwise.in_threads, concurrency=2, steps=[rowwise.odd], workers=0)
    with pytest.raises(BadJob, match="batch_format row is for models: use rows"):
        gm.step(rowwise.in_threads, batch_format="row")


@pytest.mark.parametrize(
    "fn", [rowwise.Reuses, rowwise.ReusesInThreads, rowwise.ReusesBehindAView, rowwise.ReusesAWrapper]
)
def test_an_answer_stays_as_it_was_returned(rows: str, tmp_path: Path, fn: Any) -> None:
    """Though the function returns the same object for the next row."""
    gm.apply(rows, tmp_path / "out", fn=fn, concurrency=4, keep=["x"], workers=1)
    assert {x: list(row["y"]) for x, row in of(tmp_path / "out").items()} == {x: [2 * x] * 2 for x in range(ROWS)}


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_what_a_cancelled_call_returns_is_no_answer(tmp_path: Path, how: signal.Signals) -> None:
    """Neither in this run nor, kept, in the next one."""
    pq.write_table(pa.table({"x": range(300)}), tmp_path / "rows.parquet")
    command = [sys.executable, "-m", "gristmill", "apply", str(tmp_path / "rows.parquet"), str(tmp_path / "out")]
    command += ["--fn", "rowwise:answers_whatever_happens", "--keep", "x", "--workers", "1", "--concurrency", "20"]
    run = functools.partial(subprocess.Popen, command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL)
    first = run(env={**os.environ, "SLOW": "1"})
    journal = tmp_path / "out"
    wait_until(lambda: sum(p.stat().st_size for p in journal.rglob("journal/*")) > 100 * 30)
    first.send_signal(how)
    assert first.wait(60) != 0 and run().wait(60) == 0
    assert {x: row["y"] for x, row in of(tmp_path / "out").items()} == {x: 2 * x for x in range(300)}


@pytest.mark.long
def test_answers_of_other_weights_are_not_kept(tmp_path: Path) -> None:
    """A file that an argument names changes in the middle of a shard, and back after the run was refused: no answer
    that rests on the other one is used again.
    """
    pq.write_table(pa.table({"x": range(300)}), tmp_path / "rows.parquet")
    weights = tmp_path / "weights.txt"
    weights.write_text("A")
    command = [sys.executable, "-m", "gristmill", "apply", str(tmp_path / "rows.parquet"), str(tmp_path / "out")]
    command += ["--fn", "rowwise:Weighted", "--arg", f"weights={weights}", "--keep", "x", "--workers", "1"]
    run = functools.partial(subprocess.Popen, [*command, "--concurrency", "250"], cwd=Path(__file__).parent,
                            stderr=subprocess.DEVNULL)  # fmt: skip
    first = run(env={**os.environ, "SLOW": "1"})
    wait_until(lambda: any((tmp_path / "out").rglob("journal/*")))
    weights.write_text("B")
    assert first.wait(60) == PlanChanged.exit_code
    weights.write_text("A")
    assert run().wait(60) == 0
    assert {x: row["y"] for x, row in of(tmp_path / "out").items()} == {x: f"A{x}" for x in range(300)}


def test_a_function_that_forgets_its_answer(rows: str, tmp_path: Path) -> None:
    """None is no answer, unless columns are declared."""
    with pytest.raises(RunFailed, match="returned None: return a value, or a dict of columns"):
        gm.apply(rows, tmp_path / "out", fn=rowwise.forgets, keep=["x"])
    assert gm.apply(rows, fn=rowwise.forgets, returns={"y": "int64"}, limit=3)["y"].null_count == 3


@pytest.mark.parametrize(("fn", "options"), [(rowwise.batchwise, {}), (rowwise.batchwise_too, {"concurrency": 4})])
def test_a_function_of_a_batch_is_not_called_with_a_row(rows: str, fn: Any, options: dict[str, Any]) -> None:
    """As its argument's name says: other tools call the number of workers concurrency."""
    with pytest.raises(BadModel, match=r"named 'batch'.*without concurrency= \(more processes are workers=\)"):
        gm.apply(rows, fn=fn, **options)
    assert gm.apply(rows, fn=rowwise.batchwise_too, limit=3)["y"].to_pylist() == [0, 1, 2]


def test_an_answer_of_another_type_is_its_row_s_failure(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names column, value and type, and costs no other row anything."""
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    for kind, options in (("planned", {}), ("declared", {"returns": {"y": "int64"}})):
        (tmp_path / "asked").write_text("")
        report = gm.apply(rows, tmp_path / kind, fn=rowwise.unwell, keep=["x"], workers=1, shard_rows=300, **options)
        assert (report.rows_ok, report.rows_dead) == (ROWS - len(rowwise.UNWELL), len(rowwise.UNWELL))
        assert {x: row["y"] for x, row in of(tmp_path / kind).items()} == {
            x: 2 * x for x in range(ROWS) if x not in rowwise.UNWELL
        }
        assert sorted(map(int, (tmp_path / "asked").read_text().split())) == list(range(ROWS))
        dead = {json.loads(d["payload"])["x"]: d for d in gm.dead(str(tmp_path / kind)).to_pylist()}
        told = "returns= declares int64" if kind == "declared" else "was int64 in the first rows"
        said = f"returned 'an error' (str) in column 'y', which {told}: it cannot hold that"
        assert dead[200]["message"].endswith(said)
        assert dead[200]["error"].endswith("Misfit") and "a column 'z'" in dead[400]["message"]
        assert "'smile \\ud83d'" in dead[700]["message"]


def test_answers_of_a_run_that_was_stopped_are_as_planned(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that fit are not asked for again, and one that did not is."""
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("STOPS", "1")
    command = [sys.executable, "-m", "gristmill", "apply", rows, str(tmp_path / "out"), "--fn", "rowwise:unwell"]
    command += ["--keep", "x", "--workers", "1", "--shard-rows", "1500"]
    run = functools.partial(subprocess.run, command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL)
    assert run().returncode != 0
    asked = (tmp_path / "asked").read_text().split()
    monkeypatch.delenv("STOPS")
    monkeypatch.setenv("WELL", "1")
    assert run().returncode == 0
    again = (tmp_path / "asked").read_text().split()[len(asked) :]
    assert {x: row["y"] for x, row in of(tmp_path / "out").items()} == {x: 2 * x for x in range(ROWS)}
    assert {"200", "400"} <= set(asked[:500]) and set(again) & set(asked[:500]) == {"200", "400"}


@pytest.mark.parametrize(
    ("answers", "dead"),
    [
        ([{"y": 1}, {"y": True}, {"y": 2.0}, {"y": 2.5}, {"y": 2**70}, {"y": None}, {"y": "3"}], 3),
        ([{"y": 1}, 5, {}, None, {"y": [1]}, {"y": 1, "z": 2}, {"z": 2}], 3),
    ],
)
def test_each_answer_is_converted_on_its_own(tmp_path: Path, answers: list[Any], dead: int) -> None:
    """To what is declared, whatever stands beside it: one is converted as when it is alone."""
    options = {"returns": {"y": "int64"}, "concurrency": 2, "gates": {"min_ok": 0.0, "allow_empty": True}}
    table = pa.table({"x": range(len(answers)), "j": [json.dumps(answer) for answer in answers]})
    whole = gm.apply(table, tmp_path / "all", fn=rowwise.loads, keep=["x"], workers=0, **options)
    assert (whole.rows_ok, whole.rows_dead) == (len(answers) - dead, dead)
    found = of(tmp_path / "all")
    for n in range(len(answers)):
        one = gm.apply(table.slice(n, 1), tmp_path / f"{n}", fn=rowwise.loads, keep=["x"], workers=0, **options)
        assert one.rows_ok == (n in found)
        assert n not in found or of(tmp_path / f"{n}")[n] == pytest.approx(found[n], nan_ok=True)
