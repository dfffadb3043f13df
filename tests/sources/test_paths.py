"""Finding source files: what a path, a folder and a glob stand for, and what is said where they stand for nothing."""

from __future__ import annotations

import functools
import http.server
import itertools
import os
import pickle
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.errors import BadJob, BadSource, GristmillError, SourceChanged
from gristmill.job.job import source
from gristmill.shards.sourcefiles import SourceFile
from gristmill.sources import listing, patience
from gristmill.sources.listing import ArrowListing, Entry, FsspecListing, is_young
from gristmill.sources.paths import changed, open_input, resolve


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with what a source has to read and what it has to leave alone."""
    for name in (
        "b.parquet", "a.parquet", "_SUCCESS", ".hidden.parquet", "c.parquet.tmp", ".a.crc", "sub/d.parquet",
        "sub/_temporary/e.parquet", "day=1/f.parquet", "_day=2/g.parquet", "notes.txt",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path


def found(root: Path, *uris: str) -> list[str]:
    return [os.path.relpath(f.path, root) for f in resolve(source(*uris))[1]]


def test_a_folder_is_read_with_what_is_below_it_as_spark_reads_it(tree: Path) -> None:
    """Sorted; hidden, temporary and checksum files are left out, partition folders are not."""
    everything = ["_day=2/g.parquet", "a.parquet", "b.parquet", "day=1/f.parquet", "notes.txt", "sub/d.parquet"]
    assert found(tree, str(tree)) == everything
    assert found(tree, f"{tree}/") == everything


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.parquet", ["a.parquet", "b.parquet"]),
        ("?.parquet", ["a.parquet", "b.parquet"]),
        ("[!b].parquet", ["a.parquet"]),
        ("**/*.parquet", ["_day=2/g.parquet", "a.parquet", "b.parquet", "day=1/f.parquet", "sub/d.parquet"]),
        ("**", ["_day=2/g.parquet", "a.parquet", "b.parquet", "day=1/f.parquet", "notes.txt", "sub/d.parquet"]),
        ("s*", ["sub/d.parquet"]),
        ("*/*.parquet", ["_day=2/g.parquet", "day=1/f.parquet", "sub/d.parquet"]),
        ("sub/_temporary/*", ["sub/_temporary/e.parquet"]),
        ("_SUC*", ["_SUCCESS"]),
        ("**/day=*/*", ["day=1/f.parquet"]),
    ],
)
def test_globs(tree: Path, pattern: str, names: list[str]) -> None:
    """Wildcards match as in a shell, `**` any depth; a folder that matches is read with what is below it."""
    assert found(tree, f"{tree}/{pattern}") == names


def test_several_keep_their_order_and_a_file_counts_once(tree: Path) -> None:
    """URIs in the order given; what two of them name is read for the first one."""
    assert found(tree, f"{tree}/sub", f"{tree}/*.parquet", f"{tree}/a.parquet") == [
        "sub/d.parquet",
        "a.parquet",
        "b.parquet",
    ]


def test_a_file_that_is_named_is_read_whatever_its_name(tree: Path) -> None:
    """Leaving names out is for folders; also for a name that looks like a pattern."""
    assert found(tree, f"{tree}/_SUCCESS") == ["_SUCCESS"]
    (tree / "x[1].parquet").write_bytes(b"")
    assert found(tree, f"{tree}/x[1].parquet") == ["x[1].parquet"]


def test_relative_paths_home_and_file_uris_are_the_same_file(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Identity does not depend on how a path was written."""
    monkeypatch.chdir(tree)
    monkeypatch.setenv("HOME", str(tree))
    one = resolve(source(str(tree / "a.parquet")))[1]
    for uri in ("a.parquet", "./sub/../a.parquet", "~/a.parquet", f"file://{tree}/a.parquet"):
        assert resolve(source(uri))[1] == one


