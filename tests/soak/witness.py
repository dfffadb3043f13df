"""The oracles, from outside: a sink is read through `gm.read`, `gm.dead`, `gm.verify` and file by file."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq

import gristmill as gm
from soak.rows import KILLERS, Result

Values = tuple[tuple[str, Any], ...]


class Broken(AssertionError):
    """An oracle does not hold."""


def by_read(sink: str) -> list[Values]:
    """What is published, as `gm.read` gives it; an npy sink has no tables, so its files."""
    if _npy(sink):
        return by_files(sink)
    return tuples(gm.read(sink).to_table())


def by_files(sink: str) -> list[Values]:
    """What stands in the folder, as other programs find it."""
    if _npy(sink):
        manifest = pq.read_table(Path(sink, "manifest.parquet"))["output_path"].unique().to_pylist()
        names = sorted(str(p.relative_to(sink)) for p in _files(sink) if p.suffix == ".npy")
        same(sorted(manifest), names, "the parts that the manifest lists")
        return [row for name in manifest for row in _vectors(Path(sink, name))]
    lines = [p for p in _visible(sink) if ".jsonl" in p.name]
    if lines:
        return [row for path in lines for row in _lines(path)]
    glob = str(Path(sink, "**", "*.parquet"))
    with duckdb.connect() as db:
        try:
            found = db.read_parquet(glob, hive_partitioning=True)
            return tuples(found.to_arrow_table())
        except duckdb.IOException:  # there is no such file
            return []


def _npy(sink: str) -> bool:
    return any(p.suffix == ".npy" for p in _files(sink))


def _files(sink: str) -> Iterator[Path]:
    """The files of a sink but for its records, whose folders go while a run looks after them."""
    for folder, folders, names in os.walk(sink):
        folders[:] = [name for name in folders if name != "_gristmill"]
        yield from (Path(folder, name) for name in names)


def _visible(sink: str) -> list[Path]:
    """Data files that a glob finds, dead letters and what begins with an underscore left out."""
    return sorted(p for p in _files(sink) if not any(part.startswith(("_", ".")) for part in p.relative_to(sink).parts))


def _vectors(path: Path) -> list[Values]:
    others = pq.read_table(path.with_suffix(".ids.parquet")).to_pylist()
    vectors = np.load(path).tolist()
    if len(others) != len(vectors):
        raise Broken(f"{path} has {len(vectors)} vectors and {len(others)} ids")
    return [_values({**o, "vec": v}) for o, v in zip(others, vectors, strict=True)]


def _lines(path: Path) -> list[Values]:
    kind = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    with pa.input_stream(str(path), compression=kind) as stream:
        data = stream.read()
    hive = dict(p.split("=", 1) for p in path.parts if "=" in p)
    keys = {unquote(k): unquote(v) for k, v in hive.items()}
    return [_values({**json.loads(line), **keys}) for line in data.splitlines()]


def tuples(table: pa.Table) -> list[Values]:
    """Rows as sorted pairs, `row_id` included."""
    return [_values(row) for row in table.to_pylist()]


def _values(row: dict[str, Any]) -> Values:
    return tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in row.items()))


def without_ids(rows: Iterable[Values]) -> list[Values]:
    """Rows without the column `row_id`, whose values are the library's own."""
    return [tuple(pair for pair in row if pair[0] != "row_id") for row in rows]


def digest(rows: Iterable[Values]) -> str:
    """A name for a multiset of rows."""
    text = "\n".join(sorted(repr(row) for row in rows))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def dead(sink: str, has_parts: bool) -> Counter[tuple[Any, ...]]:
    """The dead letters by the user's id and part, and by the bytes of lines that could not be read."""
    letters = gm.dead(sink).to_pylist()
    places = Counter((x["source"], x["position"], x["copy"]) for x in letters)
    if twice := [place for place, n in places.items() if n > 1]:
        raise Broken(f"{len(twice)} dead letters stand twice, for example {twice[0]}")
    found: Counter[tuple[Any, ...]] = Counter()
    for letter in letters:
        payload = json.loads(letter["payload"])
        if "base64" in payload:
            found["line", base64.b64decode(payload["base64"])] += 1
        else:
            in_step = payload["fate"].startswith("after:") and payload["fate"].rstrip("!").endswith(KILLERS)
            found[payload["id"], payload.get("part") if has_parts and not in_step else None] += 1
    return found


# ---------------------------------------------------------------- what must hold


def same(got: Any, wanted: Any, what: str) -> None:
    """Raises Broken where two values differ."""
    if got != wanted:
        raise Broken(f"{what}: {str(got)[:600]}, wanted {str(wanted)[:600]}")


def same_rows(got: Iterable[Any], wanted: Iterable[Any], what: str) -> None:
    """Raises Broken, with examples, where two multisets differ."""
    a, b = Counter(got), Counter(wanted)
    lost, more = b - a, a - b
    if lost or more:
        shown = [
            f"{sum(c.values())} {word}, such as {next(iter(c))}"
            for word, c in (("missing", lost), ("too many", more))
            if c
        ]
        raise Broken(f"{what}: {a.total()} rows for {b.total()}; {'; '.join(shown)}")


def whole(sink: str, wanted: Result, *, has_parts: bool, ordered: bool) -> None:
    """The published result is the wanted one, from every side."""
    rows = by_read(sink)
    plain = without_ids(rows)
    same_rows(plain, wanted.ok(), "gm.read")
    same_rows(dead(sink, has_parts).elements(), wanted.dead().elements(), "gm.dead")
    same_rows(by_files(sink), rows, "the files themselves")
    if ordered and not wanted.moved:
        same([r for r in plain if r], wanted.ok(), "the order of the source")
    verdict = gm.verify(sink)
    if not verdict.ok:
        raise Broken(f"gm.verify: {verdict.lines[:5]}")
    status = gm.status(sink)
    counts = {n: status.get(n) for n in ("state", "rows_in", "rows_ok", "rows_dead", "rows_filtered")}
    same(counts, {"state": "done", **counted(wanted)}, "gm.status")
    ids = [dict(row).get("row_id") for row in rows]
    if ids and ids[0] is not None and len(set(ids)) != len(ids):
        raise Broken(f"row_id: {len(set(ids))} different ones for {len(ids)} rows")


def counted(wanted: Result) -> dict[str, int]:
    """The counts that a report must give."""
    return {
        "rows_in": len(wanted.outcomes),
        "rows_ok": len(wanted.of("ok")),
        "rows_dead": len(wanted.of("dead")),
        "rows_filtered": len(wanted.of("filtered")),
    }


def nothing_partial(sink: str) -> None:
    """What stands under a final name is whole, whatever was killed."""
    for path in Path(sink).rglob("*"):
        parts = path.relative_to(sink).parts
        if not path.is_file() or parts[0] == "_gristmill" or path.name.endswith(".tmp"):
            continue
        try:
            _opened(path)
        except Exception as e:
            raise Broken(f"{path} is not whole: {e}") from e


def _opened(path: Path) -> None:
    if path.name.endswith(".parquet"):
        pq.read_table(path, partitioning=None).validate(full=True)
    elif path.name.endswith(".npy"):
        np.load(path)
    elif path.name == "_SUCCESS":
        json.loads(path.read_text())
    elif ".jsonl" in path.name and path.stat().st_size:
        kind = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
        with pa.input_stream(str(path), compression=kind) as stream:
            data = stream.read()
        if data:
            if not data.endswith(b"\n"):
                raise ValueError("the last line is cut off")
            pj.read_json(pa.BufferReader(data), pj.ReadOptions(block_size=len(data) + 16))
