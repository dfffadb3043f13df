"""That a run does not read what it writes: its own answers would be rows of the next run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any
from urllib.parse import parse_qsl

from gristmill.errors import BadJob
from gristmill.job.job import JobSpec, Sink, Source
from gristmill.job.secret import reveal
from gristmill.job.snapshots import kind_of
from gristmill.job.uris import QUERY, file_named, is_local, local_path, records_of, redact, store_place
from gristmill.process.scratch import is_passing
from gristmill.sinks.contract import SinkFormat
from gristmill.sources import paths
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
    as they will be, one for each that a pattern may tell from the others. `inside` is where no link may lead, `server`
    what is said of the account or the endpoint.
    """

    shown: str
    below: str
    parts: tuple[str, ...]
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
        return Written(f"sink {redact(sink.uri)}", below, (below,), records_of(below))
    folders = [f"{column}=0" for column in sink.partition_by]
    stems = ["merged.g1"] if sink.merge else ["part-0000000.g1"]
    stems += ["merged-0000000.g1"] if sink.joins else []
    parts = ["/".join([below, *folders, stem + end]) for stem in stems for end in form.suffixes]
    return Written(f"sink {redact(sink.uri)}", below, tuple(parts), below, _server(sink.uri, sink.storage))


def _server(uri: str, storage: Mapping[str, Any]) -> str:
    """What an address in a store, or its options, say of the account or the endpoint; "" if it goes without saying."""
    if is_local(uri):
        return ""
    address, *query = QUERY.split(str(reveal(uri)), maxsplit=1)
    account = redact(address).partition("://")[2].partition("/")[0].partition("@")[2].partition(".")[0]
    said = {**reveal(storage), **dict(parse_qsl(query[0] if query else ""))}
    named = next((str(value) for name, value in said.items() if name in _SERVERS), "")
    return account or named.rpartition("://")[2].rstrip("/").lower()


def _others(job: JobSpec) -> Iterator[Written]:
    """What else a job writes on this machine: its deliveries there, its log, lineage and metrics."""
    for delivery in job.deliver:
        from gristmill.stores.delivery import files_of

        if (found := files_of(delivery)) is not None:
            below = os.path.realpath(found[0])
            part = os.path.join(below, found[1]) if found[1] else below
            yield Written(f"delivery {delivery.shown}", below, (part,), below)
    yield from _files(job)


def _files(job: JobSpec) -> Iterator[Written]:
    files = [("log", job.running.log)] if job.running.log else []
    files += [("lineage", reveal(one.to)) for one in job.lineage]
    files += [("metrics", reveal(one.to)) for one in job.metrics]
    for what, uri in files:
        if is_local(uri):
            yield Written(f"{what} {uri}", real := plain_path(uri), (real,), real)


def _refuse_read(source: Source, several: Iterable[Written]) -> None:
    uris = [str(reveal(uri)) for uri in source.uri]
    for written, uri in product(several, uris):
        real = plain_path(uri)
        if written.below == real and kind_of(uri, source) is not None:
            continue  # a table, read by its log; what may be brought there is for its store to say
        if written.server and (server := _server(uri, source.storage)) and server != written.server:
            continue  # another store, which has a container of the same name
        if any(paths.reads(real, part) or real == part for part in written.parts):
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
        own = _sink(job.sink, form)
        self._passing = is_passing(own.below)  # a preview, or a job that returns a table
        self._written = [] if self._passing else [own, *_others(job)]
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
        for part in written.parts:
            if _within(part, real) and any(paths.reads(uri, path + part[len(real) :]) for uri in self._named):
                return True
        return link and written.within(real)


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
