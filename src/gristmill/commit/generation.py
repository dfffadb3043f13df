"""Generations: one plan with its receipts and parts, begun by a claim. A sink's folder holds them all; which are live
is for its publications to say.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from gristmill.commit.store import LOCAL, META, join, seal, sha256_of, unseal
from gristmill.errors import CorruptStore
from gristmill.io.schema import nullable
from gristmill.plan.contracts import FileInfo, Files, SourceFile
from gristmill.plan.fingerprint import input_digest
from gristmill.plan.shard import ShardTable

Verb = Literal["new", "restart", "append", "retry-dead"]
_REFUSED = "refused"
_CLAIM = re.compile(r"^(\d{4,})\.json$")


@dataclass(frozen=True)
class Generation:
    """A claimed generation: what was meant when it was begun, decided once. `root` is the sink's folder.

    `base` is the generation whose live files stay live beside this one's (append, retry-dead). `predecessor` is the
    number of the publication that it is made from, 0 for none: it can be published only as the next one after that.
    `fingerprint` is that of the job (Fingerprint.as_dict), `schema` the encoded output schema that its rows must fit,
    that of its base. A claim that does not read back is `lost`: its number is taken, nothing else is known.
    """

    root: str
    number: int
    name: str
    kind: Verb
    base: int | None = None
    predecessor: int = 0
    fingerprint: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    schema: str | None = field(default=None, repr=False)
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
    def suspects(self) -> str:
        """Where attempts note what they are about to predict."""
        return join(self.folder, "suspects")

    @property
    def planned(self) -> bool:
        """Whether its plan has been written."""
        return not self.lost and "plan.json" in self.files.names(self.folder)


@dataclass(frozen=True)
class Plan:
    """A stored plan: the sealed description and the shard table."""

    about: dict[str, Any]
    shards: ShardTable

    @property
    def schema(self) -> pa.Schema:
        """Output schema, fixed by the probe; of earlier versions' plans, too, any column may come to hold nulls."""
        return nullable(decode_schema(self.about["output_schema"]))


def meta(root: str) -> str:
    """The folder of plans, receipts and work files in a sink."""
    return join(root, META)


def held_inputs(root: str, files: Files) -> str:
    """The folder of this machine that holds copies of tables in memory, which were a sink's source."""
    if files.arrow() is None:
        return join(meta(root), "inputs")
    digest = hashlib.sha256(root.encode()).hexdigest()[:16]
    return os.path.join(tempfile.gettempdir(), f"gristmill-inputs-{digest}")


def generations(root: str, files: Files = LOCAL) -> list[Generation]:
    """All claimed generations, oldest first."""
    folder = join(root, META, "generations")
    numbers = sorted(int(m[1]) for e in files.names(folder) if (m := _CLAIM.match(e)))
    return [_claimed(files, root, number) for number in numbers]


def pending(claims: Sequence[Generation], published: int) -> Generation | None:
    """The claim that can still become the publication after number `published`: the last that was made from it, but
    for one whose first rows were refused, which is nothing.
    """
    for found in reversed(claims):
        if not found.lost and found.predecessor == published and _REFUSED not in found.files.names(found.folder):
            return found
    return None


def refuse(generation: Generation) -> None:
    """Note that a generation is nothing: its first rows do not fit the result that they would be added to."""
    generation.files.write_over(join(generation.folder, _REFUSED), b"")


def _claimed(files: Files, root: str, number: int) -> Generation:
    try:
        body = unseal(_claim_path(root, number), files)
        return Generation(
            root, number, body["folder"], body["kind"], body["base"], body["predecessor"], body["fingerprint"],
            body["schema"], files=files,
        )  # fmt: skip
    except (CorruptStore, KeyError):
        return Generation(root, number, f"g{number:04d}", "new", lost=True, files=files)


def claim(
    files: Files,
    root: str,
    kind: Verb,
    *,
    base: int | None = None,
    predecessor: int = 0,
    fingerprint: Mapping[str, Any] | None = None,
    schema: str | None = None,
    after: int = 0,
) -> Generation:
    """Claim the next generation number, one above `after` too, whose claim may be lost. Of two that claim at once each
    gets a number of its own.
    """
    folder = join(root, META, "generations")
    while True:
        taken = [int(m[1]) for e in files.names(folder) if (m := _CLAIM.match(e))]
        number = max([*taken, after]) + 1
        name = f"g{number:04d}-{secrets.token_hex(4)}"
        found = Generation(root, number, name, kind, base, predecessor, fingerprint or {}, schema, files=files)
        body = {
            "format": 1,
            "number": number,
            "folder": name,
            "kind": kind,
            "base": base,
            "predecessor": predecessor,
            "fingerprint": dict(found.fingerprint),
            "schema": schema,
        }
        if files.write_new(_claim_path(root, number), seal(body)):
            return found


def _claim_path(root: str, number: int) -> str:
    return join(root, META, "generations", f"{number:04d}.json")


def written(root: str, files: Files) -> frozenset[str]:
    """Paths in arguments whose files came to be during a run on this sink, so that the code is known to write them."""
    try:
        return frozenset(unseal(_written_path(root), files)["paths"])
    except (FileNotFoundError, CorruptStore):  # without it they count, and a run that finds them changed says so
        return frozenset()


