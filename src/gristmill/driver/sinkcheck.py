"""Whether a run may write into a sink, before anything is read: what is there already, and whether source and sink were
given the wrong way round.
"""

from __future__ import annotations

import glob
import os

from gristmill.commit import generation as generations
from gristmill.commit import onefile
from gristmill.commit import publish as publishing
from gristmill.driver.apart import check_other
from gristmill.errors import BadJob
from gristmill.files.contract import Files
from gristmill.job.job import Sink, Source
from gristmill.job.snapshots import kind_of
from gristmill.job.uris import file_named, file_of, is_local, local_path, records_of, redact


def refuse(source: Source, sink: Sink, root: str, files: Files, *, manifest: bool) -> None:
    """Raises BadJob if a run may not write there. `manifest` is whether it would write one beside the rows."""
    if file_named(sink.uri) and file_of(root) is None:
        raise BadJob(f"sink {root}: is a folder, and this names one file: a folder of this name is {sink.uri}/")
    try:
        check_other(source, sink)
        if is_local(sink.uri) and _is_pattern(local_path(sink.uri)) and not files.holds(generations.meta(root)):
            _refuse_swapped(source, sink, "matches files")
        try:
            publishing.refuse_foreign(root, sink.overwrite, files, manifest=manifest)
            onefile.refuse_foreign(root, sink.overwrite)
        except BadJob:
            if files.holds(generations.meta(root)):  # a sink that somebody has changed
                raise
            one = file_named(sink.uri)
            _refuse_swapped(source, sink, "is a file that is there" if one else "has files of others in it")
            raise
    except OSError as e:
        raise BadJob(f"sink {sink.uri}: cannot be read ({e.strerror})") from e


def _is_pattern(path: str) -> bool:
    """Whether it matches files, and is no name of one itself."""
    return glob.has_magic(path) and not os.path.lexists(path) and bool(glob.glob(path, recursive=True))


def _refuse_swapped(source: Source, sink: Sink, there: str) -> None:
    """Raises BadJob if each source looks like a sink: nothing is there, or a result. The sink is none, as `there` says:
    to overwrite it, which is one way out else, would destroy a source.
    """
    if source.data is not None or not source.uri:
        return
    looks = [_like_a_sink(uri, source) for uri in source.uri]
    if all(looks):
        named = " and ".join(f"source {redact(uri)} {look}" for uri, look in zip(source.uri, looks, strict=True))
        raise BadJob(
            f"{named}, and sink {redact(sink.uri)} {there}: are they swapped? The source comes first, the sink last, "
            "and gristmill writes only where there is nothing of others"
        )


def _like_a_sink(uri: str, source: Source) -> str:
    """How a source looks like a sink; "" if it does not, or is not on this machine."""
    if not is_local(uri) or kind_of(uri, source) is not None or uri == "-":
        return ""
    path = local_path(uri)
    records = generations.meta(records_of(path) if file_named(path) else path)
    if os.path.isdir(records):
        return "is a result of gristmill"
    return "" if os.path.lexists(path) or glob.has_magic(path) else "is not there"
