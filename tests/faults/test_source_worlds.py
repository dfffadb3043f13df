"""Which files of a source are read: random folders, links, sinks and addresses against the rules that users know."""

from __future__ import annotations

import fnmatch
import itertools
import json
import os
import random
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.fs as pafs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.driver import jobsource, publishing
from gristmill.errors import BadSource
from gristmill.job.job import source
from gristmill.sources import listing
from gristmill.sources.patterns import reads
from s3server import KEY, SECRET, S3Server

FOLDERS = ("a", "b", "c", "day=1", "day=2", "k=1", "lang=en", "_hid", ".dot", "x.tmp", "day=.tmp")
FILES = (
    "1.parquet",
    "2.parquet",
    "part-0000000.g1.parquet",
    "part-0000001.g2.parquet",
    "_note.parquet",
    "3.parquet.tmp",
)
LINKS = ("l1", "l2.parquet", "l3.parquet", "part-0000000.g7.parquet", "day=3", "k=2")
GLOBS = (
    "*",
    "*.parquet",
    "**/*.parquet",
    "**",
    "*/*",
    "[ab]/*",
    "day=*",
    "*=*/*",
    "part-*",
    "merged-*",
    "?.parquet",
    "**/part-*.g1.*",
)


@dataclass(frozen=True)
class Template:
    """A sink as runs leave it: its folder, the names of its parts, and of those of its result."""

    folder: Path
    written: frozenset[str]
    published: frozenset[str]


def same(batch: dict[str, Any]) -> dict[str, Any]:
    """Rows as they are."""
    return {"y": batch["id"]}


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> list[Template]:
    """Sinks: of one run, of a second one that was stopped as it published, by folders, without a result, updated."""
    at = tmp_path_factory.mktemp("templates")

    def score(sink: str, rows: Any, by: tuple[str, ...] = (), **verbs: Any) -> None:
        into = gm.sink(str(at / sink), keep=["id", "k"], partition_by=list(by))
        gm.Job(rows, same, into, workers=0, shard_rows=4).run(**verbs)

    def stopped(*arguments: Any, **verbs: Any) -> None:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(publishing.publish, "publish", lambda *_, **__: 1 / 0)
            score(*arguments, **verbs)

    def rows(low: int) -> pa.Table:
        return pa.table({"id": range(low, low + 8), "k": ["1", "2"] * 4})

    score("once", rows(0))
    for name, by in (("stopped", ()), ("parted", ("k",))):
        score(name, rows(0), by)
        stopped(name, rows(10), by, restart=True)
    stopped("never", rows(0))
    found = [Template(at / name, *_names(at / name)) for name in ("once", "stopped", "parted", "never")]
    assert [len(t.written) - len(t.published) for t in found] == [0, 2, 2, 2]
    return found


def _names(folder: Path) -> tuple[frozenset[str], frozenset[str]]:
    parts = (p for p in folder.rglob("*.parquet") if "_gristmill" not in p.parts)
    written = frozenset(str(p.relative_to(folder)) for p in parts)
    done = folder / "_SUCCESS"
    published = json.loads(done.read_text())["files"] if done.exists() else []
    return written, frozenset(file["name"] for file in published)


