"""Sources in archives: read as the disk that they were made of, or refused where they are cut, damaged or written."""

from __future__ import annotations

import io
import os
import pickle
import stat
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from gristmill.errors import BadSource, SourceChanged
from gristmill.job.job import source
from gristmill.shards.sourcefiles import SourceFile
from gristmill.sources.paths import changed, open_input, resolve


def packed(folder: Path, archive: Path, *names: str, mode: str = "w") -> str:
    """A tar archive of what is in a folder, under these names."""
    with tarfile.open(archive, mode) as out:  # type: ignore[call-overload]
        for name in names:
            out.add(folder / name, name)
    return str(archive)


def test_an_archive_is_read_as_the_disk_it_was_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links lead to what they led to, to a folder, too; `./` says nothing; the address may be relative."""
    folder = tmp_path / "d"
    for name in ("day=1/a.csv", "day=2/b.csv"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"id\n{name}\n")
    os.symlink("day=2/b.csv", folder / "latest.csv")
    os.symlink("day=2", folder / "newest")
    os.link(folder / "day=1/a.csv", folder / "day=1" / "again.csv")
    archive = packed(folder, tmp_path / "x.tgz", ".", mode="w:gz")
    monkeypatch.chdir(tmp_path)
    on_disk = [(os.path.relpath(f.path, folder), f.folders, f.size) for f in resolve(source(folder))[1]]
    assert [name for name, _, _ in on_disk] == ["day=1/a.csv", "day=2/b.csv"]
    for uri in ("tar://::x.tgz", f"tar://**/*.csv::{archive}", "tar://./::./x.tgz"):
        fs, files = resolve(source(uri))
        inner = [f.path.removeprefix("tar://").partition("::")[0].removeprefix("./") for f in files]
        assert [(n, f.folders, f.size) for n, f in zip(inner, files, strict=True)] == on_disk
        assert {f.path.partition("::")[2] for f in files} == {archive}
        assert open_input(pickle.loads(pickle.dumps(fs)), files[1].path).read() == b"id\nday=2/b.csv\n"
    _, (file,) = resolve(source(f"tar://newest::{archive}"))
    assert file.path == f"tar://newest/b.csv::{archive}"
    with pytest.raises(BadSource, match=r"tar://nowhere.csv::.*y.tar: a link that leads to nothing"):
        os.symlink("no.csv", folder / "nowhere.csv")
        resolve(source(f"tar://::{packed(folder, tmp_path / 'y.tar', 'nowhere.csv')}"))
    with pytest.raises(BadSource, match="no such file or folder"):
        resolve(source(f"tar://newest/c.csv::{archive}"))


def test_members_of_an_archive_change_with_it(tmp_path: Path) -> None:
    """One that is made again may have other rows of the same size and time."""
    (tmp_path / "a.csv").write_text("id\n1\n")
    os.utime(tmp_path / "a.csv", (1_700_000_000, 1_700_000_000))
    uri = f"tar://::{packed(tmp_path, tmp_path / 'x.tar', 'a.csv')}"
    _, (one,) = resolve(source(uri))
    (tmp_path / "a.csv").write_text("id\n2\n")
    os.utime(tmp_path / "a.csv", (1_700_000_000, 1_700_000_000))
    packed(tmp_path, tmp_path / "x.tar", "a.csv")
    _, (other,) = resolve(source(uri))
    assert one.size == other.size and one.stamp != other.stamp and one.stamp.startswith("1700000000")


def test_members_that_are_read_at_once(tmp_path: Path) -> None:
    """Have their own bytes, though all come through one file."""
    for n in range(4):
        (tmp_path / f"{n}.csv").write_bytes(bytes([n]) * 3_000_000)
    names = [f"{n}.csv" for n in range(4)]
    fs, files = resolve(source(f"tar://::{packed(tmp_path, tmp_path / 'x.tar', *names)}"))

    def read(file: SourceFile) -> set[int]:
        content = open_input(fs, file.path)
        return {b for _ in range(300) for b in content.read(10_000)}

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(read, files)) == [{0}, {1}, {2}, {3}]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder `d` of ten small files."""
    (tmp_path / "d").mkdir()
    for n in range(10):
        (tmp_path / "d" / f"{n}.txt").write_text(f"text {n}")
    return tmp_path


