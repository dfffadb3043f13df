"""The members of an archive, tar or zip, by the names that they have on a disk."""

from __future__ import annotations

import lzma
import posixpath
import re
import shutil
import stat
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

from gristmill.errors import BadSource
from gristmill.values import dataclass

AHEAD = 1 << 20  # bytes of an archive that are read at once
_FOLLOWED = 40  # links, one after the other, as Linux does
_HELD = 64 << 20  # bytes of a member of a zip that are unpacked in memory, not to a file
_BLOCK = 512  # bytes of a tar, as POSIX has it: at its end there are two that are zeros
_RECORDS = 2 << 20  # bytes that a tar is filled up to a multiple of, with zeros, at most (tar -b)
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
# GNU's types of members: a folder with a list of what is in it, the archive's name, what goes on from another volume.
_FOLDER, _LABEL, _CONTINUED = b"D", b"V", b"M"
_TIMES = re.compile(r"[0-7]{11}.*|[^\0-\x7f].*", re.DOTALL)  # in octal digits, or a number of more bits
_GNU = b"ustar  \0"
_WINDOWS = (0, 10, 11, 14)  # systems whose names in a zip may have backslashes: FAT and NTFS
_ENTRIES, _COUNTED = 4, 1 << 16  # where zipfile has how many members there are, of which some writers tell the rest
_ENCRYPTED = 1  # a flag of a zip's member


class Damaged(Exception):
    """What is not as it must be in an archive."""