class World:
    """A folder with whatever people put into one, and what may be read of it."""

    def __init__(self, at: Path, templates: list[Template], seed: int, links: bool = True, hard: bool = True) -> None:
        self.hard = hard
        self.at, self.random, self.content = at, random.Random(seed), 0
        self.sinks: dict[str, Template] = {}
        at.mkdir()
        folders = [at]
        for _ in range(self.random.randint(1, 6)):
            folder = self.random.choice(folders) / self.random.choice(FOLDERS)
            if not folder.exists():
                folder.mkdir()
                folders.append(folder)
        for _ in range(self.random.randint(0, 2)):
            template, place = self.random.choice(templates), self.random.choice(folders) / self.random.choice("st")
            if not place.exists():
                shutil.copytree(template.folder, place)
                self.sinks[str(place)] = template
        for _ in range(self.random.randint(1, 6)):
            file = self.random.choice(folders) / self.random.choice(FILES)
            if not file.exists():
                self.content += 1
                file.write_bytes(b"x" * self.content)
        if links:
            self._linked(folders)

    def _linked(self, folders: list[Path]) -> None:
        # Not both in one world: which of three names is left depends on their order.
        hard = self.random.random() < 0.3 and self.hard
        for _ in range(self.random.randint(0, 4)):
            link = self.random.choice(folders) / self.random.choice(LINKS)
            inside = [p for p in sorted(self.at.rglob("*")) if "_gristmill" not in p.parts]
            to = self.random.choice(inside)
            if os.path.lexists(link) or (to.is_symlink() and not to.exists()):
                continue
            if to.is_dir() == ("." in link.name.removeprefix("day=.")):
                continue
            if hard and to.is_file() and not to.is_symlink():
                os.link(to, link)
            elif not hard:
                os.symlink(os.path.relpath(to, link.parent), link)

    def addresses(self) -> list[str]:
        """One to three addresses of what is there."""
        there = [p for p in sorted(self.at.rglob("*")) if "_gristmill" not in p.parts and p.exists()]
        folders = [self.at, *(p for p in there if p.is_dir())]
        found = []
        for _ in range(self.random.choice((1, 1, 2, 3))):
            kind = self.random.random()
            if kind < 0.5:
                found.append(str(self.random.choice(folders)))
            elif kind < 0.8:
                found.append(f"{self.random.choice(folders)}/{self.random.choice(GLOBS)}")
            else:
                found.append(str(self.random.choice(there)))
        return list(dict.fromkeys(found))

    # ------------------------------------------------------------ the rules

    def expected(self, uris: list[str]) -> set[tuple[int, frozenset[str]]] | str:
        """By inode and columns in folder names, each file that is read, once; or why the source is refused."""
        names: list[tuple[str, frozenset[str], bool]] = []
        for uri in uris:
            found = list(self.stands_for(uri))
            if not found:
                return "nothing"
            names += [(path, folders, path == uri) for path, folders in found]
        read = [name for name in names if self.is_read(name[0])]
        if not read or any(outright and not self.is_read(path) for path, _, outright in names):
            return "unpublished"
        return self.rows(read)

    def rows(self, names: list[tuple[str, frozenset[str], bool]]) -> set[tuple[int, frozenset[str]]]:
        """A file's rows have the columns of its folders: a link in fewer of them than another adds nothing, nor does a
        hard link in the same, and nothing what adds nothing to a name that adds nothing.
        """
        paths: dict[str, frozenset[str]] = {}
        for path, folders, _ in names:
            paths[path] = max(paths.get(path, frozenset()), folders, key=len)
        real: dict[str, set[frozenset[str]]] = {}
        for path, folders in paths.items():
            real.setdefault(os.path.realpath(path), set()).add(folders)
        inodes = {path: os.stat(path).st_ino for path in real}
        less = {(inodes[p], one) for p, sets in real.items() for one in sets for other in sets if one < other}
        return {(inodes[path], one) for path, sets in real.items() for one in sets} - less

    def is_read(self, path: str) -> bool:
        """Whether a name is of no part of a sink, or of a published one."""
        for one in (
            os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)),
            os.path.realpath(path),
        ):
            for root, template in self.sinks.items():
                name = os.path.relpath(one, root)
                if name in template.written:
                    return name in template.published
        return True

    def stands_for(self, uri: str) -> Iterator[tuple[str, frozenset[str]]]:
        """The names of files that an address stands for, with the folders `name=value` below what it names."""
        if os.path.isfile(uri):
            yield uri, frozenset()
            return
        if os.path.isdir(uri):
            for path in self.below(uri, ()):
                yield path, folders_of(path[len(uri) + 1 :])
            return
        fixed = uri[: re.search(r"[*?\[]", uri).start()].rpartition("/")[0]  # type: ignore[union-attr]
        seen = set()
        for path in self.matching(fixed, uri[len(fixed) + 1 :].split("/")):
            if path not in seen:
                seen.add(path)
                yield path, folders_of(path[len(fixed) + 1 :])

    def below(self, folder: str, above: tuple[str, ...]) -> Iterator[str]:
        """Files below a folder, without those that are hidden, and without going round in circles."""
        above = (*above, os.path.realpath(folder))
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            if os.path.isdir(path):
                hidden = "=" not in name and is_hidden(name)
                if not hidden and os.path.realpath(path) not in above:
                    yield from self.below(path, above)
            elif not is_hidden(name):
                yield path

    def matching(self, folder: str, pattern: list[str]) -> Iterator[str]:
        """Files that a pattern finds below a folder, and all below folders that it finds."""
        part, rest = pattern[0], pattern[1:]
        if part == "**":
            for path in self.below(folder, ()):
                parts = path[len(folder) + 1 :].split("/")
                wanted = rest or ["*"]
                # The rest may match the file itself, or a folder that it is in.
                for end in range(len(parts), 0, -1):
                    tail = parts[max(0, end - len(wanted)) : end]
                    if len(tail) == len(wanted) and all(map(fnmatch.fnmatchcase, tail, wanted)):
                        yield path
                        break
            return
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            path = os.path.join(folder, name)
            if not fnmatch.fnmatchcase(name, part) or (name[0] in "._" and "=" not in name and part[0] in "*?["):
                continue
            if part[-1] in "*?]" and name.endswith((".tmp", ".crc")) and ("=" not in name or not os.path.isdir(path)):
                continue
            if os.path.isdir(path):
                yield from self.matching(path, rest) if rest else self.below(path, ())
            elif not rest:
                yield path


def is_hidden(name: str) -> bool:
    """Whether a file is not read unless it is named."""
    return (name[0] in "._" and "=" not in name) or name.endswith((".tmp", ".crc"))


def folders_of(below: str) -> frozenset[str]:
    """The folders `name=value` in a path."""
    return frozenset(name for name in below.split("/")[:-1] if name.find("=") > 0)


