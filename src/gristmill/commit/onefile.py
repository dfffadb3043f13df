"""A sink that is one file, `out.parquet`: its runs are in a hidden folder beside it, and the file is built from what
they published, in one step. Until then it holds the previous result.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gristmill.commit.documents import Live
from gristmill.commit.generation import decode_schema
from gristmill.commit.publication import published
from gristmill.errors import BadJob, CorruptStore
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL, META, LocalFiles, join, sha256_of
from gristmill.files.document import Document
from gristmill.job.uris import file_of
from gristmill.sinks.contract import SinkFormat, WorkFile
from gristmill.values import dataclass

Stamp = tuple[int, int]  # size and time of a file


@dataclass(frozen=True)
class Note(Document, what="note of a sink that is one file"):
    """The file as a run made it: digests of the published files that it is of, its own, and its stamp, the last of
    those that are ours.
    """

    of: tuple[str, ...] = ()
    sha256: str = ""
    stamps: tuple[Stamp, ...] = ()


def refuse_foreign(root: str, overwrite: bool) -> None:
    """Raises BadJob if the file is there and no run wrote it, or if it was changed since, unless `overwrite`."""
    file = file_of(root)
    if file is None or overwrite or not os.path.lexists(file) or _ours(file, _noted(root)):
        return
    raise BadJob(
        f"sink {file}: this file was not written by this sink's runs, or was changed since: move it away, give another "
        "name, or --overwrite (overwrite=True) to replace it"
    )


def settle(root: str, form: SinkFormat, options: Any, overwrite: bool, files: Files) -> None:
    """Bring the file up to date with what is published. Idempotent; the caller holds the sink's lease. Raises as
    `refuse_foreign`: somebody may have saved a file of that name while the run scored.
    """
    file = file_of(root)
    if file is None:
        return
    assert isinstance(files, LocalFiles), files  # an object store has no such sinks
    body = published(root)
    rows, noted = [f for f in body.live() if f.role == "rows"], _noted(root)
    if noted.of == _digests(rows) and _ours(file, replace(noted, stamps=noted.stamps[-1:])):
        return
    work = join(root, META, "onefile")
    files.remove_folder(work)  # left by a run that was killed here
    files.make_folder(work)
    for part in rows:
        if sha256_of(join(root, part.name)) != part.sha256:
            raise CorruptStore(
                f"{join(root, part.name)}: is not what was published, so that {file} cannot be made of it: run again "
                "with --restart --overwrite (restart=True, overwrite=True)"
            )
    if len(rows) == 1:  # a copy: people edit files in place
        made = join(work, secrets.token_hex(6))
        with open(join(root, rows[0].name), "rb") as source, files.create(made) as out:
            shutil.copyfileobj(source, out, 1 << 20)
            files.sync(out)
    else:  # what was appended and retried is in files of its own
        parts = [WorkFile(join(root, f.name), f.name, f.rows) for f in rows]
        schema = decode_schema(body.body.output_schema)
        (written,) = form.merge(files, work, parts, "whole", secrets.token_hex(6), schema, options)
        made = written.path
        if written.rows != sum(f.rows for f in rows):
            raise CorruptStore(f"{file}: {written.rows} rows were written of {sum(f.rows for f in rows)}")
    files.settle([made])
    digest = sha256_of(made)
    if len(rows) == 1 and digest != rows[0].sha256:
        raise CorruptStore(f"{file}: what was copied is not what was read: check the disk, then run again")
    refuse_foreign(root, overwrite)
    # Until it is replaced, the file as it is now is ours, too; one that is overwritten never becomes so.
    before = (_stamp(file),) if os.path.exists(file) and _ours(file, noted) else ()
    files.write_over(_note(root), Note(_digests(rows), digest, (*before, _stamp(made))).dump())
    _put(made, file, before, overwrite, files)
    files.settle([file])
    files.remove_folder(work)


def _put(made: str, file: str, before: tuple[Stamp, ...], overwrite: bool, files: LocalFiles) -> None:
    """Give the new file its name, unless one that is not ours has it. Raises BadJob."""
    if overwrite or (before and os.path.isfile(file) and _stamp(file) in before):
        return files.take_place(made, file)
    try:
        files.link(made, file)  # unlike a rename, replaces nothing
    except FileExistsError:
        raise BadJob(
            f"sink {file}: somebody wrote this file just now: move it away and run again, which makes the file of what "
            "is published, or --overwrite (overwrite=True) to replace it"
        ) from None
    files.remove(made)


def differs(root: str) -> str | None:
    """What is wrong with the file, as a line; None if it is what is published, or the sink is not a file."""
    file = file_of(root)
    if file is None:
        return None
    noted = _noted(root)
    if not os.path.isfile(file):
        return f"{file}: is missing: run the job again, which makes it of what is published"
    if noted.of != _digests([f for f in published(root).live() if f.role == "rows"]):
        return f"{file}: is not of the result that is published: run the job again"
    if sha256_of(file) != noted.sha256:
        return f"{file}: has another content than was published: move it away and run the job again"
    return None


def _ours(file: str, noted: Note) -> bool:
    """Whether a file is as a run wrote it. One that was copied or touched has another time, and the same content."""
    if not os.path.isfile(file):
        return False
    stamp, stamps = _stamp(file), noted.stamps
    same_size = bool(stamps) and stamp[0] == stamps[-1][0]
    return stamp in stamps or (same_size and sha256_of(file) == noted.sha256)


def _digests(rows: Sequence[Live]) -> tuple[str, ...]:
    return tuple(f.sha256 for f in rows)


def _note(root: str) -> str:
    return join(root, META, "onefile.json")


def _noted(root: str) -> Note:
    """What is known of the file. Nothing if the note is gone or damaged: then the file is anybody's."""
    try:
        return Note.load_from(_note(root), LOCAL)
    except (FileNotFoundError, CorruptStore):
        return Note()


def _stamp(path: str) -> Stamp:
    about = os.stat(path)
    return about.st_size, about.st_mtime_ns
