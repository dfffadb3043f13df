"""What follows a publication, where the run that made it was stopped before it had done it: the next command does it,
whatever command that is.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import duckdb
import processes
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_generations import BEFORE_PUBLISHING, more, root, run, sound, source  # noqa: F401 - fixtures

import gristmill as gm
from gristmill.errors import BadSource, CorruptStore
from gristmill.result import ids
from gristmill.sources import paths

IN_SETTLING = {"at": 0, "kind": "ENOSPC", "ops": ["remove"], "path": "/_dead/"}


@pytest.mark.parametrize("then", ["run", "append", "restart", "retry"])
def test_a_run_stopped_in_settling_is_made_up_for_by_any_command(source: str, root: str, then: str) -> None:  # noqa: F811
    """A retry that published and was stopped before the dead letters of the result before were gone."""
    run(source, root, args={"bad": [3, 5]})
    cured: dict[str, Any] = {"args": {"bad": [5]}, "accept_code_change": True}
    run(source, root, retry=True, harm=IN_SETTLING, **cured)
    assert gm.read(root).count_rows() == 29, "it was published"
    (told,) = [line for line in gm.verify(root).lines if "part-0000000.g1.jsonl" in line]
    assert told.endswith("a run was stopped before it had removed it: the next run does")
    if then == "append":
        more(source, range(30, 40))
    verbs = {} if then == "run" else {then: True}
    run(source, root, args={"bad": [5]}, **verbs)
    sound(root, 40 if then == "append" else 30, dead=1)


def test_what_several_runs_have_left_is_taken_away(source: str, root: str) -> None:  # noqa: F811
    """Files of results further back than the last, where the note of what was settled is lost."""
    run(source, root, args={"bad": [3]})
    shutil.copytree(Path(root, "_dead"), Path(root, "kept"))
    run(source, root, args={"bad": [4]}, restart=True)
    run(source, root, args={"bad": [5]}, restart=True)
    os.rename(Path(root, "kept", "part-0000000.g1.jsonl"), Path(root, "_dead", "part-0000000.g1.jsonl"))
    os.rmdir(Path(root, "kept"))
    for note in ("_gristmill/settled.json",):
        Path(root, note).write_bytes(b"{")
    assert run(source, root, args={"bad": [5]}).state == "nothing to do"
    sound(root, 30, dead=1)


def npy(root: str) -> Any:  # noqa: F811
    """A sink of vectors, whose manifest is the one visible file that every result replaces."""
    return gm.sink(root, keep=["id"], format="npy")


def appended(source: str, root: str, kind: str) -> Any:  # noqa: F811
    """An append in a process apart, which is killed or stopped where it replaces the manifest."""
    harm = {"at": 0, "kind": kind, "ops": ["replace"], "path": f"{root}/manifest.parquet"}
    return processes.start(
        "jobs:run", source=source, sink=root, format="npy", fn="vector", workers=0, shard_rows=10,
        journal=f"{root}.journal",
        harm=harm, verbs={"append": True},
    )  # fmt: skip


def by_manifest(root: str) -> int:  # noqa: F811
    """Rows that its lines add up to."""
    return sum(pq.read_table(os.path.join(root, "manifest.parquet"), partitioning=None)["rows"].to_pylist())


def test_a_run_killed_while_it_replaces_the_manifest_leaves_nothing(source: str, root: str) -> None:  # noqa: F811
    """The half-made file is not among the data, and the next command puts the manifest there."""
    run(source, npy(root), fn="vector")
    more(source, range(30, 40))
    killed = appended(source, root, "kill")
    processes.until(lambda: killed.poll() is not None)
    run(source, npy(root), fn="vector")
    assert gm.verify(root).ok, gm.verify(root).lines
    assert by_manifest(root) == 40
    assert sorted(p.name for p in Path(root).glob("*.tmp")) == []


def test_a_late_driver_puts_no_older_manifest_over_a_newer(source: str, root: str) -> None:  # noqa: F811
    """Stopped in the very step that replaces it, taken over, continued."""
    run(source, npy(root), fn="vector")
    more(source, range(30, 40), "a.parquet")
    late, stopped = appended(source, root, "stop"), Path(f"{root}.journal", "stopped")
    processes.until(lambda: stopped.exists() and stopped.read_text())
    zombie = psutil.Process(int(stopped.read_text()))
    try:
        processes.until(lambda: zombie.status() == psutil.STATUS_STOPPED)
        os.unlink(os.path.join(root, "_gristmill", "lock"))
        more(source, range(40, 50), "b.parquet")
        run(source, npy(root), fn="vector", append=True)
        assert by_manifest(root) == 50
    finally:
        zombie.send_signal(18)  # SIGCONT
    assert processes.gone([zombie], 20)
    processes.killed(late)
    assert by_manifest(root) == 50
    assert gm.verify(root).ok, gm.verify(root).lines


@pytest.mark.parametrize("error", [duckdb.IOException("no room"), OSError("no temporary folder")])
def test_ids_that_cannot_be_counted_are_no_failure(
    source: str,  # noqa: F811
    root: str,  # noqa: F811
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result is published by then: it is said that nobody knows whether ids repeat."""

    def fails(*_: object) -> int:
        raise error

    monkeypatch.setattr(ids, "_repeats", fails)
    report = run(source, gm.sink(root, keep=["id"], row_id="rid", key=["id"]))
    assert report.state == "done"
    assert any("could not check whether row ids repeat" in note for note in report.notes)
    verdict = gm.verify(root)
    assert verdict.ok and "could not check" in verdict.lines[-1]


