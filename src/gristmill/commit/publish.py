"""Publishing: linking committed parts to their visible names, creating the publication, and removing what it replaces.
Every step here is idempotent, and safe when two drivers do it at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.commit import publication
from gristmill.commit import receipt as receipts
from gristmill.commit.documents import Indexed, Live, ResultRecord, Settled
from gristmill.commit.generation import Generation, generations, meta, pending
from gristmill.commit.live import LiveFiles
from gristmill.commit.publication import SUCCESS, Publication
from gristmill.commit.receipt import Receipt
from gristmill.errors import BadJob, CorruptStore, RunFailed
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL, META, join, sizes_of
from gristmill.sinks.formats import sink_format

MANIFEST = "manifest.parquet"
LISTED = pa.schema([("input_path", pa.string()), ("output_path", pa.string()), ("rows", pa.int64())])
SETTLED = "settled.json"
EXTRAS = ("_index", "_reduced")  # folders of the files that are made of the rows of a result


def link_parts(files: Files, generation: Generation, parts: LiveFiles) -> None:
    """Give every committed part its visible name. A name that already has the same content is fine; other content is an
    error.
    """
    root, folders = generation.root, {""}

    def link(part: tuple[str, str, int, str]) -> None:
        name, work, size, digest = part
        folders.add(name.rpartition("/")[0])
        _link(files, join(root, work), join(root, name), size, digest)

    for _ in files.map(link, parts.tuples("name", "work", "bytes", "sha256")):
        pass
    files.settle([join(root, f"{folder}/{SUCCESS}".lstrip("/")) for folder in sorted(folders)])  # a name of each


def _link(files: Files, work: str, target: str, size: int, sha256: str) -> None:
    try:
        files.link(work, target)
    except FileExistsError:
        if not files.same(target, work, size, sha256):
            raise RunFailed(
                f"{target}: a file that this run did not write has this name: move it away and run again"
            ) from None
    except FileNotFoundError:
        # Already published and the work file cleaned up, or lost.
        if not files.same(target, work, size, sha256):
            raise CorruptStore(
                f"{work}: committed, but the file is gone: run again with --restart (restart=True)"
            ) from None


def put_back(root: str, files: Files) -> list[str]:
    """Restore visible files of the published result that have been removed or truncated, if their rows are still kept.
    Lists folders and opens nothing. Raises CorruptStore if they are not kept, except for what can be made again of the
    rows, by a job that asks for it: an index, and what was reduced. Returns the restored names.
    """
    result = publication.published(root, files)
    live = result.live().but("manifest", "dead")  # readers may clear away dead letters
    whole = list(files.as_long(root, live.tuples("name", "bytes")))
    wrong = [] if all(whole) else [f for f, same in zip(live, whole, strict=True) if not same]
    there = sizes_of(root, {f.name for f in wrong}, files)
    kept = sizes_of(root, {f.work for f in wrong}, files)
    made_again = {f.name for f in wrong if f.role in ("index", "reduced") and kept.get(f.work) != f.bytes}
    wrong = [f for f in wrong if f.name not in made_again]
    for f in wrong:
        if kept.get(f.work) != f.bytes:
            what = wrong_size(there.get(f.name), f.bytes)
            raise CorruptStore(
                f"{root}: {f.name} is published, but {what}: put it back, or score all rows again with --restart "
                f"(restart=True); gristmill verify {root} lists everything that is wrong"
            )
    for f in wrong:
        files.remove(join(root, f.name))
        files.link(join(root, f.work), join(root, f.name))
    files.settle([join(root, f.name) for f in wrong])
    return [f.name for f in wrong]


def wrong_size(there: int | None, published: int) -> str:
    """What is wrong with a file of so many bytes, or with one that is gone, of which so many were published."""
    if there is None:
        return "the file is gone"
    of = f"bytes, and {published:,} were published" if there > published else f"of its {published:,} bytes"
    return f"has {there:,} {of}"


def publish(generation: Generation, about: ResultRecord, live: LiveFiles, index: Indexed | None = None) -> Publication:
    """Make this generation the sink's result, unless it already is. Raises SinkBusy if another one was quicker."""
    made = publication.create(generation, about, live, index)
    settle(generation.root, generation.files)
    return made