def test_a_sink_is_the_folder_that_a_source_of_that_name_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Home, relative, with characters that an address escapes: a run writes there, and reading finds it."""
    home = tmp_path / "of a Müller#1"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    (home / "rows.jsonl").write_text('{"x": 1}\n')
    for uri in ("~/out 1", (home / "out 2").as_uri(), f"file://localhost{(home / 'out 3').as_uri()[7:]}", "out 4"):
        gm.run(gm.Job("~/rows.jsonl", lambda batch: {"y": batch["x"]}, uri, workers=0))
        assert gm.read(uri).to_table().to_pylist() == [{"y": 1}]
    assert sorted(p.name for p in home.iterdir()) == ["out 1", "out 2", "out 3", "out 4", "rows.jsonl"]
    inside = gm.Job((home / "out 2").as_uri(), lambda batch: {"y": batch["x"]}, (home / "out 2").as_uri(), workers=0)
    with pytest.raises(gm.BadJob, match="is inside source"):
        gm.run(inside)


def test_links_are_followed_and_loops_are_not(tree: Path) -> None:
    """A linked folder is read; a link to a folder above it, or two folders linked to each other, would never end. Of
    two names of a file the one with a day counts.
    """
    elsewhere = tree.with_name("elsewhere")
    elsewhere.mkdir()
    (elsewhere / "h.parquet").touch()
    before = found(tree, str(tree))
    (tree / "sub" / "up").symlink_to(tree)
    (tree / "sub" / "day").symlink_to(tree / "day=1")
    (tree / "day=1" / "sub").symlink_to(tree / "sub")
    (tree / "linked").symlink_to(elsewhere)
    dated = ["day=1/sub/d.parquet" if name == "sub/d.parquet" else name for name in before]
    assert found(tree, str(tree)) == sorted([*dated, "linked/h.parquet"])


def test_a_file_of_several_names_is_read_once(tmp_path: Path) -> None:
    """Links of both kinds in a folder, a folder through a link to it, a file that is named twice: the note has both
    names, and of two the one that is no link is kept. Copies, and hard links named outright, are files of their own.
    """
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "b.parquet").write_bytes(b"x")
    (inside / "a.parquet").symlink_to("b.parquet")
    os.link(inside / "b.parquet", inside / "c.parquet")
    shutil.copy2(inside / "b.parquet", inside / "d.parquet")
    (tmp_path / "to").symlink_to(inside)
    (inside / "up").symlink_to(tmp_path)

    def once(*uris: str) -> tuple[list[str], str]:
        said: list[str] = []
        files = resolve(source(*(f"{tmp_path}/{uri}" for uri in uris)), said.append)[1]
        return [os.path.relpath(f.path, tmp_path) for f in files], " ".join(said)

    both = ["in/b.parquet", "in/d.parquet"]
    for uris in (("in",), ("in/*.parquet",), ("in", "to"), ("",), ("in", "in/c.parquet"), ("in/*", "in/**")):
        names, said = once(*uris)
        assert names == both, uris
        assert f"{inside}/b.parquet and {inside}/a.parquet" in said
    names, said = once("to")
    assert (names, "to/b.parquet and" in said) == (["to/b.parquet", "to/d.parquet"], True)
    assert once("in/a.parquet") == (["in/a.parquet"], "")
    names, said = once("in/a.parquet", "in/b.parquet", "in/a.parquet")
    assert names == ["in/a.parquet"]
    assert "in/a.parquet and" in said and "in/a.parquet, which is listed twice" in said
    assert once("in/b.parquet", "in/c.parquet") == (["in/b.parquet", "in/c.parquet"], "")
    assert once("in/c.parquet", "in")[0] == ["in/c.parquet", "in/d.parquet"]


def test_names_that_make_other_rows_are_files_of_their_own(tmp_path: Path) -> None:
    """A hard link in a folder of another day, as `cp -al` makes it, or to a file that is one row, as tools that save
    room do; a link to the folder of another day. One without a day adds no rows to those that have one.
    """
    days = [tmp_path / "in" / f"day={day}" for day in (1, 2)]
    for day in days:
        day.mkdir(parents=True)
    pq.write_table(pa.table({"x": [1, 2]}), days[0] / "a.parquet")
    os.link(days[0] / "a.parquet", days[1] / "a.parquet")
    (tmp_path / "in" / "day=3").symlink_to("day=2")
    (tmp_path / "in" / "last").symlink_to("day=2")
    job = gm.Job(f"{tmp_path}/in", doubled, gm.sink(str(tmp_path / "out"), keep=["day"]), workers=0)
    report = job.run()
    assert report.rows_ok == 6 and any("last/a.parquet" in note for note in report.notes)
    assert gm.read(str(tmp_path / "out")).to_table()["day"].to_pylist() == [1, 1, 2, 2, 3, 3]
    days[0].rename(tmp_path / "in" / "day=0")
    assert job.run(restart=True).rows_ok == 6
    (tmp_path / "texts" / "b").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text("same")
    os.link(tmp_path / "texts" / "a.txt", tmp_path / "texts" / "b" / "c.txt")
    found = gm.apply(f"{tmp_path}/texts", fn=lambda batch: {"n": [len(t) for t in batch["text"]]}, keep=["path"])
    assert [Path(path).name for path in found["path"].to_pylist()] == ["a.txt", "c.txt"]


def test_a_pool_that_days_link_to(tmp_path: Path) -> None:
    """Each day has the rows; the file itself, which has no day, adds none, wherever its name comes."""
    (tmp_path / "in" / "pool").mkdir(parents=True)
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "in" / "pool" / "x.parquet")
    for day in (1, 2):
        (tmp_path / "in" / f"day={day}").mkdir()
    for name in ("pool", "a", "z"):
        for day in (1, 2):
            (link := tmp_path / "in" / f"day={day}" / "x.parquet").unlink(missing_ok=True)
            link.symlink_to(f"../{name}/x.parquet")
        next(f for f in (tmp_path / "in").iterdir() if "=" not in f.name).rename(tmp_path / "in" / name)
        files = resolve(source(f"{tmp_path}/in"))[1]
        assert [f.folders for f in files] == ["day=1", "day=2"], name


def test_another_link_to_a_file_of_several_days(tmp_path: Path) -> None:
    """Those that were planned are there, whatever names come besides."""
    for day in (1, 2):
        (tmp_path / "in" / f"day={day}").mkdir(parents=True)
    first = tmp_path / "in" / "day=1" / "b.parquet"
    pq.write_table(pa.table({"x": [1, 2]}), first)
    os.link(first, tmp_path / "in" / "day=2" / "b.parquet")
    job = gm.Job(f"{tmp_path}/in", doubled, gm.sink(str(tmp_path / "out"), keep=["day"]), workers=0)
    job.run()
    os.link(first, tmp_path / "in" / "day=2" / "a.parquet")
    assert job.run(append=True).rows_ok == 4
    assert gm.read(str(tmp_path / "out")).to_table()["day"].to_pylist() == [1, 1, 2, 2]


def test_values_of_folders_may_end_as_unfinished_files_do(tmp_path: Path) -> None:
    """Only files that end in .tmp or .crc are left out, and folders that are no partition."""
    for folder in ("file=a.tmp", "file=b.crc", "file=c", "d.tmp"):
        (tmp_path / folder).mkdir()
        for name in ("x.parquet", "y.parquet.tmp", "z=1.crc"):
            (tmp_path / folder / name).touch()
    wanted = [f"file={value}/x.parquet" for value in ("a.tmp", "b.crc", "c")]
    for pattern in ("", "/**", "/**/*.parquet", "/*/*.parquet", "/file=*", "/file=*/*"):
        files = resolve(source(f"{tmp_path}{pattern}", format="parquet"))[1]
        assert [os.path.relpath(f.path, tmp_path) for f in files] == wanted, pattern


def test_local_names_are_no_addresses(tmp_path: Path) -> None:
    """What looks like a query, or a chain of file systems, is a part of a local name."""
    names = ["page.html", "page.html?id=5", "page.html?id=6", "a::b.html"]
    for name in names:
        (tmp_path / name).write_text(name)
    files = resolve(source(*(f"{tmp_path}/{name}" for name in names), format="text"))[1]
    assert [os.path.basename(f.path) for f in files] == names


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ("http://h/get?token=a", "http://h/get?token=b", "http://h/get and http://h/get"),
        ("s3://a:b@box/x?region=eu", "s3://box/y?region=eu", "s3://box/x?region=eu and s3://box/y?region=eu"),
        ("s3://box/x?endpoint_override=h:1&region=eu", "s3://box/x?endpoint_override=h:2&region=eu", "two addresses"),
    ],
)
def test_two_addresses_of_one_place_are_opened_in_one_way(
    one: str, other: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another user, signature or store the second would be read as the first is."""
    monkeypatch.setattr(ArrowListing, "look", lambda self, path: Entry(path.rpartition("/")[2], False, 1, "1"))
    monkeypatch.setattr(FsspecListing, "look", lambda self, path: Entry(path.rpartition("/")[2], False, 1, "1"))
    with pytest.raises(gm.BadSource, match=re.escape(told)):
        resolve(source(one, other))
    assert len(resolve(source(one, one))[1]) == 1