@pytest.mark.parametrize("form", ["folder", "glob", "below"])
def test_a_sink_as_the_source_of_the_next_job(source: str, root: str, form: str, tmp_path: Path) -> None:  # noqa: F811
    """A restart that is stopped between linking its files and publishing: who reads the sink's folder as a source gets
    the result that stands, each row once, as `gm.read` does; and so after the next run.
    """
    run(source, root)
    run(source, root, args={"bad": [3]}, restart=True, harm=BEFORE_PUBLISHING)
    assert len(list(Path(root).glob("*.parquet"))) > len(gm.read(root).files), "files of both are there"
    uri = {"folder": root, "glob": f"{root}/*.parquet", "below": f"{Path(root).parent}/**/part-*.parquet"}[form]
    for out in ("one", "two"):
        report = gm.Job(uri, first_two, gm.sink(str(tmp_path / out)), workers=0).run()
        assert report.read().to_table().sort_by("id") == gm.read(root).to_table(columns=["id", "y"]).sort_by("id")
        run(source, root, args={"bad": [3]}, restart=True)


def test_a_sink_that_publishes_while_the_next_job_lists_it(
    source: str,  # noqa: F811
    root: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of the new parts stood when the folder was listed, and the result was theirs when that was looked at."""
    run(source, root)
    run(source, root, restart=True, harm=BEFORE_PUBLISHING)
    for part in sorted(Path(root).glob("*.g2.parquet"))[::2]:
        part.unlink()
    listing, calls = paths.resolve, list[int]()

    def slow(*given: Any) -> Any:
        found = listing(*given)
        calls.append(len(found[1]))
        if len(calls) == 1:
            run(source, root, restart=True)
        return found

    sink = gm.sink(Path(root).with_name("next"))
    job = gm.Job(root, first_two, sink, workers=0)
    monkeypatch.setattr(paths, "resolve", slow)
    assert job.run().rows_in == 30 and len(calls) > 2
    monkeypatch.undo()
    assert sorted(gm.read(job).to_table()["id"].to_pylist()) == list(range(30))


def test_a_source_that_is_a_sink_of_which_a_part_has_gone_or_was_cut(source: str, root: str) -> None:  # noqa: F811
    """Is refused, not scored but for that part, also by a pattern; the way out that is named is one."""
    run(source, root)
    part = sorted(Path(root).glob("*.parquet"))[1]
    whole = part.read_bytes()
    for what, harm in (("the file is gone", b""), (f"has 100 of its {len(whole):,} bytes", whole[:100])):
        part.unlink()
        if harm:
            part.write_bytes(harm)
        for uri in (root, f"{root}/part-*"):
            with pytest.raises(gm.BadSource, match=f"{part.name}: is published, but {what}: run the job of that sink"):
                gm.apply(uri, fn=first_two, workers=0)
        run(source, root)
        assert gm.apply(root, fn=first_two, workers=0).num_rows == 30


def first_two(batch: dict[str, Any]) -> dict[str, Any]:
    """Rows as they are."""
    return {"id": batch["id"], "y": batch["y"]}


def test_a_published_file_that_somebody_removed(source: str, root: str) -> None:  # noqa: F811
    """Running again puts it back where its rows are kept; else it is refused, and the way out that it names is one."""
    run(source, root)
    names = sorted(Path(root).glob("*.parquet"))
    whole = pq.read_table(root, partitioning=None)
    for name in names[:2]:
        name.unlink()
    report = run(source, root)
    assert report.state == "nothing to do" and any("2 published files had gone" in note for note in report.notes)
    assert pq.read_table(root, partitioning=None).equals(whole)
    names[0].unlink()
    for work in Path(root, "_gristmill").glob(f"g*/work/{names[0].stem}*"):
        work.unlink()
    with pytest.raises(CorruptStore, match="--restart"):
        run(source, root)
    run(source, root, restart=True)
    sound(root, 30)


@pytest.mark.parametrize("verb", ["run", "append", "retry"])
def test_a_published_file_that_was_cut(source: str, root: str, verb: str) -> None:  # noqa: F811
    """Where its kept work file is whole it is put back; where both are cut every command is refused, but --restart."""
    run(source, root, args={"bad": [3]})
    part = sorted(Path(root).glob("*.parquet"))[1]
    whole = part.read_bytes()
    verbs: dict[str, Any] = {"args": {"bad": [3]}, **({} if verb == "run" else {verb: True})}
    if verb == "append":
        more(source, range(30, 40))
    os.truncate(part, 100)  # the other name of the same file, too
    for _ in range(2):
        with pytest.raises(CorruptStore, match=f"{part.name} .* has 100 of its {len(whole):,} bytes: put it back, or"):
            run(source, root, **verbs)
    if verb == "run":
        run(source, root, args={"bad": [3]}, restart=True)
        sound(root, 30, dead=1)
        return
    next(Path(root, "_gristmill").glob(f"g*/work/{part.stem}*")).write_bytes(whole)
    part.unlink()
    part.write_bytes(whole[:100])
    assert any("1 published file had gone or was cut" in note for note in run(source, root, **verbs).notes)
    sound(root, 40 if verb == "append" else 30, dead=1)


@pytest.mark.parametrize("form", ["parquet", "jsonl", "jsonl.gz"])
def test_a_cut_file_is_never_read_as_fewer_rows(tmp_path: Path, form: str) -> None:
    """Also of text that is cut at the end of a line; reading names the file, what it had, and the way on."""
    out = str(tmp_path / "out")
    sink = gm.sink(out, format=form.partition(".")[0], options={"compression": "gz"} if form.endswith("gz") else {})
    gm.Job(pa.table({"x": range(1000)}), lambda b: {"y": b["x"]}, sink, workers=0).run()
    part = next(Path(out).glob("part*"))
    whole = part.read_bytes()
    rows = gm.read(out)
    os.truncate(part, 890 if form == "jsonl" else len(whole) // 2)
    for asked in (rows.to_table, rows.to_pandas, lambda: gm.read(out)):
        with pytest.raises(
            BadSource, match=rf"{part.name}: is published, but has \S+ of its {len(whole):,} bytes: put"
        ):
            asked()
    with pytest.raises((CorruptStore, pa.ArrowInvalid, OSError)):
        rows.count_rows()
    part.write_bytes(whole)
    assert gm.read(out).to_table()["y"].to_pylist() == list(range(1000))


@pytest.mark.parametrize("form", ["parquet", "merged", "partitioned", "npy"])
@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_committed_files_that_were_cut_before_they_were_published(
    source: str,  # noqa: F811
    root: str,  # noqa: F811
    form: str,
    harm: str,
) -> None:
    """What they held is scored again, and merged again: as for a torn receipt."""
    kinds: dict[str, dict[str, Any]] = {
        "merged": {"merge": True}, "partitioned": {"partition_by": ["id"]}, "npy": {"format": "npy"},
    }  # fmt: skip
    sink = gm.sink(root, keep=["id"], **kinds.get(form, {}))
    fn = {"fn": "vector"} if form == "npy" else {}
    run(source, sink, harm=BEFORE_PUBLISHING, **fn)
    works = sorted(Path(root, "_gristmill").glob("g0001-*/work/*"))
    for work in (works[0], works[-1]):
        if harm == "cut":
            os.truncate(work, 50)
        else:
            work.unlink()
    report = run(source, sink, **fn)
    assert report.rows_ok == 30 and any("or files that it names" in note for note in report.notes)
    assert gm.verify(root, deep=True).ok
    assert run(source, sink, **fn).state == "nothing to do"


@pytest.mark.parametrize("verb", ["append", "retry"])
def test_nothing_is_added_to_a_result_of_which_a_part_has_gone(source: str, root: str, verb: str) -> None:  # noqa: F811
    """It is put back first where its rows are kept; else the command is refused, and publishes nothing."""
    run(source, root, args={"bad": [3]})
    if verb == "append":
        more(source, range(30, 40))
    part = sorted(Path(root).glob("*.parquet"))[0]
    work = next(Path(root, "_gristmill").glob(f"g*/work/{part.stem}*"))
    kept = work.read_bytes()
    verbs: dict[str, Any] = {verb: True, "args": {"bad": [3]}}
    part.unlink()
    work.unlink()
    for _ in range(2):
        with pytest.raises(CorruptStore, match=f"{part.name}.*put it back, or .*--restart"):
            run(source, root, **verbs)
    work.write_bytes(kept)
    assert any("1 published file had gone" in note for note in run(source, root, **verbs).notes)
    sound(root, 40 if verb == "append" else 30, dead=1)


def test_letters_that_are_gone_for_good_are_named(source: str, root: str) -> None:  # noqa: F811
    """Where nothing is kept of them either: with the way out, which is one."""
    run(source, root, args={"bad": [3]})
    for letters in Path(root).rglob("*.jsonl*"):
        os.truncate(letters, os.path.getsize(letters) // 2)
    with pytest.raises(CorruptStore, match=r"was cut: put it back, or .*--restart"):
        run(source, root, args={"bad": [3]}, retry=True)
    verdict = gm.verify(root)
    assert not verdict.ok and any("part-0000000.g1.jsonl" in line for line in verdict.lines)
    for letters in Path(root).rglob("*.jsonl*"):
        letters.unlink()
    assert not gm.verify(root).ok
    with pytest.raises(CorruptStore, match=r"put it back, or .*--restart"):
        gm.dead(root)
    with pytest.raises(CorruptStore, match=r"put it back, or .*--restart"):
        run(source, root, retry=True, args={"bad": [3]})
    run(source, root, restart=True)
    sound(root, 30)


def test_a_manifest_is_read_where_it_stands(source: str, root: str) -> None:  # noqa: F811
    """The one in the sink is all that is left where somebody cleans files that end in .tmp; where both are lost, the
    way out is said.
    """
    run(source, npy(root), fn="vector")
    for left in Path(root).rglob("*.tmp"):
        left.unlink()
    more(source, range(30, 40))
    run(source, npy(root), fn="vector", append=True)
    assert by_manifest(root) == 40
    assert gm.verify(root).ok
    for lost in [*Path(root).rglob("*.tmp"), Path(root, "manifest.parquet")]:
        lost.unlink()
    more(source, range(40, 50), "b.parquet")
    with pytest.raises(CorruptStore, match=r"manifest .* is lost: start over with --restart"):
        run(source, npy(root), fn="vector", append=True)
