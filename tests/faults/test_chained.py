"""Sinks in the source of another job, on a disk and in a store: rows of what is published, and of what is no sink's."""

from __future__ import annotations

import os
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_generations import BEFORE_PUBLISHING, root, run, source  # noqa: F401 - fixtures

import gristmill as gm
from gristmill.commit import publication
from gristmill.driver import publishing
from gristmill.files.disk import LocalFiles
from gristmill.sources.listing import FsspecListing


@pytest.fixture(params=["disk", "store"])
def at(request: pytest.FixtureRequest) -> Iterator[Any]:
    """From the path of a folder to its address as a source: the folder, or a copy of it in a store."""
    memory = fsspec.filesystem("memory")

    def stored(path: str) -> str:
        copy = f"/chained/{os.path.basename(path)}"
        if memory.exists(copy):
            memory.rm(copy, recursive=True)
        for file in filter(Path.is_file, Path(path).rglob("*")):
            memory.pipe(f"{copy}/{file.relative_to(path)}", file.read_bytes())
        return f"memory:/{copy}"

    yield (lambda path: path) if request.param == "disk" else stored
    if memory.exists("/chained"):
        memory.rm("/chained", recursive=True)


def same(batch: dict[str, Any]) -> dict[str, Any]:
    """Rows as they are."""
    return {"z": batch["id"]}


def scored(sink: Path, *uris: str) -> tuple[list[int], gm.Report]:
    """The ids that a job over these sources has, sorted, and its report."""
    report = gm.Job(gm.source(*uris), same, gm.sink(str(sink), keep=["id"]), workers=0).run()
    return sorted(report.read().to_table()["id"].to_pylist()), report


@pytest.fixture
def extra(quick: Path) -> str:
    """Another source, of rows 100 to 109."""
    (quick / "extra").mkdir()
    pq.write_table(pa.table({"id": range(100, 110), "y": [0.5] * 10}), quick / "extra" / "b.parquet")
    return str(quick / "extra")


EXTRA = list(range(100, 110))


@pytest.mark.parametrize("form", ["", "/*.parquet", "/../*/part-*"], ids=["folder", "glob", "above"])
def test_unpublished_files_are_not_read(source: str, root: str, at: Any, form: str, tmp_path: Path) -> None:  # noqa: F811
    """Of a restart that was killed once its files had their names, without a note; and of a first run."""
    run(source, root, harm=BEFORE_PUBLISHING)
    with pytest.raises(gm.BadSource, match="published nothing yet"):
        scored(tmp_path / "no", at(root) if not form else f"{at(root)}/*.parquet")
    run(source, root)
    run(source, root, args={"bad": [3]}, restart=True, harm=BEFORE_PUBLISHING)
    assert len(list(Path(root).glob("*.parquet"))) > len(gm.read(root).files), "files of both are there"
    uri = at(root) + form if ".." not in form else at(root).rpartition("/")[0] + form.removeprefix("/..")
    ids, report = scored(tmp_path / "out", uri)
    assert ids == list(range(30)) and report.notes == ()


@pytest.mark.parametrize("when", ["before", "after"])
def test_rows_that_an_update_kept_are_read_while_their_parts_have_two_names(tmp_path: Path, when: str) -> None:
    """A part that is kept is a hard link to the one before: what is not published takes no name from what is. Nor does
    it from a snapshot by hard links beside it.
    """
    (tmp_path / "in").mkdir()
    for name, ids in (("a", range(40)), ("b", range(40, 60))):
        pq.write_table(pa.table({"id": ids}), tmp_path / "in" / f"{name}.parquet")
    sink = gm.sink(str(tmp_path / "sink"), keep=["id"])
    job = gm.Job(str(tmp_path / "in"), same, sink, workers=0, shard_rows=20, update=True)
    for night in range(8):  # then numbers of generations have one digit, and two
        pq.write_table(pa.table({"id": range(40, 60 + night)}), tmp_path / "in" / "b.parquet")
        job.run()
    pq.write_table(pa.table({"id": range(40, 80)}), tmp_path / "in" / "b.parquet")
    job.run()
    pq.write_table(pa.table({"id": range(40, 90)}), tmp_path / "in" / "b.parquet")
    if (child := os.fork()) == 0:
        publish = publication.create

        def stopped(*arguments: Any) -> Any:
            if when == "after":
                publish(*arguments)
            os._exit(9)

        publication.create = stopped  # type: ignore[assignment]
        job.run()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    names = [path.name for path in (tmp_path / "sink").glob("*.parquet")]
    assert any(".g10." in name for name in names) and any(".g9." in name for name in names)
    ids, _ = scored(tmp_path / "out", str(tmp_path / "sink"))
    assert ids == list(range(80 if when == "before" else 90))
    shutil.copytree(tmp_path / "sink", tmp_path / "all" / "snapshot", copy_function=os.link)
    job.run()
    (tmp_path / "sink").rename(tmp_path / "all" / "sink")
    ids, _ = scored(tmp_path / "both", str(tmp_path / "all"))
    assert set(ids) == set(range(90))