@pytest.mark.parametrize("name", ["S3", "HTTP", "GCS"])
def test_a_scheme_may_be_written_in_capitals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same file, and is read once."""
    for kind in (ArrowListing, FsspecListing):
        monkeypatch.setattr(kind, "look", lambda self, path: Entry(path.rpartition("/")[2], False, 1, "1"))
    plain = {"gcs": "gs"}.get(name.lower(), name.lower())
    way = "" if name == "HTTP" else "?region=eu" if name == "S3" else ""
    files = resolve(source(f"{name}://box/x.csv{way}", f"{plain}://box/x.csv{way}"))[1]
    assert [file.path for file in files] == [f"{plain}://box/x.csv"]


@pytest.mark.parametrize("links", ["hard", "symbolic", "moved"])
@pytest.mark.parametrize("uris", [["in"], ["before", "in"], ["in/*.parquet"]])
def test_a_planned_file_keeps_its_name(tmp_path: Path, uris: list[str], links: str) -> None:
    """Another name of a file that was read, which comes before it or is no link, is not a file in its place."""
    for folder in ("before", "in"):
        (tmp_path / folder).mkdir()
        pq.write_table(pa.table({"x": [len(folder)]}), tmp_path / folder / "d.parquet")
    old = tmp_path / "in" / "b.parquet"
    pq.write_table(pa.table({"x": list(range(10))}), old)
    job = gm.Job([f"{tmp_path}/{uri}" for uri in uris], doubled, str(tmp_path / "out"), workers=0)
    rows = job.run().rows_ok
    for folder in {"in", uris[0].partition("/")[0]}:
        other = tmp_path / folder / "a.parquet"
        if links == "hard":
            os.link(old, other)
        elif links == "symbolic":
            other.symlink_to(old)
        elif not old.is_symlink():
            old.rename(other)
            old.symlink_to(other)
    for verbs in ({}, {"append": True}):
        assert job.run(**verbs).rows_ok == rows
        assert gm.read(str(tmp_path / "out")).to_table().num_rows == rows
    job.run(restart=True)
    assert gm.read(str(tmp_path / "out")).to_table().num_rows == rows


def test_a_job_reads_the_rows_of_a_linked_file_once(tmp_path: Path) -> None:
    """And its report says why there are no more."""
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"x": list(range(10))}), tmp_path / "in" / "a.parquet")
    (tmp_path / "in" / "b.parquet").symlink_to("a.parquet")
    report = gm.Job(str(tmp_path / "in"), doubled, str(tmp_path / "out"), workers=0).run()
    assert (report.rows_in, report.rows_ok) == (10, 10)
    assert sorted(report.read().to_table()["y"].to_pylist()) == list(range(0, 20, 2))
    (note,) = [n for n in report.notes if "a.parquet and" in n]
    assert "read once" in note and "b.parquet" in note


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    """A model."""
    return {"y": batch["x"] * 2}


def test_what_is_missing_is_named_with_what_is_near(tree: Path) -> None:
    """The value, and the name that was probably meant."""
    with pytest.raises(BadSource, match=r"a\.parqet: no such file or folder; .* has 'a\.parquet'"):
        resolve(source(f"{tree}/a.parqet"))
    with pytest.raises(
        BadSource, match=r"nope/x\.parquet: no such file or folder; .* exists and holds _day=2, a\.parquet"
    ):
        resolve(source(f"{tree}/nope/x.parquet"))
    with pytest.raises(BadSource, match=r"\*\.csv: the pattern matches no file; .* exists and holds"):
        resolve(source(f"{tree}/*.csv"))
    with pytest.raises(BadSource, match=r"nope/\*\*: the pattern matches no file; .* exists and holds"):
        resolve(source(f"{tree}/nope/**"))


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    """Also one that holds nothing but what is not read."""
    (tmp_path / "_SUCCESS").write_bytes(b"")
    with pytest.raises(BadSource, match=r"holds no files .* which columns there are.*allow_empty is for files"):
        resolve(source(str(tmp_path)))
    with pytest.raises(BadJob, match="perhaps a variable that is not set"):
        source("")


def test_a_broken_link_and_a_pipe_are_named(tmp_path: Path) -> None:
    """They are in the folder, so leaving them out would be silent."""
    (tmp_path / "gone.parquet").symlink_to(tmp_path / "nothing")
    with pytest.raises(BadSource, match=r"gone\.parquet"):
        resolve(source(str(tmp_path)))
    (tmp_path / "gone.parquet").unlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadSource, match="pipe"):
        resolve(source(str(tmp_path)))


def test_ten_thousand_files_are_listed_in_well_under_a_second(tmp_path: Path) -> None:
    """A big folder costs a system call a file, not a library call."""
    for i in range(10_000):
        (tmp_path / f"{i:05d}.parquet").touch()
    taken = []
    for _ in range(5):  # what else goes on in this process counts, too
        started = time.process_time()
        files = resolve(source(str(tmp_path)))[1]
        taken.append(time.process_time() - started)
        assert len(files) == 10_000
    assert min(taken) < 1.0


def test_a_change_is_told(tree: Path) -> None:
    """Fault 27: other content of the same size, another size, and a file that is gone."""
    fs, files = resolve(source(f"{tree}/a.parquet"))
    path = tree / "a.parquet"
    assert changed(fs, files[0]) is None
    os.utime(path, ns=(1_700_000_000_000_000_000, int(files[0].stamp)))
    assert "inode" in (changed(fs, files[0]) or "")
    os.utime(path, ns=(1_700_000_000_000_000_000, 1_700_000_000_000_000_000))
    assert "modified 2023-11-1" in (changed(fs, files[0]) or "")
    path.write_bytes(b"longer than before")
    assert "18 bytes, but 9 when planned" in (changed(fs, files[0]) or "")
    path.unlink()
    with pytest.raises(SourceChanged, match="gone"):
        changed(fs, files[0])
    with pytest.raises(SourceChanged, match="gone"):
        open_input(fs, files[0].path)


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    """A file system that only fsspec opens."""
    fs = fsspec.filesystem("memory")
    for name in ("/box/a/1.parquet", "/box/a/b/2.parquet", "/box/a/_s", "/box/c.csv"):
        fs.pipe(name, name.encode())
    yield fs
    fs.rm("/box", recursive=True)


@pytest.mark.parametrize(
    ("uri", "names"),
    [
        ("memory://box/a", ["a/1.parquet", "a/b/2.parquet"]),
        ("memory://box/**/*.parquet", ["a/1.parquet", "a/b/2.parquet"]),
        ("memory://box/*.csv", ["c.csv"]),
        ("memory://box/a/1.parquet", ["a/1.parquet"]),
        ("memory://box/a/?.parquet", ["a/1.parquet"]),
    ],
)
def test_a_file_system_of_fsspec(memory: fsspec.AbstractFileSystem, uri: str, names: list[str]) -> None:
    """The same rules; files open from a copy of the storage, as on another machine, and changes are seen."""
    fs, files = resolve(source(uri))
    assert [f.path for f in files] == [f"memory://box/{n}" for n in names]
    fs = pickle.loads(pickle.dumps(fs))
    assert open_input(fs, files[0].path).read() == f"/box/{names[0]}".encode()
    assert changed(fs, files[0]) is None
    memory.pipe(f"/box/{names[0]}", b"other")
    assert changed(fs, files[0]) is not None


def test_links_to_files_that_are_one_row_each(tmp_path: Path) -> None:
    """Are rows of their own, unless what they lead to is read itself."""
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "x.txt").write_text("x")
    for label in ("cat", "dog"):
        (tmp_path / "d" / label).mkdir(parents=True)
        os.symlink(tmp_path / "pool" / "x.txt", tmp_path / "d" / label / "x.txt")
    whole = {"whole": lambda path: True}
    _, files = resolve(source(tmp_path / "d"), **whole)
    assert [os.path.relpath(f.path, tmp_path) for f in files] == ["d/cat/x.txt", "d/dog/x.txt"]
    _, files = resolve(source(tmp_path / "d"))
    assert len(files) == 1
    _, files = resolve(source(tmp_path), **whole)
    assert [os.path.relpath(f.path, tmp_path) for f in files] == ["pool/x.txt"]


@pytest.mark.parametrize("uri", ["memory://top*.csv", "memory:///top*.csv", "memory://top.csv"])
def test_files_at_the_top_of_a_file_system_without_buckets(memory: fsspec.AbstractFileSystem, uri: str) -> None:
    """Are found and opened by the names they are listed under."""
    memory.pipe("/top.csv", b"id")
    try:
        fs, (file,) = resolve(source(uri))
        assert fs.named == ("memory://top*.csv",) if "*" in uri else fs.named == (file.path,)
        assert file.path == "memory://top.csv" and open_input(fs, file.path).read() == b"id"
    finally:
        memory.rm("/top.csv")


def test_a_file_system_of_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing and opening through pyarrow's classes, shown on its local one."""
    import pyarrow.fs as pafs

    from gristmill.sources.listing import ArrowListing
    from gristmill.sources.patterns import files_of

    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "1.parquet").write_bytes(b"one")
    (tmp_path / "x" / "_s").write_bytes(b"")
    listing = ArrowListing(pafs.LocalFileSystem())
    for path in (f"{tmp_path}/x", f"{tmp_path}/**/*.parquet", f"{tmp_path}/*/1.parquet"):
        _, ((name, entry),) = files_of(listing, path, path)
        assert name == f"{tmp_path}/x/1.parquet"
        assert (entry.size, entry.stamp) == (3, str((tmp_path / "x" / "1.parquet").stat().st_mtime_ns))
    assert listing.open(f"{tmp_path}/x/1.parquet").read() == b"one"
    assert listing.look(f"{tmp_path}/nope") is None


