"""Publishing: linking committed parts to their visible names, creating the publication, and removing what it replaces.
Every step here can be done twice, and by two drivers at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from gristmill.commit import publication
from gristmill.commit import receipt as receipts
from gristmill.commit.generation import Generation, generations, meta
from gristmill.commit.publication import SUCCESS, Live, Publication
from gristmill.commit.receipt import Part, Receipt
from gristmill.commit.store import LOCAL, META, join, seal, sizes_of, unseal
from gristmill.errors import BadJob, CorruptStore, RunFailed
from gristmill.plan.contracts import Files

MANIFEST = "manifest.parquet"
LISTED = pa.schema([("input_path", pa.string()), ("output_path", pa.string()), ("rows", pa.int64())])
SETTLED = "settled.json"


def link_parts(files: Files, generation: Generation, done: Sequence[Receipt]) -> None:
    """Give every committed part its visible name. A name that is taken by the same content is fine, by other not."""
    parts = [part for receipt in done for part in receipt.parts]
    targets = list(files.map(lambda part: _link(files, generation.root, part), parts))
    files.settle([*targets, join(generation.root, SUCCESS)])


def _link(files: Files, root: str, part: Part) -> str:
    work, target = join(root, part.work), join(root, part.publish)
    try:
        files.link(work, target)
    except FileExistsError:
        if not files.same(target, work, part.bytes, part.sha256):
            raise RunFailed(f"{target}: a file of another making has this name: move it away and run again") from None
    except FileNotFoundError:
        # Published before and the work file cleaned up, or lost.
        if not files.same(target, work, part.bytes, part.sha256):
            raise CorruptStore(
                f"{work}: committed, but the file is gone: run again with --restart (restart=True)"
            ) from None
    return target


def put_back(root: str, files: Files) -> list[str]:
    """Visible files of the published result that somebody has removed, or that were cut, given their names again where
    their rows are still kept. Lists folders and opens nothing. Raises CorruptStore where they are not.
    """
    result = publication.published(root, files)
    live = [f for f in result.live() if f.role not in ("manifest", "dead")]  # letters are the reader's to clear away
    there = sizes_of(root, {f.name for f in live}, files)
    wrong = [f for f in live if there.get(f.name) != f.bytes]
    kept = sizes_of(root, {f.work for f in wrong}, files)
    for f in wrong:
        if kept.get(f.work) != f.bytes:
            what = f"has {there[f.name]:,} of its {f.bytes:,} bytes" if f.name in there else "the file is gone"
            raise CorruptStore(
                f"{root}: {f.name} is published, but {what}: put it back, or score all rows again with --restart "
                f"(restart=True); gristmill verify {root} names all that is wrong"
            )
    for f in wrong:
        files.remove(join(root, f.name))
        files.link(join(root, f.work), join(root, f.name))
    files.settle([join(root, f.name) for f in wrong])
    return [f.name for f in wrong]


def publish(generation: Generation, about: Mapping[str, Any], live: Sequence[Live]) -> Publication:
    """Make this generation the sink's result, or find that it is. Raises SinkBusy where another one was quicker."""
    made = publication.create(generation, about, live)
    settle(generation.root, generation.files)
    return made


def settle(root: str, files: Files) -> None:
    """What follows a publication, also for one whose driver was stopped in the middle: `_SUCCESS` names it, visible
    names that are not of it go, and so does what no reader can be at any more.
    """
    newest = publication.mark(root, files)
    if newest is None:
        return
    if newest.body["sink_format"] == "npy":
        _keep_manifest(root, files)
    if (settled := _settled(newest)) == newest.number:
        return
    live = newest.live()
    before = publication.load(root, newest.before, files)
    between = [publication.load(root, n, files) for n in range(max(settled, 1), newest.number)]
    _retire(newest, live, before, between)
    _forget(newest, live, before)
    noted = {"publication": newest.number, "generation": newest.generation}
    files.write_over(join(meta(root), SETTLED), seal(noted))


def _settled(newest: Publication) -> int:
    """The last publication that was settled, by a note of whoever did it; 0 where that is lost."""
    try:
        noted = unseal(join(meta(newest.root), SETTLED), newest.files)
        last = int(noted["publication"]), int(noted["generation"])
    except (FileNotFoundError, CorruptStore, KeyError):
        return 0
    # Publications may have been lost, and their numbers given again.
    return last[0] if last[0] < newest.number or last == (newest.number, newest.generation) else 0


def give_up(latest: Publication) -> Publication:
    """Nothing that was begun on top of the latest publication, and is unfinished, can be published any more, whoever
    still works on it; what it has in the sink goes. Returns the publication to build on, of the same result.
    """
    made = publication.again(latest)
    with contextlib.suppress(CorruptStore):  # where the result cannot be read, --restart replaces it, and settles that
        settle(latest.root, latest.files)
    return made


def linked(generation: Generation, latest: Publication) -> bool:
    """Whether files of an unfinished generation stand in the sink: a run was stopped just before it published."""
    strange = set(strangers(generation.root, {f.name for f in latest.live()}, generation.files))
    return bool(strange) and not strange.isdisjoint(committed(generation))


# ---------------------------------------------------------------- what a publication replaces


def _retire(
    newest: Publication, live: Sequence[Live], before: Publication | None, between: Sequence[Publication | None]
) -> None:
    """Visible names of results since the last that was settled go, where they are not of this one. What the result
    before named stays readable as work files until the next publication: who reads it reads on.
    """
    files, root, names = newest.files, newest.root, {f.name for f in live}
    read = {f.work for f in _readable(before)}
    gone = {f.name: f for p in between for f in _readable(p) if f.name not in names}

    def retire(f: Live) -> None:
        visible = join(root, f.name)
        if not files.free_links and f.work in read:
            _copied_back(files, visible, join(root, f.work))
        files.remove(visible)

    _each(files, retire, list(gone.values()))
    _gone(files, [join(root, name) for name in gone])


