"""Publishing: linking committed parts to their names and replacing `_SUCCESS`, the one atomic step a reader sees.
Every step here can be done twice. Reading a published sink lives here too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from gristmill.commit.generation import META, SUCCESS, Generation, decode_schema, generations, meta, success
from gristmill.commit.places import opened
from gristmill.commit.receipt import Part, Receipt, standing
from gristmill.commit.store import LOCAL, join, seal, sha256_of
from gristmill.errors import BadJob, BadSource, CorruptStore, RunFailed
from gristmill.plan.contracts import Files

_OURS = re.compile(r"^(?:part-\d{7,}|merged)\.g(\d+)\b")
INLINE_FILES = 2000  # more live files than this are listed in a table beside the plan


@dataclass(frozen=True)
class Live:
    """A live file of a sink: its name, and what it must hold."""

    name: str
    rows: int
    bytes: int
    sha256: str
    role: str
    generation: int
    shard: int


def live_of(generation: Generation, receipts: Sequence[Receipt]) -> list[Live]:
    """The files that a generation's receipts commit."""
    return [
        Live(p.publish, p.rows, p.bytes, p.sha256, p.role, generation.number, r.shard)
        for r in receipts
        for p in r.parts
    ]


def link_parts(files: Files, generation: Generation, receipts: Sequence[Receipt]) -> None:
    """Give every committed part its published name. A name that is taken by the same content is fine, by other not."""
    parts = [part for receipt in receipts for part in receipt.parts]
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
            raise CorruptStore(f"{work}: committed, but the file is gone: run again with --restart") from None
    return target


def publish(files: Files, generation: Generation, about: dict[str, Any], live: Sequence[Live]) -> None:
    """Replace `_SUCCESS` by one that lists `live`: the one atomic step. `about` holds counts, model and digests."""
    listed: dict[str, Any] = {"files": [vars(f) for f in live]}
    if len(live) > INLINE_FILES:
        path = join(generation.folder, "live.parquet")
        digest = _write_table(files, path, live)
        listed = {"files_table": path[len(generation.root) + 1 :], "files_sha256": digest}
    body = {"format": 1, "generation": generation.number, **about, **listed}
    files.write_over(join(generation.root, SUCCESS), seal(body))
    clean(files, generation.root, generation.number, live)


def _write_table(files: Files, path: str, live: Sequence[Live]) -> str:
    import pyarrow.parquet as pq

    files.remove(path)
    with files.create(path) as out:
        pq.write_table(pa.Table.from_pylist([vars(f) for f in live]), out, compression="zstd")
        files.sync(out)
    digest = files.digest(path)[1]
    files.settle([path])
    return digest


def clean(files: Files, root: str, number: int, live: Sequence[Live]) -> None:
    """Remove what no longer counts up to generation `number`: parts that are not live, all work files and suspects.

    Done again by a run that finds nothing to do, because the one that published may have been killed before it was
    here.
    """
    for name in strangers(root, {f.name for f in live}, files):
        made = _OURS.match(os.path.basename(name))
        if made and int(made.group(1)) <= number:
            files.remove(join(root, name))
    for generation in generations(root, files):
        if generation.number <= number:
            files.remove_folder(generation.work)
            files.remove_folder(generation.suspects)


def clean_again(files: Files, root: str) -> None:
    """Finish the cleaning of the last run that published."""
    body, live = published(root, files)
    clean(files, root, int(body["generation"]), live)


def _live(root: str, body: dict[str, Any], files: Files) -> Iterator[Live]:
    if "files" in body:
        yield from (Live(**f) for f in body["files"])
        return
    import pyarrow.parquet as pq

    path = join(root, body["files_table"])
    if not files.same(path, "", -1, body["files_sha256"]):
        raise CorruptStore(f"{path}: missing or not what _SUCCESS says")
    with files.local(path) as name:
        yield from (Live(**row) for row in pq.read_table(name, partitioning=None).to_pylist())


# ---------------------------------------------------------------- reading a published sink