@pytest.mark.parametrize("uri", ["nope://a/b", "s3://AKIA:hush@a b/c", "ftp://user:hush@127.0.0.1:1/x"])
def test_what_cannot_be_opened_is_one_line_without_secrets(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 39, for messages of libraries too."""
    monkeypatch.setattr(patience.patiently, "__defaults__", (0.2,))
    with pytest.raises(GristmillError) as caught:
        resolve(source(uri))
    assert "hush" not in str(caught.value)
    assert "\n" not in str(caught.value)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The URL of a web server with one file in it."""
    (tmp_path / "c.csv").write_bytes(b"a,b\n1,2\n")
    handler = functools.partial(_Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/c.csv"
        server.shutdown()
        thread.join()


def test_a_signed_url_opens_and_its_signature_is_shown_nowhere(served: str) -> None:
    """Fault 39: the storage keeps the secret to open the file, on a worker too; nothing printed or stored has it."""
    pytest.importorskip("aiohttp")
    fs, files = resolve(source(f"{served}?v=1&X-Amz-Signature=hush"))
    assert [f.path for f in files] == [f"{served}?v=1"]
    assert open_input(pickle.loads(pickle.dumps(fs)), files[0].path).read() == b"a,b\n1,2\n"
    assert "hush" not in repr(fs) + repr(files)
    with pytest.raises(BadSource) as caught:
        resolve(source(f"{served}x?X-Amz-Signature=hush"))
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("etag", "age", "young"),
    [("", 0, True), ('"6929fb5b-8"', 0, True), ('W/"1a2b"', 0, True), ("", 5, False), ('"6929fb5b-8"', 5, False),
     (f'"{"0a" * 16}"', 0, False), (f'"{"0a" * 16}-3"', 0, False), ('"0x8DCAB12345678EF"', 0, False)],
)  # fmt: skip
def test_what_a_web_server_tells_of_a_file_that_was_just_written(
    etag: str, age: int, young: bool, served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a time in whole seconds nor an ETag made of it tells that it is written again within the second."""
    pytest.importorskip("aiohttp")

    def tagged(self: _Quiet) -> None:
        self.send_header("ETag", etag)
        http.server.SimpleHTTPRequestHandler.end_headers(self)

    monkeypatch.setattr(_Quiet, "end_headers", tagged)
    os.utime(tmp_path / "c.csv", (0, time.time() - age))
    assert is_young(resolve(source(served))[1][0].touched) == young


def test_files_are_settled_that_are_the_same_a_second_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a store's clock that is ahead; those that were written meanwhile a little later, and not those that are
    written all the time.
    """
    monkeypatch.setattr(listing, "SECOND", 0.01)
    young = listing._young(int(time.time()) + 1000)
    before = [SourceFile("a", 1, "s", young), SourceFile("b", 1, "s", young), SourceFile("c", 1, "s", "inode")]
    writings = itertools.count()

    def again() -> list[SourceFile]:
        busy = SourceFile("d", 1, f"{next(writings)}", young)
        return [before[0], SourceFile("b", 1, "t", young), before[2], busy]

    assert [f.touched for f in listing.settled(before, again)] == ["", "", "inode", young]
    assert next(writings) == listing._LOOKS
    assert listing.settled(before[2:], list) == before[2:]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("1790000000123000000", "1790000000000000000", True), ("1790000001123000000", "1790000000000000000", False),
     ("1790000000.000000", "1790000000.123456", True), ("1790000000.120000", "1790000000.123456", False),
     ("1790000000123456", "1790000000000000", False), ("abc", "abc", True), ("abc", "abd", False)],
)  # fmt: skip
def test_times_that_agree_in_seconds_where_one_tells_no_more(one: str, other: str, same: bool) -> None:
    """In nanoseconds or seconds; a version that is a number is no time."""
    assert listing.same_time(one, other) == listing.same_time(other, one) == same
