"""Sources in archives: read as the disk that they were made of, or refused where they are cut, damaged or written."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import stat
import subprocess
import tarfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.errors import BadSource, GristmillError, PlanChanged, SourceChanged
from gristmill.job.job import source
from gristmill.shards.sourcefiles import SourceFile
from gristmill.sources.formats import source_format
from gristmill.sources.paths import changed, look, mounted, open_input, resolve


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


def test_one_archive_by_several_names_is_read_once(texts: Path) -> None:
    """By a link to it, to its folder, or to that which it is in, and by a hard link; as plain files are."""
    (texts / "data").mkdir()
    archive = Path(packed(texts, texts / "data" / "x.tar", "d"))
    packed(texts / "data", texts / "data" / "out.tgz", "x.tar", mode="w:gz")
    os.symlink("data", texts / "latest")
    os.symlink("data/x.tar", texts / "l.tar")
    os.link(archive, texts / "h.tar")
    (texts / "copy.tar").write_bytes(archive.read_bytes())
    for other in ("latest/x.tar", "l.tar", "h.tar"):
        for rows in (False, True):  # names of hard links that are rows are rows of their own
            named = source(f"tar://d::{archive}", f"tar://::{texts}/{other}")
            files = resolve(named, whole=lambda path, rows=rows: rows)[1]
            each = 20 if other == "h.tar" and rows else 10
            assert len(files) == each and files[0].path == f"tar://d/0.txt::{archive}"
        one = (f"tar://d/1.txt::{archive}", f"tar://d/1.txt::{texts}/{other}")
        assert len(resolve(source(*one, format="csv"))[1]) == (2 if other == "h.tar" else 1)
    inner = "tar://::tar://x.tar::{}/out.tgz"
    assert len(resolve(source(*(inner.format(texts / f) for f in ("data", "latest")), format="csv"))[1]) == 10
    assert len(resolve(source(f"tar://::{archive}", f"tar://::{texts}/copy.tar", format="csv"))[1]) == 20


def test_an_archive_and_one_that_is_in_it(texts: Path) -> None:
    """In one source, in either order, and when what was read is compared."""
    (texts / "in").mkdir()
    (texts / "in" / "0.txt").write_text("inner")
    packed(texts / "in", texts / "d" / "in.tar", "0.txt")
    archive = packed(texts, texts / "x.tar", "d")
    addresses = [f"tar://d/0.txt::{archive}", f"tar://::tar://d/in.tar::{archive}"]
    for uris in (addresses, addresses[::-1]):
        fs, files = resolve(source(*uris))
        for storage in (fs, mounted([f.path for f in files], {})):
            texts_of = {f.path.count("::"): open_input(storage, f.path).read() for f in files}
            assert texts_of == {1: b"text 0", 2: b"inner"}


# ---------------------------------------------------------------- an archive that is replaced


def tables(archive: Path, value: int, kind: str) -> None:
    """An archive of seventy files of ten rows `id,v`, as long for each value."""
    folder = archive.parent / f"rows-{value}"
    folder.mkdir(exist_ok=True)
    for n in range(10, 80):
        (folder / f"{n}.csv").write_text("id,v\n" + "".join(f"{n}{m},{value}\n" for m in range(10)))
        os.utime(folder / f"{n}.csv", (1_700_000_000, 1_700_000_000))
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as out:
            for n in range(10, 80):
                out.write(folder / f"{n}.csv", f"{n}.csv")
    elif kind == "nested":
        packed(folder, archive.parent / "in.tar", *(f"{n}.csv" for n in range(10, 80)))
        os.utime(archive.parent / "in.tar", (1_700_000_000, 1_700_000_000))
        packed(archive.parent, archive, "in.tar", mode="w:gz")
    else:
        packed(folder, archive, *(f"{n}.csv" for n in range(10, 80)), mode=kind)


def replacing(batch: dict[str, list[int]]) -> dict[str, list[int]]:
    """A model during whose work the archive gets other rows."""
    archive = Path(os.environ["ARCHIVE"])
    next_ = archive.with_name("next")
    if 645 in list(batch["id"]) and next_.exists():
        until = time.monotonic() + 10
        while not any((archive.parent / "out").rglob("receipts/*")) and time.monotonic() < until:
            time.sleep(0.01)
        if os.environ["INPLACE"]:
            archive.write_bytes(next_.read_bytes())
            next_.unlink()
        else:
            os.replace(next_, archive)
    return {"y": batch["v"]}


@pytest.mark.parametrize(("kind", "inplace"), [("w", ""), ("nested", "1")])
def test_a_run_ends_when_its_archive_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, inplace: str
) -> None:
    """With SourceChanged: it does not go on with the new one, nor does the next run take it for the old one."""
    archive = tmp_path / "x"
    tables(archive, 1, kind)
    tables(tmp_path / "next", 3, kind)
    monkeypatch.setenv("ARCHIVE", str(archive))
    monkeypatch.setenv("INPLACE", inplace)
    uri = {"zip": "zip://", "nested": "tar://::tar://in.tar"}.get(kind, "tar://") + f"::{archive}"
    job = gm.Job(uri, replacing, gm.sink(str(tmp_path / "out"), keep=["id", "v"]), workers=0, shard_rows=10)
    with pytest.raises(SourceChanged, match="changed while the run was reading it"):
        job.run()
    with pytest.raises(PlanChanged, match="hold what shard"):
        job.run()


@pytest.mark.parametrize("kind", ["w", "w:gz", "zip", "nested"])
def test_whoever_has_an_archive_open_lists_it_again(tmp_path: Path, kind: str) -> None:
    """As soon as it is another: who listed it, who got that, and who was forked. One that is gone or damaged since it
    was listed has changed.
    """
    archive = tmp_path / "x"
    uri = {"zip": "zip://", "nested": "tar://::tar://in.tar"}.get(kind, "tar://") + f"::{archive}"
    tables(archive, 1, kind)
    fs, files = resolve(source(uri))
    other = pickle.loads(pickle.dumps(fs))
    before = [open_input(f, files[3].path) for f in (fs, other)]
    tables(tmp_path / "next", 2, kind)
    os.replace(tmp_path / "next", archive)
    for f, old in zip((fs, other), before, strict=True):
        assert b",2\n" in open_input(f, files[3].path).read() and b",1\n" in old.read()
        now = look(f, files[3])
        assert now.size == files[3].size and now.stamp != files[3].stamp and changed(f, now) is None
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    late = pickle.loads(pickle.dumps(fs))
    for f in (fs, other, late):
        with pytest.raises(SourceChanged, match="was written since it was listed"):
            open_input(f, files[3].path)
    archive.unlink()
    for f in (fs, late):
        with pytest.raises(SourceChanged, match="gone since it was listed"):
            open_input(f, files[3].path)
        with pytest.raises(SourceChanged, match="gone since it was listed"):
            look(f, files[3])
    with pytest.raises(BadSource, match="x: no such archive"):
        resolve(source(uri))


def test_a_fork_opens_the_archive_itself(tmp_path: Path) -> None:
    """Its parent's file has one position for both."""
    for n in range(2):
        (tmp_path / f"{n}.csv").write_bytes(b"%d" % n * 2_000_000)
    fs, files = resolve(source(f"tar://::{packed(tmp_path, tmp_path / 'x.tar', '0.csv', '1.csv')}"))

    def read(file: SourceFile) -> set[bytes]:
        return {open_input(fs, file.path).read().strip(file.path[6:7].encode()) for _ in range(20)}

    child = os.fork()
    if not child:
        os._exit(0 if read(files[1]) == {b""} else 1)
    assert read(files[0]) == {b""}
    assert os.waitpid(child, 0)[1] == 0