def note_written(root: str, files: Files, paths: Sequence[str]) -> None:
    """Add to `written`, for as long as the sink lives."""
    found = written(root, files)
    if not found.issuperset(paths):
        files.write_over(_written_path(root), seal({"paths": sorted(found.union(paths))}))


def _written_path(root: str) -> str:
    return join(root, META, "written.json")


def loaded(folder: str, files: Files) -> dict[str, set[str]]:
    """Digests of what code loaded as the generation in a folder ran, beyond what its plan names (`models.loaded`)."""
    found: dict[str, set[str]] = {}
    notes = join(folder, "loaded")
    for name in files.names(notes):
        with contextlib.suppress(FileNotFoundError, CorruptStore):  # as many as can be told
            for entry, digest in unseal(join(notes, name), files)["loaded"].items():
                found.setdefault(entry, set()).add(digest)
    return found


def note_loaded(files: Files, folder: str, found: Mapping[str, str]) -> str:
    """Add to `loaded`. The path of the note."""
    path = join(folder, "loaded", f"{secrets.token_hex(6)}.json")
    files.make_folder(join(folder, "loaded"))
    files.write_over(path, seal({"loaded": dict(found)}))
    return path


# ---------------------------------------------------------------- plans


def write_plan(
    files: Files,
    generation: Generation,
    about: dict[str, Any],
    infos: list[FileInfo],
    shards: pa.Table,
    inspected: pa.Table | None = None,
) -> Plan:
    """Store a plan, once; where another run was quicker, its plan is the one returned. `inspected` goes beside the
    files: what a later run need not find out again.
    """
    nonce = secrets.token_hex(4)
    tables = {"files": _with(_file_table(infos), inspected), "shards": shards}
    stored, written = {}, []
    for what, table in tables.items():
        path = join(generation.folder, f"{what}.{nonce}.arrow")
        with files.create(path) as out:
            with pa.ipc.new_file(out, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
                writer.write_table(table)
            files.sync(out)
        stored[what] = {"path": os.path.basename(path), "sha256": files.digest(path)[1]}
        written.append(path)
    files.settle(written)  # plan.json must not outlive the names of its tables
    files.write_new(join(generation.folder, "plan.json"), seal({**about, "tables": stored}))
    return read_plan(generation)


def read_plan(generation: Generation) -> Plan:
    """A stored plan. Raises CorruptStore where a checksum does not hold."""
    about = unseal(join(generation.folder, "plan.json"), generation.files)
    tables = {}
    for what, entry in about["tables"].items():
        table = _table(generation, entry)
        if table is None:
            path = join(generation.folder, entry["path"])
            raise CorruptStore(f"{path}: missing or not what the plan says: start anew with --restart (restart=True)")
        tables[what] = table
    listing = tables["files"]
    names = ("path", "size", "stamp", "touched", "folders")
    sources = [SourceFile(*row) for row in zip(*(listing.column(n).to_pylist() for n in names), strict=True)]
    return Plan(about, ShardTable(tables["shards"], sources, listing.column("extent").to_numpy()))


def stored_reads(generation: Generation) -> dict[str, Any]:
    """What a stored plan says of how the source is read; see `rereading.described`."""
    return dict(unseal(join(generation.folder, "plan.json"), generation.files)["reads"])


def stored_inputs(generation: Generation) -> dict[str, str]:
    """Input digests of a stored plan by path. Raises CorruptStore where it is damaged."""
    entry = unseal(join(generation.folder, "plan.json"), generation.files)["tables"]["files"]
    table = _table(generation, entry)
    if table is None:
        path = join(generation.folder, entry["path"])
        raise CorruptStore(f"{path}: missing or not what the plan says: start anew with --restart (restart=True)")
    return dict(zip(table.column("path").to_pylist(), table.column("digest").to_pylist(), strict=True))


def stored_files(generation: Generation) -> pa.Table | None:
    """The table of source files of a stored plan, one row each; None where the plan is damaged."""
    try:
        about = unseal(join(generation.folder, "plan.json"), generation.files)
    except (CorruptStore, FileNotFoundError):
        return None
    return _table(generation, about["tables"]["files"])


def _table(generation: Generation, entry: Mapping[str, str]) -> pa.Table | None:
    """A table beside the plan; None where it is missing or not what the plan says."""
    try:
        with generation.files.local(join(generation.folder, entry["path"])) as path:
            if sha256_of(path) != entry["sha256"]:
                return None
            # Mapped, also where the file is a copy that goes: the mapping holds its pages.
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
            "extent": pa.array(np.array([i.extent for i in infos], dtype=np.int64)),
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


def progress_path(generation: Generation) -> str:
    """Where a run notes how far it is, for `gristmill status`."""
    return join(generation.folder, "progress.json")


def read_progress(generation: Generation) -> dict[str, Any] | None:
    """The last progress line of a run, or None."""
    try:
        return json.loads(generation.files.read(progress_path(generation)))  # type: ignore[no-any-return]
    except (FileNotFoundError, ValueError):
        return None
