"""Generations: one plan with its receipts and parts. A sink's folder holds them all; which are live is for `_SUCCESS`
to say.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.commit.store import LOCAL, join, seal, sha256_of, unseal
from gristmill.errors import CorruptStore
from gristmill.plan.contracts import FileInfo, Files, SourceFile
from gristmill.plan.fingerprint import input_digest
from gristmill.plan.shard import ShardTable

META = "_gristmill"
SUCCESS = "_SUCCESS"


@dataclass(frozen=True)
class Generation:
    """A claimed generation. `kind`: "new", "restart", "append" or "retry-dead"; `root` is the sink's folder.

    `base` is the generation whose live files stay live beside this one's (append, retry-dead).
    """

    root: str
    number: int
    name: str
    kind: str
    base: int | None = None
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
        return "plan.json" in self.files.names(self.folder)


@dataclass(frozen=True)
class Plan:
    """A stored plan: the sealed description and the shard table."""

    about: dict[str, Any]
    shards: ShardTable

    @property
    def schema(self) -> pa.Schema:
        """Output schema, fixed by the probe."""
        return decode_schema(self.about["output_schema"])


def meta(root: str) -> str:
    """The folder of plans, receipts and work files in a sink."""
    return join(root, META)


def generations(root: str, files: Files = LOCAL) -> list[Generation]:
    """All claimed generations, oldest first. Raises CorruptStore for a claim that does not read back."""
    folder = join(root, META, "generations")
    found = []
    for entry in sorted(e for e in files.names(folder) if e.endswith(".json")):
        body = unseal(join(folder, entry), files)
        found.append(Generation(root, body["number"], body["folder"], body["kind"], body.get("base"), files))
    return found


def claim(files: Files, root: str, kind: str, base: int | None = None) -> Generation:
    """Claim the next generation number. Of two that claim at once each gets a number of its own."""
    while True:
        number = max((g.number for g in generations(root, files)), default=0) + 1
        generation = Generation(root, number, f"g{number:04d}-{secrets.token_hex(4)}", kind, base, files)
        body = {"number": number, "folder": generation.name, "kind": kind, "base": base}
        if files.write_new(join(root, META, "generations", f"{number:04d}.json"), seal(body)):
            return generation


def success(root: str, files: Files = LOCAL) -> dict[str, Any] | None:
    """What `_SUCCESS` says, or None where nothing was published. Raises CorruptStore if it does not read back."""
    try:
        return unseal(join(root, SUCCESS), files)
    except FileNotFoundError:
        return None
    except CorruptStore:
        if not files.read(join(root, SUCCESS)):
            return None  # the empty marker of another system; the check for foreign files deals with it
        raise


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
            raise CorruptStore(f"{path}: missing or not what the plan says: start anew with --restart")
        tables[what] = table
    listing = tables["files"]
    sources = [
        SourceFile(p, s, t)
        for p, s, t in zip(*(listing.column(c).to_pylist() for c in ("path", "size", "stamp")), strict=True)
    ]
    return Plan(about, ShardTable(tables["shards"], sources, listing.column("extent").to_numpy()))


def stored_inputs(generation: Generation) -> dict[str, str]:
    """Input digests of a stored plan by path. Raises CorruptStore where it is damaged."""
    entry = unseal(join(generation.folder, "plan.json"), generation.files)["tables"]["files"]
    table = _table(generation, entry)
    if table is None:
        path = join(generation.folder, entry["path"])
        raise CorruptStore(f"{path}: missing or not what the plan says: start anew with --restart")
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