def test_a_store_is_asked_after_what_was_read_last(tmp_path: Path) -> None:
    """What it said of the archive a moment before does not count, though it does while nothing is read."""
    memory = fsspec.filesystem("memory")
    for n in (1, 2):
        tables(tmp_path / f"{n}.tar", n, "w")
    memory.pipe("/of/x.tar", (tmp_path / "1.tar").read_bytes())
    fs, files = resolve(source("tar://::memory://of/x.tar"))
    assert changed(fs, files[0]) is None
    memory.pipe("/of/x.tar", (tmp_path / "2.tar").read_bytes())
    open_input(fs, files[9].path).read()
    assert changed(fs, files[9]) is not None
    memory.rm("/of/x.tar")
    assert changed(fs, files[9]) is not None  # within the second


# ---------------------------------------------------------------- what is damaged, or others write


def test_a_tar_that_has_more_after_its_end(texts: Path) -> None:
    """Of zeros in its middle, or of two that are joined, the rest would not be found. What fills one up is none."""
    subprocess.run(["tar", "-cf", texts / "x.tar", "-C", texts, "d"], check=True)
    subprocess.run(["tar", "-cf", texts / "y.tar", "-C", texts / "d", "1.txt"], check=True)
    one, other = (texts / "x.tar").read_bytes(), (texts / "y.tar").read_bytes()
    end = 512 * 21
    for content in (one + other, gzip.compress(one) + gzip.compress(other), one[:2560] + bytes(512) + one[3072:]):
        (texts / "z.tar").write_bytes(content)
        with pytest.raises(BadSource, match=r"z.tar: is cut .* it ends after .* but more follows \(byte"):
            resolve(source(f"tar://::{texts}/z.tar"))
    for zeros in (512, 1024, 1536, len(one) - end, (1 << 20) - end):  # as others end it; tar -b 2048
        (texts / "z.tar").write_bytes(one[:end] + bytes(zeros))
        assert len(resolve(source(f"tar://::{texts}/z.tar"))[1]) == 10
    (texts / "z.tar").write_bytes(one[:end] + bytes(3 << 20))  # a download's, whose space was made beforehand
    with pytest.raises(BadSource, match=r"its last 3,145,728 bytes are zeros, after d/\d.txt: it has not come whole"):
        resolve(source(f"tar://::{texts}/z.tar"))