DAMAGE = (
    Damaged, tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, IndexError,
    NotImplementedError, OverflowError, RuntimeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class Member:
    """A file of an archive, or a link: `to` where a symbolic one leads. Names of one file have one `place`; `raw` is
    what the library knows it by, None for what is no file.
    """

    size: int
    stamp: str
    place: int
    to: str | None
    raw: Any


class Members:
    """What is in an archive of a kind, which is read from `file`. `./a` and `/a` are `a` there, of two members of one
    name the last counts, and links lead where they do on a disk. `address` is what people call a member. Raises what is
    DAMAGE, and BadSource.
    """

    def __init__(self, kind: str, file: Any, address: Callable[[str], str]) -> None:
        self._address = address
        self._found: dict[str, Member | dict[str, None]] = {"": {}}  # a folder is a dict of the names in it
        self._hard: dict[int, int] = {}  # by the place of a member the number of hard links to it
        self._library: Any = self._tar(file) if kind == "tar" else self._zip(file)

    def at(self, path: str) -> tuple[str, Member | dict[str, None] | None]:
        """What a path leads to, and its own name."""
        real = self.followed(path)
        return ("", None) if real is None else (real, self._found.get(real))

    def links(self, member: Member) -> int:
        """How many names a member has, without symbolic links."""
        return 1 + self._hard.get(member.place, 0)

    def followed(self, path: str) -> str | None:
        """The member that a path leads to, through links; None if they lead nowhere, or out of the archive."""
        left, at, links = path.strip("/").split("/"), "", 0
        while left:
            name = left.pop(0)
            if name in ("", "."):
                continue
            if name == "..":
                if not at:
                    return None
                at = posixpath.dirname(at)
                continue
            found = self._found.get(below(at, name))
            if isinstance(found, Member) and found.to is not None:
                links += 1
                if found.to.startswith("/") or links > _FOLLOWED:
                    return None
                left = [*found.to.split("/"), *left]
            else:
                at = below(at, name)
        return at

    def open(self, member: Member) -> Any:
        """The content of a member, which can be read from anywhere, as a file of Python's."""
        if isinstance(self._library, tarfile.TarFile):
            return self._library.extractfile(member.raw)
        if member.raw.flag_bits & _ENCRYPTED:
            raise BadSource(f"{self._address(member.raw.filename)}: is encrypted: unzip it, and name the folder")
        content = self._library.open(member.raw)
        if member.raw.compress_type == zipfile.ZIP_STORED:
            return content
        out = tempfile.SpooledTemporaryFile(_HELD)  # noqa: SIM115 - as long as who reads it
        shutil.copyfileobj(content, out, AHEAD)  # of what is compressed, each step back would begin anew
        out.seek(0)
        return out

    # ------------------------------------------------ what the archive says

    def _tar(self, file: Any) -> Any:
        file.seek(0)
        start = file.read(6)
        file.seek(0)
        codec = next((codec for magic, codec in _COMPRESSED.items() if start.startswith(magic)), None)
        if codec is not None:
            file = _whole(file, codec)
        tar = tarfile.TarFile(fileobj=file, tarinfo=_Info)
        last = "at its beginning"
        for raw in tar:
            if raw.type == _LABEL:
                continue
            if raw.type == _CONTINUED:
                raise Damaged("it is one of several volumes (tar -M): unpack them")
            path, last = _plain(raw.name), f"after {raw.name}"
            if raw.islnk():
                self._put(path, self._linked(path, raw.linkname))
            elif raw.isdir() or raw.type == _FOLDER:
                self._put(path, None)
            else:
                to, of = (raw.linkname if raw.issym() else None), raw if raw.isfile() or raw.issym() else None
                self._put(path, Member(raw.size, str(raw.mtime), raw.offset, to, of))
        _refuse_unended(file, tar.offset, last, codec is None)
        return tar

    def _zip(self, file: Any) -> Any:
        packed = zipfile.ZipFile(file)
        told, has = zipfile._EndRecData(file)[_ENTRIES], len(packed.infolist())  # type: ignore[attr-defined]
        if (told - has) % _COUNTED:
            raise Damaged(f"it lists {has:,} files, and says {told:,}")
        for raw in packed.infolist():
            name = raw.filename
            if "\0" in raw.orig_filename:
                raise Damaged(f"the name {raw.orig_filename!r} has a zero byte in it")
            if raw.create_system in _WINDOWS and "/" not in name:  # as unzip does
                name = name.replace("\\", "/")
            folder, link = name.endswith("/"), stat.S_ISLNK(raw.external_attr >> 16)
            to = packed.read(raw).decode("utf-8", "surrogateescape") if link else None
            member = Member(raw.file_size, f"{raw.CRC:08x}", raw.header_offset, to, raw)
            self._put(_plain(name), None if folder else member)
        return packed

    def _linked(self, path: str, to: str) -> Member:
        """The member that a hard link is another name of, which comes before it."""
        target = self._found.get(_plain(to))
        if not isinstance(target, Member):
            raise BadSource(f"{self._address(path)}: a link to {to}, which the archive does not have before it")
        self._hard[target.place] = self._hard.get(target.place, 0) + 1
        return target

    def _put(self, path: str, member: Member | None) -> None:
        """Puts a member, or a folder, into the folders above it, which may have no members of their own."""
        if member is not None and not path:
            raise Damaged("it has a file without a name")
        if member is not None:
            self._found[path] = member
        elif not isinstance(self._found.get(path), dict):
            self._found[path] = {}
        while path:
            folder, _, name = path.rpartition("/")
            above = self._found.setdefault(folder, {})
            if not isinstance(above, dict):
                raise BadSource(
                    f"{self._address(path)}: is below {folder}, which is no folder in this archive: unpack it"
                )
            if name in above:
                return
            above[name] = None
            path = folder


class _Info(tarfile.TarInfo):
    """A member of a tar. GNU's format has times where others have the first part of a long name (`tar -g`), and some
    writers have that there, too (Go's, before 1.8).
    """

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> _Info:
        info = super().frombuf(buf, encoding, errors)
        if buf[257:265] == _GNU:
            times = bytes(buf[345:500]).partition(b"\0")[0].decode(encoding, errors)
            if _TIMES.fullmatch(times):
                info.name = info.name.removeprefix(f"{times}/")
        return info


def _refuse_unended(file: Any, at: int, last: str, plain: bool) -> None:
    """Raises Damaged if a tar has no end at this place, or something after it: tarfile, as tar itself, takes a first
    block of zeros for the end, also one in the middle.
    """
    file.seek(at)
    if file.read(_BLOCK) != bytes(_BLOCK):
        raise Damaged(f"it has no end {last} (byte {at:,})")
    size = at + _BLOCK
    while data := file.read(AHEAD):
        if rest := data.lstrip(b"\0"):
            more = size + len(data) - len(rest)
            raise Damaged(
                f"it ends {last} (byte {at:,}), but more follows (byte {more:,}): zeros are in its middle; or, if "
                "these are several archives in one file, as cat makes them, name each of them or unpack it (tar -xif)"
            )
        size += len(data)
    zeros = size - at - 2 * _BLOCK
    filled = range(_BLOCK * max(1, -(-zeros // _BLOCK)), _RECORDS + 1, _BLOCK)
    if plain and zeros > tarfile.RECORDSIZE and not any(size % record == 0 for record in filled):
        raise Damaged(
            f"its last {size - at:,} bytes are zeros, {last}: it has not come whole; if it has, unpack it (tar -xf)"
        )


def _whole(file: Any, codec: str) -> Any:
    """What a compressed file holds, in a file without a name: it is read from many places."""
    import bz2
    import gzip

    import pyarrow as pa

    out = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the members
    openers: dict[str, Any] = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}
    try:
        content = openers[codec](file) if codec in openers else pa.CompressedInputStream(pa.PythonFile(file), codec)
        with content:
            shutil.copyfileobj(content, out, AHEAD)
    except OSError as e:
        if e.errno is not None:  # the disk's, or the store's
            raise
        raise Damaged(str(e)) from e
    out.seek(0)
    return out


def _plain(name: str) -> str:
    """A member's path, as tar and unzip write it: without `./`, a slash or `../` before it."""
    path = posixpath.normpath(name).lstrip("/")
    while path.startswith("../"):
        path = path[3:]
    return "" if path in (".", "..") else path


def below(folder: str, name: str) -> str:
    """The path of a name in a folder, of which the archive itself has none."""
    return f"{folder}/{name}" if folder else name
