"""Generations: one plan with its receipts and parts, begun by a claim. A sink's folder holds them all; its publications
say which are live.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import field, replace

import pyarrow as pa

from gristmill.arrow.schemas import nullable
from gristmill.commit.documents import Claim, LoadedCode, PlanDocument, Reads, TableRecord, Verb, WrittenPaths
from gristmill.errors import CorruptStore
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL, META, join, sha256_of
from gristmill.fingerprint.digests import StoredFingerprint, input_digest
from gristmill.process import scratch
from gristmill.shards.shard import ShardTable
from gristmill.shards.sourcefiles import FileInfo, SourceFile
from gristmill.values import dataclass

PLAN = "plan.json"
_REFUSED = "refused"
_CLAIM = re.compile(r"^(\d{4,})\.json$")


@dataclass(frozen=True)
class Generation:
    """A claimed generation: its intent, fixed when it was begun. `root` is the sink's folder.

    `base` is the generation whose live files stay live beside this one's (append, retry-dead). `predecessor` is the
    number of the publication that it builds on, 0 for none: it can be published only as the next one after that.
    `fingerprint` is the job's; `schema` is the encoded output schema that its rows must fit, taken from its base.
    `sink` is what stores call the sink (`sink_of`). A claim that does not read back is `lost`: its number is taken,
    nothing else is known.
    """

    root: str
    number: int
    name: str
    kind: Verb
    base: int | None = None
    predecessor: int = 0
    fingerprint: StoredFingerprint = field(default_factory=StoredFingerprint, compare=False, repr=False)
    schema: str | None = field(default=None, repr=False)
    sink: str | None = field(default=None, compare=False, repr=False)
    lost: bool = False
    files: Files = field(default=LOCAL, compare=False, repr=False)

    @property
    def folder(self) -> str:
        """Where plan, receipts and work files are."""
        return join(self.root, META, self.name)

    @property
    def work(self) -> str:
        """Where shards write; everything in it ends in .tmp."""
        return join(self.folder, "work")

    @property
    def receipts(self) -> str:
        """Where receipts are created."""
        return join(self.folder, "receipts")

    @property
    def journal(self) -> str:
        """Where answers to rows of shards that are not committed are (commit/journal.py)."""
        return join(self.folder, "journal")

    @property
    def once(self) -> str:
        """Where the answers to requests are that are asked once (commit/once.py)."""
        return join(self.folder, "once")

    @property
    def deliveries(self) -> str:
        """Where the receipts of deliveries to stores are."""
        return join(self.folder, "deliveries")

    @property
    def indexed(self) -> str:
        """Where the receipts of index files are."""
        return join(self.folder, "indexed")

    @property
    def joined(self) -> str:
        """Where the receipts of files are that parts were joined to."""
        return join(self.folder, "merged")

    @property
    def reduced(self) -> str:
        """Where the receipts of what a job's `reduce` wrote are."""
        return join(self.folder, "reduced")

    @property
    def suspects(self) -> str:
        """Where attempts note what they are about to predict."""
        return join(self.folder, "suspects")

    @property
    def planned(self) -> bool:
        """Whether its plan has been written."""
        return not self.lost and PLAN in self.files.names(self.folder)


@dataclass(frozen=True)
class Plan:
    """A stored plan: the sealed description and the shard table."""

    about: PlanDocument
    shards: ShardTable

    @property
    def schema(self) -> pa.Schema:
        """Output schema, fixed by the probe; any column may come to hold nulls, also with plans of earlier versions."""
        return nullable(decode_schema(self.about.output_schema))


def meta(root: str) -> str:
    """The folder of plans, receipts and work files in a sink."""
    return join(root, META)


def held_inputs(root: str, files: Files) -> str:
    """The folder on this machine with copies of the in-memory tables, and of the stores, that were a sink's source.
    Raises BadJob for one in the folder for temporary files that somebody else may write to.
    """
    if files.arrow() is None:
        return join(meta(root), "inputs")
    digest = hashlib.sha256(f"{root} {files.server}".encode()).hexdigest()[:16]
    return scratch.owned(f"gristmill-inputs-{digest}")


def generations(root: str, files: Files = LOCAL) -> list[Generation]:
    """All claimed generations, oldest first."""
    return [numbered(root, number, files) for number in sorted(numbers(root, files))]


def numbers(root: str, files: Files = LOCAL) -> set[int]:
    """The numbers of all claimed generations; none if the folder is no sink."""
    return {int(m[1]) for e in files.names(join(root, META, "generations")) if (m := _CLAIM.match(e))}