def test_ordinary_tars_of_gnu(texts: Path) -> None:
    """With a label, or with what incremental ones say of folders."""
    for options in (["-V", "backup"], ["-g", str(texts / "snap")]):
        subprocess.run(["tar", *options, "-cf", texts / "g.tar", "-C", texts, "d"], check=True)
        fs, files = resolve(source(f"tar://d::{texts}/g.tar"))
        assert [open_input(fs, f.path).read() for f in files] == [f"text {n}".encode() for n in range(10)]


def test_a_name_in_two_parts_where_gnu_has_times(tmp_path: Path) -> None:
    """As Go's tar wrote it before 1.8; both members are there."""
    with open(tmp_path / "go.tar", "wb") as out:
        for n, part in enumerate((b"p1", b"p2")):
            info = tarfile.TarInfo("a.csv")
            info.size = 5
            head = bytearray(info.tobuf(tarfile.GNU_FORMAT))
            head[345 : 345 + len(part)] = part
            head[148:156] = b" " * 8
            head[148:156] = b"%06o\0 " % sum(head)
            out.write(bytes(head) + f"id\n{n}\n".encode() + bytes(507))
        out.write(bytes(10240))
    fs, files = resolve(source(f"tar://::{tmp_path}/go.tar"))
    assert [open_input(fs, f.path).read() for f in files] == [b"id\n0\n", b"id\n1\n"]


def test_a_volume_of_several_is_told_as_such(texts: Path) -> None:
    """The second one, which begins in the middle of a file."""
    (texts / "d" / "large").write_bytes(b"x" * 300_000)
    volumes = [option for n in range(3) for option in ("-f", str(texts / f"v{n}.tar"))]
    subprocess.run(["tar", "-c", "-M", "-L", "150", *volumes, "-C", str(texts), "d"], check=True)
    with pytest.raises(BadSource, match=r"one of several volumes \(tar -M\): unpack them"):
        resolve(source(f"tar://::{texts}/v1.tar"))