@pytest.mark.parametrize("mode", ["w", "w:gz", "zip"])
def test_one_that_is_cut_is_refused(texts: Path, mode: str) -> None:
    """Wherever: Python's tarfile takes what it finds for all."""
    archive = texts / "x"
    if mode == "zip":
        with zipfile.ZipFile(archive, "w") as out:
            for n in range(10):
                out.write(texts / "d" / f"{n}.txt", f"d/{n}.txt")
    else:
        packed(texts, archive, "d", mode=mode)
    kind, whole = "zip" if mode == "zip" else "tar", archive.read_bytes()
    last = 1024 * 11 if mode == "w" else len(whole)  # what follows in a tar are zeros
    assert len(resolve(source(f"{kind}://::{archive}"))[1]) == 10
    for size in range(0, last, last // 23):
        archive.write_bytes(whole[:size])
        with pytest.raises(BadSource, match="x: is cut or damaged"):
            resolve(source(f"{kind}://::{archive}"))


def test_one_with_a_damaged_header_is_refused(texts: Path) -> None:
    """What comes after it would not be found."""
    archive = packed(texts, texts / "x.tar", "d")
    content = bytearray(Path(archive).read_bytes())
    content[1024 * 5 + 512 + 3] ^= 1
    Path(archive).write_bytes(content)
    with pytest.raises(BadSource, match=r"x.tar: is cut or damaged, or no tar archive: it has no end after d/\d.txt"):
        resolve(source(f"tar://::{archive}"))
    with pytest.raises(BadSource, match=r"0.txt: is cut or damaged"):
        resolve(source(f"zip://::{texts}/d/0.txt"))


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_one_that_is_written_in_its_place_is_changed(texts: Path, kind: str) -> None:
    """Also for who has it open: the places of its members are others."""
    archive = texts / f"x.{kind}"

    def write(names: list[int]) -> None:
        content = io.BytesIO()
        if kind == "tar":
            with (
                open(archive, "r+b" if archive.exists() else "wb") as file,
                tarfile.open(fileobj=file, mode="w") as out,
            ):
                for n in names:
                    out.add(texts / "d" / f"{n}.txt", f"d/{n}.txt")
        else:
            content = io.BytesIO()
            with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as packing:
                for n in names:
                    packing.writestr(f"d/{n}.txt", f"text {n}" * (len(names) + n))
            with open(archive, "r+b" if archive.exists() else "wb") as file:
                file.write(content.getvalue())

    write([1, 2, 3])
    fs, files = resolve(source(f"{kind}://d::{archive}"))
    assert open_input(fs, files[2].path).read().startswith(b"text 3") and changed(fs, files[2]) is None
    write([4, 3, 2, 1])
    assert changed(fs, files[2]) is not None
    archive.unlink()
    with pytest.raises(SourceChanged, match="gone"):
        changed(fs, files[2])


def test_links_in_a_zip_and_names_from_outside(texts: Path) -> None:
    """As unzip and tar would write them: no link is a text, `/a` and `../a` are `a`."""
    archive = texts / "x.zip"
    with zipfile.ZipFile(archive, "w") as out:
        out.writestr("d/1.txt", "one")
        link = zipfile.ZipInfo("d/latest.txt")
        link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
        out.writestr(link, "1.txt")
        out.writestr("/d/2.txt", "two")
        out.writestr("./../e/3.txt", "three")
    fs, files = resolve(source(f"zip://::{archive}"))
    inner = [f.path.removeprefix("zip://").partition("::")[0] for f in files]
    assert inner == ["d/1.txt", "d/2.txt", "e/3.txt"]
    assert [open_input(fs, f.path).read() for f in files] == [b"one", b"two", b"three"]
    assert open_input(fs, f"zip://d/latest.txt::{archive}").read() == b"one"


def test_a_link_through_a_link(tmp_path: Path) -> None:
    """`..` leads up from where the first one leads, not from where its name is."""
    for name in ("real/y", "o/y"):
        (tmp_path / "w" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "w" / name).write_text(name)
    (tmp_path / "w" / "real" / "x").mkdir()
    os.symlink("../real/x", tmp_path / "w" / "o" / "lx")
    os.symlink("lx/../y", tmp_path / "w" / "o" / "via")
    archive = packed(tmp_path / "w", tmp_path / "w.tar", ".")
    fs, (file,) = resolve(source(f"tar://o/via::{archive}"))
    assert open_input(fs, file.path).read() == b"real/y" == (tmp_path / "w" / "o" / "via").read_bytes()


def test_an_archive_in_another(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a relative path as by an absolute one; a member has changed when either has."""
    monkeypatch.chdir(texts)

    def write(text: str) -> None:
        (texts / "d" / "0.txt").write_text(text)
        os.utime(texts / "d" / "0.txt", (1_700_000_000, 1_700_000_000))
        packed(texts, texts / "in.tar", "d", mode="w")
        os.utime(texts / "in.tar", (1_700_000_000, 1_700_000_000))
        packed(texts, texts / "out.tgz", "in.tar", mode="w:gz")

    write("text a")
    fs, files = resolve(source("tar://d::tar://in.tar::out.tgz", f"tar://d::tar://in.tar::{texts}/out.tgz"))
    assert len(files) == 10 and open_input(pickle.loads(pickle.dumps(fs)), files[0].path).read() == b"text a"
    write("text b")
    assert changed(fs, files[0]) is not None


@pytest.mark.parametrize("name", ["x.tar.zst", "x.tzst", "noend"])
def test_compression_is_told_by_what_is_in_the_file(texts: Path, name: str) -> None:
    """Not by its name."""
    plain = Path(packed(texts, texts / "x.tar", "d")).read_bytes()
    with pa.CompressedOutputStream(str(texts / name), "zstd") as out:
        out.write(plain)
    fs, files = resolve(source(f"tar://d::{texts / name}"))
    assert [open_input(fs, f.path).read() for f in files] == [f"text {n}".encode() for n in range(10)]