def _copied_back(files: Files, visible: str, work: str) -> None:
    try:
        files.link(visible, work)
    except (FileExistsError, FileNotFoundError):
        return  # done before


def _readable(found: Publication | None) -> list[Live]:
    """Its files; none where their table is lost, with which they cannot be read either."""
    try:
        return [] if found is None else found.live()
    except CorruptStore:
        return []


def _forget(newest: Publication, live: Sequence[Live], before: Publication | None) -> None:
    """Generations that neither this result nor the one before has rows of: their files by their receipts, then their
    folders. Of the others, work files that nobody reads. What was begun after this publication is left alone.
    """
    files, root = newest.files, newest.root
    kept = {f.work for f in live if files.free_links or f.role in ("manifest", "dead")}
    kept |= {f.work for f in _readable(before)}
    names = {f.name for f in live}
    members = {*newest.generations, *(before.generations if before is not None else ())}
    for generation in generations(root, files):
        if generation.lost or (generation.number not in members and generation.predecessor >= newest.number):
            continue
        if generation.number in members:
            works = [join(generation.work, n) for n in files.names(generation.work)]
            _each(files, files.remove, [w for w in works if w[len(root) + 1 :] not in kept])
            files.remove_folder(generation.suspects)
        elif files.holds(generation.folder):
            given = [name for name in committed(generation) if name not in names]
            files.remove_folder(generation.work)  # first, so that a run which still links them finds nothing to link
            visible = [join(root, name) for name in given]
            _each(files, files.remove, visible)
            _gone(files, visible)
            files.remove_folder(generation.folder)


def committed(generation: Generation) -> list[str]:
    """The visible names that a generation's receipts give."""
    folders = (generation.receipts, join(generation.folder, "merged"))
    found = [r for folder in folders for r in receipts.standing(folder, generation.files).values()]
    return [p.publish for r in found for p in r.parts]


def _gone(files: Files, removed: Sequence[str]) -> None:
    """Names that were removed are to stay so when power fails: nobody looks for them again."""
    if files.free_links:
        files.settle([path for path in removed if files.holds(path.rpartition("/")[0])])


def _each(files: Files, work: Callable[[Any], None], items: Sequence[Any]) -> None:
    for _ in files.map(work, items):
        pass


# ---------------------------------------------------------------- files of others


def strangers(root: str, live: set[str], files: Files = LOCAL) -> list[str]:
    """Visible data files of a sink that are not in `live` (relative names), sorted; those of sinks inside it are not
    its own.
    """
    found = []
    for relative in files.below(root, META):
        name = relative.rpartition("/")[2]
        ours = relative.startswith("_dead/")
        if relative not in live and (ours or not name.startswith(("_", "."))):
            found.append(relative)
    return sorted(found)


def _listed(root: str, files: Files) -> set[str]:
    """The files of a sink that its _SUCCESS lists, and that are what it says."""
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
        # A sink whose records are lost may be begun anew: of the files that its _SUCCESS lists it knows what they are.
        if names := strangers(root, _listed(root, files), files):
            raise BadJob(
                f"{root}: holds {len(names)} files that no run of gristmill wrote ({names[0]}, …): give another sink, "
                "or --overwrite (overwrite=True) to write beside them, with --restart (restart=True) over a result"
            )
    elif manifest and MANIFEST in files.names(root):
        known = publication.latest(root, files)
        if known is None or MANIFEST not in {f.name for f in known.live()}:
            raise BadJob(
                f"{join(root, MANIFEST)}: no run of gristmill wrote it, and an npy sink has a file of this name: move "
                "it away, or --overwrite (overwrite=True) to replace it"
            )


# ---------------------------------------------------------------- npy's manifest


def manifest(generation: Generation, done: Sequence[Receipt], base: Sequence[Live]) -> Live:
    """npy's manifest.parquet as a file of the result: input_path, output_path, rows, one row for each pair, in plan
    order, after those of the `base` that this generation adds to.
    """
    import pyarrow.parquet as pq

    files, root = generation.files, generation.root
    rows: list[dict[str, Any]] = []
    for old in base:
        if old.role == "manifest":
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
    """What a published manifest holds. Raises CorruptStore where it is lost."""
    for path in (old.work, old.name):  # the visible one may be all that is left of it
        with contextlib.suppress(FileNotFoundError):
            data = files.read(join(root, path))
            if hashlib.sha256(data).hexdigest() == old.sha256:
                return data
    raise CorruptStore(
        f"{join(root, old.work)}: the manifest of generation {old.generation} is lost: start anew with --restart "
        "(restart=True)"
    )


def _keep_manifest(root: str, files: Files) -> None:
    """Let the one visible file whose name every generation has be the latest publication's. As `_SUCCESS` is: of many
    who do, also of one that was stopped for a year in the middle, the newest stands in the end.
    """
    target, wrote = join(root, MANIFEST), False
    for attempt in itertools.count(1):
        newest = publication.published(root, files)
        wanted = next((f for f in newest.live() if f.role == "manifest"), None)
        if wanted is None:
            if wrote:  # too late: the latest result has none
                files.remove(target)
            return
        if files.same(target, "", wanted.bytes, wanted.sha256):
            return
        version = publication.standing(files, target)
        if publication.published(root, files).number == newest.number:  # so that what stands is no newer one's
            if wanted.work.rpartition("/")[2] not in files.names(join(root, wanted.work.rpartition("/")[0])):
                return  # lost, as verify tells
            data = files.read(join(root, wanted.work))
            publication.replace(files, target, data, version, attempt)
            wrote = True