def test_types_of_columns_in_folder_names(at: Any, tmp_path: Path) -> None:
    """Are those of the result, though the names look like other ones."""
    rows = pa.table({"id": range(4), "k": ["1", "2", "1", "2"]})
    one = str(tmp_path / "one")
    gm.Job(rows, same, gm.sink(one, keep=["id", "k"], partition_by=["k"]), workers=0).run()
    report = gm.Job(at(one), same, gm.sink(str(tmp_path / "two"), keep=["k"]), workers=0).run()
    assert report.read().schema.field("k").type == pa.string()


def test_a_published_file_that_is_gone_or_cut(source: str, root: str, at: Any, tmp_path: Path) -> None:  # noqa: F811
    """Is refused, named as the source has it; where a pattern picks some of the files, the others are not missed."""
    run(source, root)
    part = sorted(Path(root).glob("*.parquet"))[1]
    ids, _ = scored(tmp_path / "some", f"{at(root)}/*-0000000.*")
    assert ids == list(range(10))
    os.truncate(part, 100)
    with pytest.raises(gm.BadSource, match=f"{part.name}: is published, but has 100 of its"):
        scored(tmp_path / "no", at(root))
    part.unlink()
    with pytest.raises(gm.BadSource, match=f"{at(root)}/{part.name}: is published, but the file is gone"):
        scored(tmp_path / "no", at(root))


@pytest.mark.parametrize("folder", ["kept", "night=1", "kept/night=1"])
def test_copies_below_a_sink_are_files_as_any_others(
    source: str,  # noqa: F811
    root: str,  # noqa: F811
    extra: str,
    at: Any,
    folder: str,
    tmp_path: Path,
) -> None:
    """In a folder in which the sink has no parts: alone, and beside others, by the folder, a pattern or their names."""
    run(source, root)
    shutil.copytree(root, f"{root}/{folder}", ignore=shutil.ignore_patterns("_*", "kept", "night=1"))
    uri, other = f"{at(root)}/{folder}", at(extra)
    assert scored(tmp_path / "alone", uri)[0] == list(range(30))
    for n, form in enumerate(("", "/*.parquet", "/part-0000000.g1.parquet")):
        ids, report = scored(tmp_path / f"beside{n}", uri + form, other)
        assert ids == [*range(10 if "0000000" in form else 30), *EXTRA] and report.notes == ()


def test_copies_that_are_read_with_their_sink_are_told(source: str, root: str, at: Any, tmp_path: Path) -> None:  # noqa: F811
    """Rows come twice, as the source says, but not without a word."""
    run(source, root)
    shutil.copytree(root, f"{root}/kept", ignore=shutil.ignore_patterns("_*", "kept"))
    ids, report = scored(tmp_path / "out", at(root))
    assert ids == sorted([*range(30)] * 2)
    (note,) = report.notes
    assert "below this sink" in note and note.endswith("kept/part-0000000.g1.parquet and 2 more")


def test_a_part_of_another_result_that_is_named_is_refused(source: str, root: str, at: Any, tmp_path: Path) -> None:  # noqa: F811
    """Also beside the sink itself; and so is a pattern that finds nothing else."""
    run(source, root)
    run(source, root, restart=True, harm=BEFORE_PUBLISHING)
    name = at(root)
    for uris in ([f"{name}/part-0000000.g2.parquet", name], [f"{name}/part-*.g2.*"]):
        with pytest.raises(
            gm.BadSource, match=r"has the name of a part of the sink .*/out, which has not published it"
        ):
            scored(tmp_path / "no", *uris)