def settle(root: str, files: Files) -> None:
    """Finish a publication, even one whose driver was stopped midway: point `_SUCCESS` at it, and remove visible names
    that are not part of it and files that can no longer have readers.
    """
    newest = publication.mark(root, files)
    if newest is None:
        return
    if not sink_format(newest.body.sink_format).tables:
        _keep_manifest(root, files)
    if (settled := _settled(newest)) == newest.number:
        return
    live = newest.live()
    before = publication.load(root, newest.before, files)
    between = [publication.load(root, n, files) for n in range(max(settled, 1), newest.number)]
    _retire(newest, live, before, between)
    if _superseded(newest):
        return
    _forget(newest, live, before)
    files.write_over(join(meta(root), SETTLED), Settled(newest.number, newest.generation).dump())


def leftover(newest: Publication) -> set[str]:
    """Visible names of earlier results that the next run removes, as one was stopped right after it had published."""
    if (settled := _settled(newest)) == newest.number:
        return set()
    between = [publication.load(newest.root, n, newest.files) for n in range(max(settled, 1), newest.number)]
    live = newest.live()
    names = {name for (name,) in live.tuples("name")}
    return {f.name for p in between for f in _readable(p)} - names | {*_unlisted(newest, live)}


def _superseded(newest: Publication) -> bool:
    """Whether there is a later publication, which settles itself. It is asked after everything that would be removed
    was found, as a driver may be suspended for hours anywhere: what was found since may be the later one's.
    """
    return publication.published(newest.root, newest.files).number != newest.number


def _settled(newest: Publication) -> int:
    """The last publication that was settled, according to the note about it; 0 if that is lost."""
    try:
        noted = Settled.load_from(join(meta(newest.root), SETTLED), newest.files)
        last = noted.publication, noted.generation
    except (FileNotFoundError, CorruptStore):
        return 0
    # Publications may have been lost, and their numbers reused.
    return last[0] if last[0] < newest.number or last == (newest.number, newest.generation) else 0


def give_up(latest: Publication) -> Publication:
    """Give up what was begun on top of the latest publication and is unfinished: it can no longer be published, whoever
    still works on it, and its files in the sink are removed. Returns the publication to build on, of the same result.
    """
    made = publication.again(latest)
    with contextlib.suppress(CorruptStore):  # if the result cannot be read, --restart replaces it and settles then
        settle(latest.root, latest.files)
    return made


def sweep(root: str, files: Files) -> None:
    """Remove visible files that a run linked which was stopped before it published them. The same result is published
    once more, so that this run, if it was only suspended, cannot publish them any more; not where an unfinished
    generation would be given up by it, whose publication removes them, too. Raises SinkBusy if another run publishes.
    """
    newest = publication.published(root, files)
    begun = pending(generations(root, files), newest.number)
    if begun is None and _unlisted(newest, newest.live()):
        give_up(newest)


def linked(generation: Generation, latest: Publication) -> bool:
    """Whether files of an unfinished generation are visible in the sink: a run was stopped just before it published."""
    strange = set(strangers(generation.root, {name for (name,) in latest.live().tuples("name")}, generation.files))
    return bool(strange) and not strange.isdisjoint(committed(generation))


def hide(generation: Generation, latest: Publication | None) -> None:
    """Remove visible files that a run of an unfinished generation had linked when it was stopped, before it published:
    its work files stay.
    """
    names = set[str]() if latest is None else {name for (name,) in latest.live().tuples("name")}
    visible = [join(generation.root, name) for name in committed(generation) if name not in names]
    _each(generation.files, generation.files.remove, visible)
    _gone(generation.files, visible)


# ---------------------------------------------------------------- what a publication replaces


def _retire(
    newest: Publication, live: LiveFiles, before: Publication | None, between: Sequence[Publication | None]
) -> None:
    """Remove the visible names of results since the last settled one, unless they are in this one. Files of the
    previous result stay readable as work files until the next publication, for those still reading it.
    """
    files, root = newest.files, newest.root
    names = {name for (name,) in live.tuples("name")} if between else set[str]()
    read = set[str]() if files.free_links else {f.work for f in _readable(before)}
    gone = {f.name: f for p in between for f in _readable(p) if f.name not in names}
    missing = any(p is None for p in between)
    found = {*(_of_lost(newest, names) if missing else ()), *_unlisted(newest, live)} - gone.keys()
    if _superseded(newest):
        return

    def retire(f: Live) -> None:
        visible = join(root, f.name)
        if not files.free_links and f.work in read:
            _copied_back(files, visible, join(root, f.work))
        files.remove(visible)

    _each(files, retire, list(gone.values()))
    _each(files, files.remove, [join(root, name) for name in sorted(found)])
    _gone(files, [join(root, name) for name in (*gone, *sorted(found))])