def published(root: str, files: Files = LOCAL) -> tuple[dict[str, Any], list[Live]]:
    """What `_SUCCESS` says and the live files. Raises BadSource where nothing is published."""
    root = os.fspath(root)
    body = success(root, files)
    if body is None:
        hint = "a run is unfinished here: run the job again" if files.holds(meta(root)) else "no run has published here"
        raise BadSource(f"{root}: no result ({hint})")
    return body, list(_live(root, body, files))


def read(sink: str, storage: Mapping[str, Any] | None = None, files: Files | None = None) -> Any:
    """A pyarrow Dataset of exactly the published parts, in the order of the source.

    Rows retried or appended later stand after the others. Raises BadSource where nothing is published or the sink's
    format is npy (read its manifest.parquet). `storage` holds options of an object store, as those of a sink.
    """
    import pyarrow.dataset as ds

    root, files = (os.fspath(sink), files) if files is not None else opened(os.fspath(sink), storage)
    body, live = published(root, files)
    schema = decode_schema(body["output_schema"])
    parts = [f for f in live if f.role == "rows"]
    if body["sink_format"] not in ("parquet", "jsonl"):
        raise BadSource(
            f"{root}: a {body['sink_format']} sink has no tables; read manifest.parquet and the files it names"
        )
    if not parts:
        return ds.dataset(schema.empty_table())
    partitioning = None
    if keys := body.get("partition_by"):
        partitioning = ds.HivePartitioning(pa.schema([schema.field(k) for k in keys]))
    paths = [join(root, f.name) for f in parts]
    if body["sink_format"] == "jsonl":
        return _json_dataset(paths, schema, files)
    return ds.dataset(
        paths, schema=schema, format="parquet", partitioning=partitioning, partition_base_dir=root,
        filesystem=files.arrow(),
    )  # fmt: skip


def _json_dataset(paths: list[str], schema: pa.Schema, files: Files) -> Any:
    import pyarrow.dataset as ds
    import pyarrow.json as pj

    if not any(p.endswith((".gz", ".zst")) for p in paths):
        return ds.dataset(paths, schema=schema, format="json", filesystem=files.arrow())
    options = pj.ParseOptions(explicit_schema=schema)
    tables = []
    for path in paths:
        with files.local(path) as name:
            stream = pa.input_stream(name, compression="gzip" if path.endswith(".gz") else "zstd")
            tables.append(pj.read_json(stream, parse_options=options))
    return ds.dataset(tables)


DEAD = pa.schema(
    [
        ("source", pa.string()),
        ("position", pa.int64()),
        ("copy", pa.int64()),
        ("stage", pa.string()),
        ("error", pa.string()),
        ("message", pa.string()),
        ("traceback", pa.string()),
        ("payload", pa.string()),
        ("generation", pa.int64()),
        ("shard", pa.int64()),
    ]
)


def dead(sink: str, storage: Mapping[str, Any] | None = None, files: Files | None = None) -> pa.Table:
    """The dead letters of a sink, schema DEAD; `payload` is JSON text. Where nothing is published yet, those that the
    unfinished run has committed.
    """
    root, files = (os.fspath(sink), files) if files is not None else opened(os.fspath(sink), storage)
    if (begun := unfinished(root, files)) is not None:
        parts = [part for done in standing(begun.receipts, files).values() for part in done.parts]
        return dead_letters(root, [p.work for p in parts if p.role == "dead"], files)
    _, live = published(root, files)
    return dead_letters(root, [f.name for f in live if f.role == "dead"], files)


def unfinished(root: str, files: Files = LOCAL) -> Generation | None:
    """The generation that has rows where nothing is published; None where something is, or no run has got so far."""
    known = generations(root, files) if success(root, files) is None else []
    return known[-1] if known and known[-1].planned else None


def dead_letters(root: str, names: Sequence[str], files: Files = LOCAL) -> pa.Table:
    """Dead-letter files as a table, schema DEAD."""
    rows = []
    for name in names:
        with files.local(join(root, name)) as path, open(path, encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                row["payload"] = json.dumps(row.get("payload"), ensure_ascii=False)
                rows.append(row)
    return pa.Table.from_pylist(rows, schema=DEAD)


@dataclass(frozen=True)
class Verdict:
    """What `verify` found. `lines` are readable; `ok` is whether everything is as it was published."""

    ok: bool
    lines: tuple[str, ...]
    files: int = 0
    rows: int = 0
    details: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"ok": self.ok, "lines": list(self.lines), "files": self.files, "rows": self.rows, **self.details}