def test_what_is_left_out_is_told_but_for_a_run_that_goes_on(
    source: str,  # noqa: F811
    root: str,  # noqa: F811
    extra: str,
    at: Any,
    tmp_path: Path,
) -> None:
    """A sink without a result beside another source; a file with the name of a part that the result lacks."""
    run(source, root, harm=BEFORE_PUBLISHING)
    ids, report = scored(tmp_path / "one", at(root), at(extra))
    assert ids == EXTRA and [n for n in report.notes if "published nothing yet, and is not read" in n]
    run(source, root)
    shutil.copy(f"{root}/part-0000000.g1.parquet", f"{root}/part-0000007.g1.parquet")
    ids, report = scored(tmp_path / "two", at(root))
    assert ids == list(range(30))
    (note,) = report.notes
    assert note.endswith("part-0000007.g1.parquet") and "not of its result are not read" in note


def test_folders_named_by_other_columns_are_not_the_sinks(
    at: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a restart by another column that was stopped while it published the files are its own, of a third one not."""
    rows = pa.table({"id": range(4), "k": ["1", "2", "1", "2"], "m": ["a", "a", "b", "b"]})
    one = str(tmp_path / "one")

    def by(column: str, **verbs: Any) -> None:
        gm.Job(rows, same, gm.sink(one, keep=["id", "k", "m"], partition_by=[column]), workers=0).run(**verbs)

    by("k")
    for folder in ("old=1", "k=1/old=1"):
        os.makedirs(f"{one}/{folder}")
        shutil.copy(f"{one}/k=1/part-0000000.g1.parquet", f"{one}/{folder}/part-0000000.g1.parquet")
    monkeypatch.setattr(publishing.publish, "publish", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        by("m", restart=True)
    monkeypatch.undo()
    assert os.path.exists(f"{one}/m=a/part-0000000.g2.parquet")
    where = at(one)
    assert scored(tmp_path / "all", f"{where}/[km]=*/part*")[0] == [0, 1, 2, 3]
    assert scored(tmp_path / "two", f"{where}/old=1")[0] == [0, 2]
    assert scored(tmp_path / "three", f"{where}/k=1/old=1")[0] == [0, 2]


def test_a_sink_in_an_archive(source: str, root: str, tmp_path: Path) -> None:  # noqa: F811
    """A backup that was made while a restart published is read as what was published."""
    run(source, root)
    run(source, root, restart=True, harm=BEFORE_PUBLISHING)
    archive = shutil.make_archive(str(tmp_path / "backup"), "zip", os.path.dirname(root), os.path.basename(root))
    assert scored(tmp_path / "all", f"zip://out::file://{archive}")[0] == list(range(30))
    with pytest.raises(gm.BadSource, match=r"zip://out/part-0000000.g2.parquet::.*which has not published it"):
        scored(tmp_path / "no", f"zip://out/part-0000000.g2.parquet::file://{archive}")


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_sink_that_is_a_whole_archive(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed from within its folder while a restart published: rows once, and keys of the result's types."""
    one = str(tmp_path / "one")

    def score(low: int, **verbs: Any) -> None:
        rows = pa.table({"id": range(low, low + 4), "k": ["1", "2", "1", "2"]})
        gm.Job(rows, same, gm.sink(one, keep=["id", "k"], partition_by=["k"]), workers=0).run(**verbs)

    score(0)
    monkeypatch.setattr(publishing.publish, "publish", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score(10, restart=True)
    monkeypatch.undo()
    archive, zipped = str(tmp_path / f"backup.{kind}"), partial(zipfile.ZipFile, strict_timestamps=False)
    with zipped(archive, "w") if kind == "zip" else tarfile.open(archive, "w") as packed:
        add = packed.write if isinstance(packed, zipfile.ZipFile) else packed.add
        for file in filter(Path.is_file, Path(one).rglob("*")):
            add(file, str(file.relative_to(one)))
    uri = f"{kind}://**/*.parquet::file://{archive}"
    report = gm.Job(uri, same, gm.sink(str(tmp_path / "two"), keep=["id", "k"]), workers=0).run()
    table = report.read().to_table()
    assert sorted(table["id"].to_pylist()) == [0, 1, 2, 3] and table.schema.field("k").type == pa.string()


def test_a_link_to_a_folder_of_a_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not lead past what is published: by the link, by what holds it, and by a pattern; nor does a link below it,
    or one to a folder on another disk that the sink has in the place of its own.
    """
    one, into = str(tmp_path / "one"), tmp_path / "exchange"

    def score(low: int, **verbs: Any) -> None:
        rows = pa.table({"id": range(low, low + 4), "k": ["1", "2", "1", "2"], "m": ["x"] * 4})
        gm.Job(rows, same, gm.sink(one, keep=["id", "k", "m"], partition_by=["k", "m"]), workers=0).run(**verbs)

    score(0)
    shutil.move(f"{one}/k=2", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", f"{one}/k=2")
    monkeypatch.setattr(publishing.publish, "publish", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score(10, restart=True)
    monkeypatch.undo()
    assert len(list(Path(one).rglob("k=1/*/part*"))) == 2, "files of both are there"
    into.mkdir()
    os.symlink(f"{one}/k=1", into / "today")
    os.symlink(into / "today" / "m=x", tmp_path / "again")
    for n, uri in enumerate((into / "today", into, f"{into}/*", f"{into}/today/m=x", tmp_path / "again")):
        ids, report = scored(tmp_path / f"out{n}", str(uri))
        assert ids == [0, 2] and report.notes == ()
    assert scored(tmp_path / "whole", one)[0] == [0, 1, 2, 3]
    os.truncate(f"{one}/k=1/m=x/part-0000000.g1.parquet", 100)
    with pytest.raises(gm.BadSource, match=r"today/m=x/part-0000000.g1.parquet: is published, but has 100 of its"):
        scored(tmp_path / "no", str(into))


def test_a_link_to_a_part_of_a_sink(source: str, root: str, extra: str, tmp_path: Path) -> None:  # noqa: F811
    """By whatever name, is as the part is: read where it is published, once beside its sink; else left out, and refused
    where it is named.
    """
    run(source, root)
    run(source, root, args={"bad": [3]}, restart=True, harm=BEFORE_PUBLISHING)
    links = tmp_path / "links"
    links.mkdir()
    old, new = sorted(Path(root).glob("part-0000000.g*"))
    os.symlink(old, links / "latest.parquet")
    os.symlink(new, links / "part-0000009.g1.parquet")
    os.symlink("part-0000009.g1.parquet", links / "newest.parquet")
    first = pq.read_table(old)["id"].to_pylist()
    assert scored(tmp_path / "one", str(links))[0] == scored(tmp_path / "named", f"{links}/latest.parquet")[0] == first
    assert scored(tmp_path / "two", root, str(links))[0] == list(range(30))
    assert scored(tmp_path / "three", str(links), extra)[0] == sorted([*first, *EXTRA])
    with pytest.raises(gm.BadSource, match=r"newest.parquet: has the name of a part of the sink .* which has not publ"):
        scored(tmp_path / "no", f"{links}/newest.parquet", root)
    os.truncate(old, 100)
    with pytest.raises(gm.BadSource, match=r"latest.parquet: is published, but has 100 of its"):
        scored(tmp_path / "no", str(links))


def test_a_sink_without_files(source: str, root: str, extra: str, at: Any, tmp_path: Path) -> None:  # noqa: F811
    """Adds no rows to others if its result has none, which is told; alone it is refused; if its files are lost, too."""
    none = tmp_path / "none"
    rows = gm.source(extra, where="id > 1000")
    gm.Job(rows, same, gm.sink(str(none), keep=["id"]), workers=0, gates={"min_rows": 0, "allow_empty": True}).run()
    ids, report = scored(tmp_path / "one", at(str(none)), at(extra))
    assert ids == EXTRA and report.notes == (f"{at(str(none))}: its result has no rows",)
    with pytest.raises(gm.BadSource, match=r"none: its result has no rows, and so no file .* merge"):
        scored(tmp_path / "no", at(str(none)))
    run(source, root)
    for file in Path(root).glob("part-*"):
        file.unlink()
    for uris in ([at(root)], [at(root), at(extra)]):
        with pytest.raises(gm.BadSource, match=r"part-0000000.g1.parquet: is published, but the file is gone"):
            scored(tmp_path / "no", *uris)


@pytest.mark.parametrize("form", ["", "/..", "/**/*.parquet", "/k=*", "/k=[12]/part*"])
def test_the_only_file_of_a_folder_that_is_gone(at: Any, form: str, tmp_path: Path) -> None:
    """Is missed by whoever asks for it, however, and not by who reads other folders."""
    one = str(tmp_path / "sinks" / "one")
    rows = pa.table({"id": range(4), "k": ["1", "2", "1", "2"]})
    gm.Job(rows, same, gm.sink(one, keep=["id", "k"], partition_by=["k"]), workers=0).run()
    shutil.rmtree(f"{one}/k=2")
    where = at(one)
    uri = where + form if form != "/.." else where.rpartition("/")[0]
    with pytest.raises(gm.BadSource, match=f"{where}/k=2/part-0000000.g1.parquet: is published, but the file is gone"):
        scored(tmp_path / "no", uri)
    for n, form in enumerate(("/k=1", "/k=[13]/*.parquet", "/k=1/part-0000000.g1.parquet")):
        assert scored(tmp_path / f"out{n}", where + form)[0] == [0, 2]


def test_records_that_may_not_be_read(
    source: str,  # noqa: F811
    root: str,  # noqa: F811
    at: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts of several runs are refused with the way out, which goes on with a note; those of one run are told."""

    def deny(kind: Any, method: str, error: OSError) -> None:
        real = getattr(kind, method)

        def look(self: Any, folder: str, *more: Any) -> Any:
            if "/out/_gristmill" in folder:
                raise error
            return real(self, folder, *more)

        monkeypatch.setattr(kind, method, look)

    run(source, root)
    run(source, root, restart=True, harm=BEFORE_PUBLISHING)
    where = at(root)
    deny(FsspecListing, "entries", OSError("AWS Error ACCESS_DENIED: Denied"))
    deny(LocalFiles, "names", PermissionError(13, "Permission denied"))
    for uri in (where, f"{where}/*.parquet", f"{where.rpartition('/')[0]}/**/part*"):
        with pytest.raises(
            gm.BadSource, match=r"out: has files .* of several runs \(g1, g2\).*/_gristmill: .*enied.*g2"
        ):
            scored(tmp_path / "no", uri)
    ids, report = scored(tmp_path / "one", f"{where}/part-*.g1.*")
    assert ids == list(range(30))
    (note,) = report.notes
    assert note.startswith(f"{where}/_gristmill: may not be read (") and note.endswith("g1.parquet and 2 more")


def test_what_lists_the_vectors_of_a_sink_is_no_row_of_it(tmp_path: Path) -> None:
    """A pattern for what stands beside them matches it as well; a table of the user's of that name is one."""

    def vectors(batch: dict[str, Any]) -> dict[str, Any]:
        return {"v": [[1.0, 2.0]] * len(batch["id"])}

    def night(pattern: str) -> list[int]:
        rows = gm.apply(f"{tmp_path}/{pattern}", fn=lambda batch: {"n": batch["id"]}, keep=["id"], workers=0)
        return sorted(rows["id"].to_pylist())

    ids = pa.table({"id": range(10), "k": [0, 1] * 5})
    model = gm.model(vectors, returns={"v": "float32[2]"})
    for name, by in (("o", []), ("p", ["k"])):
        sink = gm.sink(str(tmp_path / name), keep=["id"], format="npy", partition_by=by)
        gm.Job(ids, model, sink, workers=0).run()
        assert (tmp_path / name / "manifest.parquet").exists()
        assert night(f"{name}/**/*.parquet") == list(range(10))
    assert night("o/*.parquet") == list(range(10))
    with pytest.raises(gm.BadSource, match=r"manifest\.parquet: lists which vectors .*p/\*\*/\*\.ids\.parquet"):
        night("p/*.parquet")
    (tmp_path / "own").mkdir()
    pq.write_table(ids, tmp_path / "own" / "manifest.parquet")
    assert night("own/*.parquet") == list(range(10))