def _unlisted(newest: Publication, live: LiveFiles) -> list[str]:
    """Visible index and reduced files that receipts of this result's generations commit and that it does not list: of
    another index or function than those that it was published with in the end.
    """
    root, files = newest.root, newest.files
    seen = {f"{folder}/{name}" for folder in EXTRAS for name in files.below(join(root, folder), META)}
    if seen:
        seen.difference_update(name for (name,) in live.tuples("name"))
    if not seen:
        return []
    found: set[str] = set()
    for g in generations(root, files):
        if g.number in newest.generations and not g.lost:
            found |= seen & _names_in(g, (g.indexed, g.reduced))
    return sorted(found)


def _of_lost(newest: Publication, names: set[str]) -> set[str]:
    """Visible files that this result's generations made and that it does not list, by their receipts: a publication
    whose record is lost showed them.
    """
    root, files = newest.root, newest.files
    strange = set(strangers(root, names, files))
    own = (g for g in generations(root, files) if g.number in newest.generations and not g.lost)
    return strange and strange & {name for g in own for name in committed(g)}


def _copied_back(files: Files, visible: str, work: str) -> None:
    try:
        files.link(visible, work)
    except (FileExistsError, FileNotFoundError):
        return  # done before


def _readable(found: Publication | None) -> LiveFiles:
    """A publication's files; none if their table is lost, as nobody can read them without it."""
    try:
        return LiveFiles() if found is None else found.live()
    except CorruptStore:
        return LiveFiles()


def _forget(newest: Publication, live: LiveFiles, before: Publication | None) -> None:
    """Remove generations with no rows in this result or the previous one: first the files in their receipts, then their
    folders. Of the others, remove work files that nobody reads. Anything begun after this publication is left alone.
    """
    files, root = newest.files, newest.root
    kept = _Names((live if files.free_links else live.of("manifest", "dead")) + _readable(before))
    members = {*newest.generations, *(before.generations if before is not None else ())}
    for generation in generations(root, files):
        if generation.lost or (generation.number not in members and generation.predecessor >= newest.number):
            continue
        if generation.number in members:
            start = f"{generation.work[len(root) + 1 :]}/"
            works = kept.others(start + name for name in files.entries(generation.work))
            _each(files, files.remove, [join(root, work) for work in works])
            files.remove_folder(generation.suspects)
            files.remove_folder(generation.journal)
            files.remove_folder(generation.once)
        elif files.holds(generation.folder):
            names = {name for (name,) in live.tuples("name")}
            given = [name for name in committed(generation) if name not in names]
            files.remove_folder(generation.work)  # first, so that a run that is still linking finds nothing to link
            visible = [join(root, name) for name in given]
            _each(files, files.remove, visible)
            _gone(files, visible)
            files.remove_folder(generation.folder)


class _Names:
    """The work files of live ones, of which very many take eight bytes each: a file that is none of them is taken for
    one, and stays, once in some trillions of files.
    """

    def __init__(self, live: LiveFiles) -> None:
        self._hashes = np.fromiter((hash(work) for (work,) in live.tuples("work")), np.int64)
        self._hashes.sort()

    def others(self, works: Iterable[str]) -> Iterator[str]:
        """Those that are none of them."""
        rest = iter(works)
        while some := list(itertools.islice(rest, 1 << 14)):
            hashes = np.fromiter(map(hash, some), np.int64, len(some))
            at = np.searchsorted(self._hashes, hashes)
            known = self._hashes[np.minimum(at, len(self._hashes) - 1)] == hashes if len(self._hashes) else at < 0
            yield from itertools.compress(some, (~known).tolist())


def committed(generation: Generation) -> list[str]:
    """The visible names that a generation's receipts give."""
    folders = (generation.receipts, generation.joined, generation.indexed, generation.reduced)
    return sorted(_names_in(generation, folders))


def _names_in(generation: Generation, folders: Sequence[str]) -> set[str]:
    """The visible names that receipts in these folders give."""
    found = [r for folder in folders for r in receipts.standing(folder, generation.files).values()]
    return {p.publish for r in found for p in r.parts}


def _gone(files: Files, removed: Sequence[str]) -> None:
    """Make removals survive a power failure: nobody looks for these names again."""
    if files.free_links:
        files.settle([path for path in removed if files.holds(path.rpartition("/")[0])])


def _each(files: Files, work: Callable[[Any], None], items: Sequence[Any]) -> None:
    for _ in files.map(work, items):
        pass


# ---------------------------------------------------------------- files of others