def test_a_zip_made_on_windows(tmp_path: Path) -> None:
    """Its folders are folders, as unzip makes them; on other systems a backslash is part of a name."""
    with zipfile.ZipFile(tmp_path / "w.zip", "w") as out:
        for system, name in (
            (0, "data\\k=1\\a.csv"), (0, "data\\_old\\a.csv"), (0, "data\\empty\\"), (3, "data/b\\c.csv"),
        ):  # fmt: skip
            info = zipfile.ZipInfo(name)
            info.create_system = system
            out.writestr(info, "id\n1\n" if name.endswith("csv") else "")
    fs, files = resolve(source(f"zip://data::{tmp_path}/w.zip"))
    inner = [(f.path.removeprefix("zip://").partition("::")[0], f.folders) for f in files]
    assert inner == [("data/b\\c.csv", ""), ("data/k=1/a.csv", "k=1")]
    assert [open_input(fs, f.path).read() for f in files] == [b"id\n1\n"] * 2


def test_damage_is_told_as_such(texts: Path) -> None:
    """Whatever the library makes of it; and as the archive's, not as the disk's."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as out:
        for n in range(6):
            out.writestr(f"d/{n}.csv", f"{n}\n" * 40)
    (texts / "y.tar").write_bytes(Path(packed(texts, texts / "x.tar", "d")).read_bytes())
    chance = random.Random(1)
    for kind, good in (("zip", whole.getvalue()), ("tar", (texts / "x.tar").read_bytes())):
        for _ in range(300):
            bad, at = bytearray(good), chance.randrange(len(good))
            if chance.random() < 0.5:
                bad[at] ^= 1 << chance.randrange(8)
            else:
                bad[at : at + 4] = bytes(4)
            (texts / "bad").write_bytes(bad)
            try:
                fs, files = resolve(source(f"{kind}://::{texts}/bad", format="csv"))
                for file in files:
                    open_input(fs, file.path).read()
            except GristmillError as e:
                assert isinstance(e, BadSource) and "/bad: " in str(e)
    end = whole.getvalue().rindex(b"PK\5\6")
    for at, value, told in ((end + 19, 0x40, "is cut or damaged"), (end + 10, 7, "it lists 6 files, and says 7")):
        bad = bytearray(whole.getvalue())
        bad[at] = value
        (texts / "bad").write_bytes(bad)
        with pytest.raises(BadSource, match=told):
            fs, files = resolve(source(f"zip://::{texts}/bad"))
            open_input(fs, files[0].path)
    bad = bytearray(whole.getvalue())
    bad[bad.index(b"PK\1\2") + 46] = 0
    (texts / "bad").write_bytes(bad)
    with pytest.raises(BadSource, match="has a zero byte in it"):
        resolve(source(f"zip://::{texts}/bad"))


def test_an_encrypted_zip_is_not_called_damaged(texts: Path) -> None:
    """It is whole."""
    with zipfile.ZipFile(texts / "e.zip", "w") as out:
        out.writestr("d/1.csv", "id\n1\n")
    content = bytearray((texts / "e.zip").read_bytes())
    content[6] |= 1
    content[content.index(b"PK\1\2") + 8] |= 1
    (texts / "e.zip").write_bytes(content)
    fs, files = resolve(source(f"zip://::{texts}/e.zip"))
    with pytest.raises(BadSource, match=r"^zip://d/1.csv::/.*e.zip: is encrypted: unzip it"):
        open_input(fs, files[0].path)


@pytest.mark.parametrize("name", ["t.zip", "t.tar", "t.tar.gz", "t.tgz"])
def test_an_archive_named_as_a_file_is_told_by_its_address(tmp_path: Path, name: str) -> None:
    """Which says that all of it can be read; so does an address without an archive."""
    kind = "zip" if name == "t.zip" else "tar"
    (tmp_path / name).write_bytes(b"x")
    for uri, told in ((tmp_path / name, "an archive: as "), (f"{kind}://{tmp_path}/{name}", "names no archive: ")):
        with pytest.raises(BadSource, match=rf"{name}: {told}{kind}://::PATH"):
            named = source(uri)
            source_format(named, resolve(named)[1])