def verify(root: str, sink_format: Any, files: Files = LOCAL) -> Verdict:
    """Recount and re-hash every live file against `_SUCCESS`. Names each one that is missing, changed or not live."""
    body, live = published(root, files)
    looked = files.map(lambda f: _wrong(root, f, sink_format, files), live)
    wrong = [line for line in looked if line is not None]
    wrong += [
        f"{name}: stands in the sink, but _SUCCESS does not list it"
        for name in strangers(root, {f.name for f in live}, files)
    ]
    rows = sum(f.rows for f in live if f.role == "rows")
    if rows != body["rows_ok"]:
        wrong.append(f"_SUCCESS counts {body['rows_ok']} rows, its files {rows}")
    lines = wrong or [f"{len(live)} files, {rows} rows: all as published"]
    return Verdict(not wrong, tuple(lines), len(live), rows)


def _wrong(root: str, f: Live, sink_format: Any, files: Files) -> str | None:
    try:
        with files.local(join(root, f.name)) as path:
            return _differs(path, f, sink_format)
    except FileNotFoundError:
        return f"{f.name}: missing ({f.rows} rows of shard {f.shard}, generation {f.generation})"


def _differs(path: str, f: Live, sink_format: Any) -> str | None:
    if os.path.getsize(path) != f.bytes:
        return f"{f.name}: {os.path.getsize(path)} bytes, published with {f.bytes}"
    if sha256_of(path) != f.sha256:
        return f"{f.name}: content changed (sha256 differs)"
    counted = count_lines(path) if f.role == "dead" else sink_format.count(path, f.role)
    return None if counted == f.rows else f"{f.name}: {counted} rows, published with {f.rows}"


def count_lines(path: str) -> int:
    """Newlines in a file."""
    with open(path, "rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def strangers(root: str, live: set[str], files: Files = LOCAL) -> list[str]:
    """Visible data files of a sink that are not in `live` (relative names), sorted."""
    found = []
    for relative in files.below(root, META):
        name = relative.rpartition("/")[2]
        ours = relative.startswith("_dead/")
        if relative not in live and (ours or not name.startswith(("_", "."))) and name != "manifest.parquet":
            found.append(relative)
    return sorted(found)


def refuse_foreign(root: str, overwrite: bool, files: Files = LOCAL) -> None:
    """Raises BadJob if a sink that no run of ours has used holds files already (fault 34)."""
    if overwrite or files.holds(meta(root)):
        return
    if names := strangers(root, set(), files):
        raise BadJob(
            f"{root}: holds {len(names)} files that no run of gristmill wrote ({names[0]}, …): give another sink, or "
            "--overwrite to write beside them"
        )


def write_manifest(files: Files, root: str, done: Sequence[Receipt], appended: bool) -> None:
    """npy's manifest.parquet: input_path, output_path, rows, one row for each pair, in plan order."""
    import pyarrow.parquet as pq

    path = join(root, "manifest.parquet")
    rows = _rows_of(files, path) if appended else []
    ours = {p.publish for r in done for p in r.parts}
    rows = [row for row in rows if row["output_path"] not in ours]
    for receipt in done:
        outputs = [p.publish for p in receipt.parts if p.role == "rows"]
        inputs = [(k.removeprefix("input:"), int(v)) for k, v in receipt.figures.items() if k.startswith("input:")]
        rows += [{"input_path": i, "output_path": outputs[0], "rows": n} for i, n in inputs if outputs]
    schema = pa.schema([("input_path", pa.string()), ("output_path", pa.string()), ("rows", pa.int64())])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink)
    files.write_over(path, sink.getvalue().to_pybytes())


def _rows_of(files: Files, path: str) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    try:
        return pq.read_table(pa.BufferReader(files.read(path))).to_pylist()  # type: ignore[no-any-return]
    except FileNotFoundError:
        return []