def strangers(root: str, live: set[str], files: Files = LOCAL) -> list[str]:
    """Visible data files of a sink that are not in `live` (relative names), sorted; files of sinks nested inside it do
    not count.
    """
    found = []
    for relative in files.below(root, META):
        name = relative.rpartition("/")[2]
        ours = relative.startswith("_dead/")
        if relative not in live and (ours or not name.startswith(("_", "."))):
            found.append(relative)
    return sorted(found)


def _listed(root: str, files: Files) -> set[str]:
    """The files of a sink that its _SUCCESS lists and that match it."""
    live = _readable(publication.latest(root, files))
    return {f.name for f, same in zip(live, files.map(lambda f: _same(root, f, files), live), strict=True) if same}


def _same(root: str, f: Live, files: Files) -> bool:
    try:
        return files.same(join(root, f.name), "", f.bytes, f.sha256)
    except FileNotFoundError:
        return False


def refuse_foreign(root: str, overwrite: bool, files: Files = LOCAL, *, manifest: bool = False) -> None:
    """Raises BadJob if a sink that no run of ours has used holds files already (fault 34), or a file that is not ours
    has the name of the `manifest` that this run will write.
    """
    if overwrite:
        return
    if not files.holds(meta(root)):
        # A sink whose records are lost may be begun anew: the files that its _SUCCESS lists are known.
        if names := strangers(root, _listed(root, files), files):
            raise BadJob(
                f"{root}: holds {len(names)} files that gristmill did not write ({names[0]}, …): give another sink, "
                "or --overwrite (overwrite=True) to write beside them, with --restart (restart=True) over a result"
            )
    elif manifest and MANIFEST in files.names(root):
        known = publication.latest(root, files)
        if known is None or MANIFEST not in {f.name for f in known.live()}:
            raise BadJob(
                f"{join(root, MANIFEST)}: gristmill did not write it, and an npy sink has a file of this name: move "
                "it away, or --overwrite (overwrite=True) to replace it"
            )


# ---------------------------------------------------------------- npy's manifest


def manifest(generation: Generation, done: Iterable[Receipt], base: LiveFiles) -> Live:
    """npy's manifest.parquet as a file of the result: input_path, output_path, rows, one row for each pair, in plan
    order, after those of the `base` that this generation adds to.
    """
    import pyarrow.parquet as pq

    files, root = generation.files, generation.root
    rows: list[dict[str, Any]] = []
    for old in base.of("manifest"):
        rows += pq.read_table(pa.BufferReader(_manifest_of(root, files, old))).to_pylist()
    for receipt in done:
        rows += [{"input_path": i, "output_path": p.publish, "rows": n} for i, p, n in receipts.inputs_of(receipt)]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=LISTED), sink)
    path = join(generation.work, f"{MANIFEST}.tmp")
    files.write_over(path, sink.getvalue().to_pybytes())
    size, digest = files.digest(path)
    return Live(MANIFEST, path[len(root) + 1 :], len(rows), size, digest, "manifest", generation.number, -1)


def _manifest_of(root: str, files: Files, old: Live) -> bytes:
    """What a published manifest holds. Raises CorruptStore if it is lost."""
    for path in (old.work, old.name):  # only the visible one may be left
        with contextlib.suppress(FileNotFoundError):
            data = files.read(join(root, path))
            if hashlib.sha256(data).hexdigest() == old.sha256:
                return data
    raise CorruptStore(
        f"{join(root, old.work)}: the manifest of generation {old.generation} is lost: start over with --restart "
        "(restart=True)"
    )


def _keep_manifest(root: str, files: Files) -> None:
    """Make the visible manifest, whose name all generations share, that of the latest publication. As with `_SUCCESS`,
    the newest wins in the end, even over a process that was suspended midway for a long time.
    """
    target, wrote = join(root, MANIFEST), False
    for attempt in itertools.count(1):
        newest = publication.published(root, files)
        wanted = next(iter(newest.live().of("manifest")), None)
        if wanted is None:
            if wrote:  # too late: the latest result has none
                files.remove(target)
            return
        if files.same(target, "", wanted.bytes, wanted.sha256):
            return
        version = publication.standing(files, target)
        if publication.published(root, files).number == newest.number:  # so the visible file is not from a newer one
            if wanted.work.rpartition("/")[2] not in files.names(join(root, wanted.work.rpartition("/")[0])):
                return  # lost, as verify reports
            data = files.read(join(root, wanted.work))
            publication.replace(files, target, data, version, attempt)
            wrote = True