def check(at: Path, templates: list[Template], seed: int, form: str = "disk", put: Any = None) -> None:
    """What is listed in a world of this seed is what the rules say; of a store, or an archive, as of a disk. `put`
    copies a folder to where addresses lead that its answer makes of paths.
    """
    world = World(at, templates, seed, links=form in ("disk", "tar", "tars"), hard=form != "tars")
    place = (put or PLACES[form])(at)

    def shown(path: str) -> str:
        return re.sub(r"//[^/@]*@", "//", place(path).partition("?")[0])

    for _ in range(6):
        uris = world.addresses()
        for uri in [uri for uri in uris if form in ("disk", "memory", "s3") and not os.path.isfile(uri)]:
            found, files = {path for path, _ in world.stands_for(uri)}, [p for p in at.rglob("*") if p.is_file()]
            wrong = [p for p in files if reads(place(uri), place(str(p))) != (str(p) in found)]
            assert not wrong, (seed, uri, wrong)
        wanted = world.expected(uris)
        try:
            there = [place(uri) for uri in uris]
            _, files, _, _ = jobsource.listed(source(*there, format="parquet"), frozenset(), None)
        except BadSource as e:
            assert isinstance(wanted, str), (seed, uris, wanted, str(e))
            continue
        names = {path: p for p in at.rglob("*") if p.is_file() for path in (place(str(p)), shown(str(p)))}
        # Those below a link to a folder are not among them.
        below = [re.sub(r"^\w+://", "", f.path.partition("::")[0]) for f in files]
        there = [names.get(f.path) or at / path for f, path in zip(files, below, strict=True)]
        columns = [frozenset(filter(None, f.folders.split("/"))) for f in files]
        got = [(os.stat(path).st_ino, found) for path, found in zip(there, columns, strict=True)]
        assert not isinstance(wanted, str) and Counter(got) == Counter(wanted), (
            f"{seed}: {uris}: missed {[show(world, w) for w in set(wanted) - set(got)]}, "
            f"more {[show(world, w) for w in set(got) - set(wanted)]}, twice {len(got) - len(set(got))}"
        )


def _in_memory(at: Path) -> Any:
    memory = fsspec.filesystem("memory")
    if memory.exists("/worlds"):
        memory.rm("/worlds", recursive=True)
    for file in filter(Path.is_file, at.rglob("*")):
        memory.pipe(f"/worlds/{file.relative_to(at)}", file.read_bytes())
    return lambda path: f"memory://worlds{path.removeprefix(str(at))}"


def _in_an_archive(at: Path) -> Any:
    packed = shutil.make_archive(f"{at}.packed", "zip", at)
    return lambda path: f"zip://{path.removeprefix(str(at)).lstrip('/')}::{packed}"


def _in_tar(at: Path) -> Any:
    """As `tar -C folder .` names members: with `./`."""
    with tarfile.open(f"{at}.tar", "w") as out:
        out.add(at, ".")
    return lambda path: f"tar://{path.removeprefix(str(at)).lstrip('/')}::{at}.tar"


def _in_tars(at: Path) -> Any:
    """One tar by two names."""
    place, names = _in_tar(at), itertools.cycle([f"{at}.tar", f"{at}.link.tar"])
    os.symlink(f"{at.name}.tar", f"{at}.link.tar")
    return lambda path: f"{place(path).partition('::')[0]}::{next(names)}"


PLACES: dict[str, Any] = {
    "disk": lambda at: lambda path: path,
    "memory": _in_memory,
    "zip": _in_an_archive,
    "tar": _in_tar,
    "tars": _in_tars,
}


def show(world: World, one: Any) -> Any:
    """Names of an inode, for a message."""
    if isinstance(one, str):
        return one
    return [
        str(p.relative_to(world.at)) for p in world.at.rglob("*") if p.exists() and os.stat(p).st_ino == one[0]
    ], one[1]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), form=st.sampled_from(sorted(PLACES)))
def test_what_is_listed_is_what_the_rules_say(
    templates: list[Template], tmp_path_factory: pytest.TempPathFactory, seed: int, form: str
) -> None:
    """Each file once, however it is named; of a sink what is published; nothing hidden; columns of its folders."""
    at = tmp_path_factory.mktemp("world") / "w"
    check(at, templates, seed, form)
    shutil.rmtree(at.parent)


@pytest.mark.long
def test_in_an_object_store(
    templates: list[Template], tmp_path: Path, weed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk: through pyarrow's own client, too."""
    monkeypatch.setattr(listing, "_GRAIN", 0)  # the times of files count for nothing here
    (tmp_path / "s3").mkdir()
    server = S3Server(weed, tmp_path / "s3")
    store = pafs.S3FileSystem(access_key=KEY, secret_key=SECRET, endpoint_override=server.address, scheme="http")

    def put(at: Path) -> Any:
        pafs.copy_files(str(at), f"box/{at.name}", destination_filesystem=store)
        options = f"?endpoint_override={server.address.replace(':', '%3A')}&scheme=http"
        return lambda path: f"s3://{KEY}:{SECRET}@box/{at.name}{path.removeprefix(str(at))}{options}"

    try:
        for seed in range(40):
            check(tmp_path / f"w{seed}", templates, seed, "s3", put)
    finally:
        server.stop()