def claimed(root: str, number: int, files: Files = LOCAL) -> bool:
    """Whether a sink has, or had, a generation of this number."""
    return f"{number:04d}.json" in files.names(join(root, META, "generations"))


def pending(claims: Sequence[Generation], published: int) -> Generation | None:
    """The claim that can still become the publication after number `published`: the last one made from it, ignoring any
    that was refused.
    """
    for found in reversed(claims):
        if not found.lost and found.predecessor == published and _REFUSED not in found.files.names(found.folder):
            return found
    return None


def refuse(generation: Generation) -> None:
    """Mark a generation as void: its first rows, or a retry's, do not fit the result that they would be added to."""
    generation.files.write_over(join(generation.folder, _REFUSED), b"")


def numbered(root: str, number: int, files: Files = LOCAL) -> Generation:
    """A claimed generation by its number."""
    try:
        c = Claim.load_from(_claim_path(root, number), files)
        begun = (c.folder, c.kind, c.base, c.predecessor, c.fingerprint, c.schema, c.sink)
        return Generation(root, number, *begun, files=files)
    except CorruptStore:
        return Generation(root, number, f"g{number:04d}", "new", lost=True, files=files)


def claim(
    files: Files,
    root: str,
    kind: Verb,
    *,
    base: int | None = None,
    predecessor: int = 0,
    fingerprint: StoredFingerprint | None = None,
    schema: str | None = None,
    after: int = 0,
    sink: str | None = None,
) -> Generation:
    """Claim the next generation number, also above `after`, whose claim may be lost. Two that claim at once get
    different numbers. `sink` is what the sink is called in stores, if its latest result says so; else its claims do.
    """
    while True:
        number = max([*numbers(root, files), after]) + 1
        name = f"g{number:04d}-{secrets.token_hex(4)}"
        known = sink or sink_of(generations(root, files))
        # Whatever was delivered of an unknown sink, a result that is begun anew is another one.
        own = known or (name if kind in ("new", "restart") else None)
        begun = (name, kind, base, predecessor, fingerprint or StoredFingerprint(), schema, own)
        if files.write_new(_claim_path(root, number), Claim(number, *begun).dump()):
            return Generation(root, number, *begun, files=files)


def sink_of(claims: Sequence[Generation]) -> str | None:
    """What stores call a sink: the name of its first generation, which stays when the folder is moved or copied. Every
    claim and every result repeats it, so that it is known as long as one of them is; None if it is not, or if there is
    no claim yet.
    """
    if said := next((g.sink for g in claims if g.sink is not None), None):
        return said
    first = claims[0] if claims else None
    return first.name if first is not None and first.number == 1 and not first.lost else None


def _claim_path(root: str, number: int) -> str:
    return join(root, META, "generations", f"{number:04d}.json")


def written(root: str, files: Files) -> frozenset[str]:
    """Paths in arguments whose files appeared during a run on this sink: the code is known to write them."""
    try:
        return frozenset(WrittenPaths.load_from(_written_path(root), files).paths)
    except (FileNotFoundError, CorruptStore):  # without it, they count; a run that finds them changed says so
        return frozenset()


def note_written(root: str, files: Files, paths: Sequence[str]) -> None:
    """Add to `written`, for the lifetime of the sink."""
    found = written(root, files)
    if not found.issuperset(paths):
        files.write_over(_written_path(root), WrittenPaths(tuple(sorted(found.union(paths)))).dump())


def _written_path(root: str) -> str:
    return join(root, META, "written.json")


def loaded(folder: str, files: Files) -> dict[str, set[str]]:
    """Digests of what code loaded while the generation in a folder ran, beyond what its plan names
    (`models.loaded`).
    """
    found: dict[str, set[str]] = {}
    notes = join(folder, "loaded")
    for name in files.names(notes):
        with contextlib.suppress(FileNotFoundError, CorruptStore):  # as many notes as can be read
            for entry, digest in LoadedCode.load_from(join(notes, name), files).loaded.items():
                found.setdefault(entry, set()).add(digest)
    return found


def note_loaded(files: Files, folder: str, found: Mapping[str, str]) -> str:
    """Add to `loaded`. Returns the path of the note."""
    path = join(folder, "loaded", f"{secrets.token_hex(6)}.json")
    files.make_folder(join(folder, "loaded"))
    files.write_over(path, LoadedCode(found).dump())
    return path


# ---------------------------------------------------------------- plans


