"""That a run does not read what it writes: its own answers would be rows of the next run."""

from __future__ import annotations

import os

from gristmill.errors import BadJob
from gristmill.job.job import Sink, Source
from gristmill.job.secret import reveal
from gristmill.job.uris import file_named, is_local, local_path, records_of, redact
from gristmill.process.scratch import is_passing
from gristmill.sinks.contract import SinkFormat
from gristmill.sources import paths


def plain_path(uri: str) -> str:
    """An address as one place has it, whatever leads there."""
    return os.path.realpath(local_path(uri or ".")) if is_local(uri) else uri.rstrip("/")


def check_other(source: Source, sink: Sink) -> None:
    """Raises BadJob for a sink that is one file, and a file that the source names."""
    if file_named(sink.uri) and plain_path(sink.uri) in map(plain_path, source.uri):
        raise BadJob(f"sink {redact(sink.uri)} is the source itself, which it would replace: give another name")


class Apart:
    """A sink beside the source of its job. `met` is told what is found as the source is listed, and raises BadJob where
    a link, or a folder under a second name, would have the next run read this one's answers.
    """

    def __init__(self, source: Source, sink: Sink, form: SinkFormat) -> None:
        self._sink = sink
        self._below = plain_path(sink.uri)
        folders = [f"{column}=0" for column in sink.partition_by]
        stems = ["merged.g1"] if sink.merge else ["part-0000000.g1"]
        stems += ["merged-0000000.g1"] if sink.joins else []
        self._parts = ["/".join([self._below, *folders, stem + end]) for stem in stems for end in form.suffixes]
        if file_named(sink.uri):
            self._parts = [self._below]
        self._uris = [str(reveal(uri)) for uri in source.uri]
        self._real = [plain_path(uri) for uri in self._uris]
        self._named = [local_path(uri) for uri in self._uris if is_local(uri)]
        self._local = is_local(sink.uri) and bool(self._named)
        self._above = _identities(self._below) if self._local else {}

    def check(self) -> None:
        """Raises BadJob if the source itself would read the sink's parts: a folder, or a pattern."""
        if is_passing(self._below):
            return  # a preview, or a job that returns a table
        for uri, real in zip(self._uris, self._real, strict=True):
            if any(paths.reads(real, part) for part in self._parts):
                raise BadJob(
                    f"sink {redact(self._sink.uri)} is inside source {redact(uri)}, which would read it next time: "
                    "give a folder outside it, or one whose name starts with _"
                )

    def met(self, path: str, link: bool) -> None:
        """A folder of the source, or a `link` to a file or folder, which need not be there yet."""
        if not self._local or is_passing(self._below):
            return
        path = os.path.abspath(path)
        real = os.path.realpath(path) if link else self._same(path)
        if real is None or not self._leads_to_sink(path, real, link):
            return
        raise BadJob(
            f"sink {redact(self._sink.uri)} is found in the source as {path}, "
            f"{'a link to' if link else 'a folder that is also'} {real}, so that the next run would read its answers: "
            "take it out of the source, or give it a name that starts with _ or a dot, which is not read"
        )

    def _same(self, folder: str) -> str | None:
        """The sink's folder, or the one above it, that this is: the same under another name, as of a bind mount."""
        try:
            found = os.stat(folder)
        except OSError:
            return None
        return self._above.get((found.st_dev, found.st_ino)) if found.st_ino else None

    def _leads_to_sink(self, path: str, real: str, link: bool) -> bool:
        for part in self._parts:
            if _within(part, real) and any(paths.reads(uri, path + part[len(real) :]) for uri in self._named):
                return True
        if not link:
            return False
        if file_named(self._sink.uri):
            return _within(real, records_of(self._below))
        return real != self._below and _within(real, self._below)


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
