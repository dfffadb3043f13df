"""That a run does not read what it writes: its own answers would be rows of the next run."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from gristmill.driver import unwritten
from gristmill.driver.unwritten import ANYTHING, Name, number, text
from gristmill.errors import BadJob
from gristmill.files import roots
from gristmill.job.job import JobSpec, Sink, Source
from gristmill.job.secret import reveal
from gristmill.job.snapshots import kind_of
from gristmill.job.uris import QUERY, file_named, is_address, is_local, local_path, records_of, redact, store_place
from gristmill.process.scratch import is_passing
from gristmill.result.published import LETTERS, Published
from gristmill.sinks.contract import SinkFormat
from gristmill.values import dataclass

_SERVERS = ("endpoint_override", "endpoint_url", "endpoint", "aws_endpoint", "aws_endpoint_url", "account_name")


def plain_path(uri: str) -> str:
    """An address as one place has it, whatever leads there."""
    return os.path.realpath(local_path(uri or ".")) if is_local(uri) else store_place(uri)


def check_files(job: JobSpec) -> None:
    """Raises BadJob for a log, lineage or metrics that the source would read: before any of them is made."""
    _refuse_read(job.source, _files(job))


def check_other(source: Source, sink: Sink) -> None:
    """Raises BadJob for a sink that is one file, and a file that the source names."""
    if file_named(sink.uri) and plain_path(sink.uri) in map(plain_path, source.uri):
        raise BadJob(f"sink {redact(sink.uri)} is the source itself, which it would replace: give another name")


@dataclass(frozen=True)
class Written:
    """Something that a run writes: what it is to people, where it is (as `plain_path` has it), and paths of files there
    as they will be: of a file that is there itself an empty one. `inside` is where no link may lead, `server` what is
    said of the account or the endpoint.
    """

    shown: str
    below: str
    parts: tuple[tuple[Name, ...], ...]
    inside: str
    server: str = ""

    @property
    def local(self) -> bool:
        """Whether it is on this machine."""
        return os.path.isabs(self.below)

    def within(self, real: str) -> bool:
        """Whether a path is in what is written, and not all of it."""
        return real != self.below and _within(real, self.inside)


def _sink(sink: Sink, form: SinkFormat) -> Written:
    below = plain_path(sink.uri)
    if file_named(sink.uri):
        return Written(f"sink {redact(sink.uri)}", below, ((),), records_of(below))
    parts: list[tuple[Name, ...]] = [(text(LETTERS), _part("part-", 7, ".jsonl"))]
    folders = _partitions(sink.partition_by)
    stems = [("merged", 0)] if sink.merge else [("part-", 7)]
    stems += [("merged-", 7)] if sink.joins else []
    parts += [(*folders, _part(stem, digits, end)) for stem, digits in stems for end in form.suffixes]
    return Written(f"sink {redact(sink.uri)}", below, tuple(parts), below, _server(sink.uri, sink.storage))


def _part(stem: str, digits: int, end: str) -> Name:
    return (*text(stem), *(number(digits) if digits else ()), *text(".g"), *number(1), *text(end))


def _partitions(columns: Iterable[str]) -> list[Name]:
    """The folders of a sink that is partitioned by these columns, of any values."""
    from gristmill.sinks.partition import folder_name

    return [(*text(folder_name({column: "x"})[:-1]), *ANYTHING) for column in columns]


def _server(uri: str, storage: Mapping[str, Any]) -> str:
    """What an address in a store, or its options, say of the account or the endpoint; "" if it goes without saying."""
    if is_local(uri):
        return ""
    address, *query = QUERY.split(str(reveal(uri)), maxsplit=1)
    account = redact(address).partition("://")[2].partition("/")[0].partition("@")[2].partition(".")[0]
    said = {**reveal(storage), **dict(parse_qsl(query[0] if query else ""))}
    named = next((str(value) for name, value in said.items() if name in _SERVERS), "")
    return account or named.rpartition("://")[2].rstrip("/").lower()


def _one_server(one: str, other: str) -> bool:
    """Whether two endpoints are one, as far as that is known: its address beside a name of it, or a name beside a
    longer one. Of other names that lead to one address each may be another store.
    """
    try:
        (host, *rest), (name, *others) = sorted(map(_endpoint, (one, other)), key=lambda found: len(found[0]))
    except ValueError:  # no endpoint; who opens it says so
        return one == other
    if rest != others or host == name:
        return rest == others
    known = name.startswith(f"{host}.") or is_address(host) or is_address(name)
    return known and not _addresses(host).isdisjoint(_addresses(name))


def _endpoint(server: str) -> tuple[str, str, str]:
    found = urlsplit(f"//{server}")
    port = found.netloc.rpartition("@")[2].removeprefix(f"[{found.hostname}]").partition(":")[2]
    return found.hostname or "", "" if port in ("80", "443") else port, found.path


def _addresses(host: str) -> set[Any]:
    try:
        return {found[4][0] for found in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):  # unknown here, or no name
        return set()


def _others(job: JobSpec) -> Iterator[Written]:
    """What else a job writes on this machine: its deliveries there, its log, lineage and metrics."""
    for delivery in job.deliver:
        from gristmill.stores.delivery import files_of

        if (found := files_of(delivery)) is not None:
            below = os.path.realpath(found[0])
            part = tuple(map(text, found[1].split("/"))) if found[1] else ()
            yield Written(f"delivery {delivery.shown}", below, (part,), below)
    yield from _files(job)


def _files(job: JobSpec) -> Iterator[Written]:
    files = [("log", job.running.log)] if job.running.log else []
    files += [("lineage", reveal(one.to)) for one in job.lineage]
    files += [("metrics", reveal(one.to)) for one in job.metrics]
    for what, uri in files:
        if is_local(uri):
            yield Written(f"{what} {uri}", real := plain_path(uri), ((),), real)


def _refuse_read(source: Source, several: Iterable[Written]) -> None:
    uris = [str(reveal(uri)) for uri in source.uri]
    for written, uri in product(several, uris):
        real = plain_path(uri)
        if written.below == real and kind_of(uri, source) is not None:
            continue  # a table, read by its log; what may be brought there is for its store to say
        if any(unwritten.read(real, written.below, part) for part in written.parts):
            server = _server(uri, source.storage) if written.server else ""
            if server and not _one_server(server, written.server):
                continue  # another store, which has a container of the same name; `found` looks whether it is
            raise BadJob(
                f"{written.shown} is inside source {redact(uri)}, which would read it next time: give a folder outside "
                "it, or one whose name starts with _"
            )


class Apart:
    """What a job writes beside its source. `met` is told what is found as the source is listed, and raises BadJob where
    a link, or a folder under a second name, would have the next run read this one's answers, and for a folder whose
    files are not all its rows.
    """

    def __init__(self, job: JobSpec, form: SinkFormat) -> None:
        assert job.sink is not None
        self._sink, self._own = job.sink, _sink(job.sink, form)
        self._passing = is_passing(self._own.below)  # a preview, or a job that returns a table
        self._written = [] if self._passing else [self._own, *_others(job)]
        self._source = job.source
        self._named = [local_path(uri) for uri in map(reveal, job.source.uri) if is_local(uri)]
        self._above = {w: _identities(w.below) for w in self._written if w.local and self._named}

    def check(self) -> None:
        """Raises BadJob if the source itself would read what is written: a folder, a pattern, or the file's name."""
        _refuse_read(self._source, self._written)

    def met(self, path: str, link: bool) -> None:
        """A folder of the source, or a `link` to a file or folder, which need not be there yet."""
        path = os.path.abspath(path)
        for written, above in self._above.items():
            real = os.path.realpath(path) if link else _same(path, above)
            if real is not None and self._leads_to(written, path, real, link):
                raise BadJob(
                    f"{written.shown} is found in the source as {path}, "
                    f"{'a link to' if link else 'a folder that is also'} {real}, so that the next run would read what "
                    "this one writes: take it out of the source, or give it a name that starts with _ or a dot, which "
                    "is not read"
                )

    def _leads_to(self, written: Written, path: str, real: str, link: bool) -> bool:
        if _within(written.below, real):
            below = os.path.join(path, written.below[len(real) :].strip("/")).rstrip("/")
            if any(unwritten.read(uri, below, part) for uri, part in product(self._named, written.parts)):
                return True
        return link and written.within(real)

    def found(self, sinks: Iterable[Published]) -> None:
        """Sinks that files of the source are of, once it is listed. Raises BadJob if the job's own is among them, under
        whatever address; a copy of it is another, which stays as it is.
        """
        for sink in () if self._passing else sinks:
            if self._is_own(sink):
                raise BadJob(
                    f"{self._own.shown} is found in the source as {sink.shown}, so that its own answers would be rows "
                    "of the next run: give a source that leaves it out, or a folder outside the source, or one whose "
                    "name starts with _"
                )

    def _is_own(self, sink: Published) -> bool:
        if sink.mount.suffix or self._own.local != (not sink.mount.prefix):
            return False  # in an archive, or elsewhere
        if self._own.local:
            try:
                return os.path.samefile(sink.root or "/", self._own.inside)
            except OSError:  # nothing is there yet
                return False
        return store_place(sink.shown) == self._own.below and sink.is_at(
            *roots.opened(self._sink.uri, self._sink.storage)
        )


def _same(folder: str, above: Mapping[tuple[int, int], str]) -> str | None:
    """What is written, or the folder above it, that this is: the same under another name, as of a bind mount."""
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return above.get((found.st_dev, found.st_ino)) if found.st_ino else None


def _identities(path: str) -> dict[tuple[int, int], str]:
    """A folder and those above it, as far as they are there, by what identifies them."""
    found: dict[tuple[int, int], str] = {}
    while True:
        try:
            told = os.stat(path)
            if told.st_ino:
                found.setdefault((told.st_dev, told.st_ino), path)
        except OSError:
            pass  # not made yet
        if path == (path := os.path.dirname(path)):
            return found


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(os.path.join(folder, ""))