def write_plan(
    files: Files,
    generation: Generation,
    about: PlanDocument,
    infos: list[FileInfo],
    shards: pa.Table,
    inspected: pa.Table | None = None,
) -> Plan:
    """Store a plan, once; if another run was quicker, its plan is returned. `inspected` is stored beside the files:
    what a later run need not determine again.
    """
    nonce = secrets.token_hex(4)
    tables = {"files": _with(_file_table(infos), inspected), "shards": shards}
    stored: dict[str, TableRecord] = {}
    written = []
    for what, table in tables.items():
        path = join(generation.folder, f"{what}.{nonce}.arrow")
        with files.create(path) as out:
            with pa.ipc.new_file(out, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
                writer.write_table(table)
            files.sync(out)
        stored[what] = TableRecord(os.path.basename(path), files.digest(path)[1])
        written.append(path)
    files.settle(written)  # plan.json must not outlive the names of its tables
    files.write_new(join(generation.folder, PLAN), replace(about, tables=stored).dump())
    return read_plan(generation)


def read_plan(generation: Generation) -> Plan:
    """A stored plan. Raises CorruptStore if a checksum does not match."""
    about = PlanDocument.load_from(join(generation.folder, PLAN), generation.files)
    tables = {what: whole_table(generation, entry) for what, entry in about.tables.items()}
    listing = tables["files"]
    names = ("path", "size", "stamp", "touched", "folders")
    sources = [SourceFile(*row) for row in zip(*(listing.column(n).to_pylist() for n in names), strict=True)]
    return Plan(about, ShardTable(tables["shards"], sources, listing.column("extent").to_numpy()))


def stored_reads(generation: Generation) -> Reads:
    """What a stored plan says of how the source is read."""
    return PlanDocument.load_from(join(generation.folder, PLAN), generation.files).reads


def stored_inputs(generation: Generation) -> dict[str, str]:
    """Input digests of a stored plan by path. Raises CorruptStore if the plan is damaged."""
    about = PlanDocument.load_from(join(generation.folder, PLAN), generation.files)
    table = whole_table(generation, about.tables["files"])
    return dict(zip(table.column("path").to_pylist(), table.column("digest").to_pylist(), strict=True))


def sources_of(members: Sequence[Generation]) -> dict[str, int]:
    """For each source file the number of the generation that read it first, of those that are members of a result. What
    was scored again is as old as what it was read with. Raises CorruptStore if a plan is damaged.
    """
    found: dict[str, int] = {}
    for member in members:
        if not member.lost and member.kind != "retry-dead":
            for path in stored_inputs(member):
                found.setdefault(path, member.number)
    return found


def stored_files(generation: Generation) -> pa.Table | None:
    """The table of source files of a stored plan, one row each; None if the plan is damaged."""
    try:
        about = PlanDocument.load_from(join(generation.folder, PLAN), generation.files)
    except (CorruptStore, FileNotFoundError):
        return None
    return _table(generation, about.tables["files"])


def whole_table(generation: Generation, entry: TableRecord) -> pa.Table:
    """A table beside the plan, of whatever it is. Raises CorruptStore if it is missing or not what the plan says."""
    table = _table(generation, entry)
    if table is None:
        path = join(generation.folder, entry.path)
        raise CorruptStore(f"{path}: missing or not what the plan says: start over with --restart (restart=True)")
    return table


def _table(generation: Generation, entry: TableRecord) -> pa.Table | None:
    """A table beside the plan; None if it is missing or not what the plan says."""
    try:
        with generation.files.local(join(generation.folder, entry.path)) as path:
            if sha256_of(path) != entry.sha256:
                return None
            # Mapped, even if the file is a temporary copy: the mapping keeps its pages.
            with pa.memory_map(path) as source:
                return pa.ipc.open_file(source).read_all()
    except FileNotFoundError:
        return None


def _file_table(infos: list[FileInfo]) -> pa.Table:
    return pa.table(
        {
            "path": pa.array([i.file.path for i in infos], pa.string()),
            "size": pa.array([i.file.size for i in infos], pa.int64()),
            "stamp": pa.array([i.file.stamp for i in infos], pa.string()),
            "touched": pa.array([i.file.touched for i in infos], pa.string()),
            "folders": pa.array([i.file.folders for i in infos], pa.string()),
            "digest": pa.array([input_digest(i) for i in infos], pa.string()),
            "extent": pa.array([i.extent for i in infos], pa.int64()),
        }
    )


def _with(table: pa.Table, more: pa.Table | None) -> pa.Table:
    if more is None:
        return table
    for name, column in zip(more.schema, more.columns, strict=True):
        table = table.append_column(name, column)
    return table.replace_schema_metadata(more.schema.metadata)


def encode_schema(schema: pa.Schema) -> str:
    """A schema as text for JSON."""
    import base64

    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def decode_schema(text: str) -> pa.Schema:
    """The inverse of encode_schema."""
    import base64

    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
