"""The rows of a soak, their source files, and the reference: what must become of each row, in plain Python."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from soak.scoring import ANSWERS, HARM, copies, due

KILLERS = ("segv", "exit", "abort", "hang", "gil")
SCHEMA = pa.schema(
    [("id", pa.int64()), ("x", pa.float64()), ("s", pa.string()), ("fate", pa.string()), ("day", pa.string())]
)
TYPES = {"id": "int64", "x": "float64", "s": "string", "fate": "string", "day": "string"}
TEXTS = ["plain", "Zażółć", 'a "quoted" word', "two\nlines", "tab\tand, comma", "漢字 🙂", " edges ", "null", "NaN"]
BAD_LINES = [b'{"id": 5, broken', b"not json", b'{"id": 1, "s": "\xff\xfe"}', b"[1, 2]", b'{"id": "seven"}', b"17"]


@dataclass(frozen=True)
class Row:
    """A source row; `line` are the bytes of one that cannot be read."""

    id: int
    x: float = 0.0
    s: str | None = None
    fate: str = "ok"
    day: str | None = None
    line: bytes | None = None

    def plain(self) -> dict[str, Any]:
        return {"id": self.id, "x": self.x, "s": self.s, "fate": self.fate, "day": self.day}


@dataclass(frozen=True)
class Shape:
    """What the job does to rows: which steps it has."""

    before: bool = False
    admitted: bool = False
    flat_map: bool = False
    after: bool = False
    post: bool = False

    def stages(self) -> list[str]:
        """Stages at which a row may come to harm."""
        return [s for s in ("before", "after", "post") if getattr(self, s)] + ["model"] + ["expand"] * self.flat_map


@dataclass(frozen=True)
class Outcome:
    """What became of a row: "ok", "dead" or "filtered". `values` are the published columns of one that is ok."""

    kind: str
    key: tuple[Any, ...]  # (id, part); part None for a whole source row, or where there are none
    whole: bool = False
    values: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class File:
    """A source file and its rows."""

    name: str
    rows: tuple[Row, ...]


@dataclass
class Result:
    """What stands published: outcomes of each source row, in their order; `moved` once rows were retried."""

    outcomes: dict[tuple[str, int], list[Outcome]] = field(default_factory=dict)
    moved: bool = False

    def of(self, kind: str) -> list[Outcome]:
        return [o for row in self.outcomes.values() for o in row if o.kind == kind]

    def dead(self) -> Counter[tuple[Any, ...]]:
        return Counter(o.key for o in self.of("dead"))

    def ok(self) -> list[tuple[tuple[str, Any], ...]]:
        return [o.values for o in self.of("ok")]


def scored(files: Iterable[File], shape: Shape, keep: Sequence[str], version: int, cures: str) -> Result:
    """The result of scoring files from nothing."""
    return Result({(f.name, n): outcomes(r, shape, keep, version, cures) for f in files for n, r in enumerate(f.rows)})


def appended(
    base: Result, files: Iterable[File], shape: Shape, keep: Sequence[str], version: int, cures: str
) -> Result:
    """The base and the rows of new files."""
    known = {name for name, _ in base.outcomes}
    new = scored([f for f in files if f.name not in known], shape, keep, version, cures)
    return Result({**base.outcomes, **new.outcomes}, base.moved)


def retried(base: Result, files: Iterable[File], shape: Shape, keep: Sequence[str], version: int, cures: str) -> Result:
    """The base with its dead rows scored again."""
    again = scored(files, shape, keep, version, cures).outcomes
    made: dict[tuple[str, int], list[Outcome]] = {}
    for place, old in base.outcomes.items():
        if any(o.kind == "dead" and o.whole for o in old):
            made[place] = again[place]
        else:
            # One after the other: a row that is cured has a number, which it did not have as its step's victim.
            made[place] = [new if o.kind == "dead" else o for o, new in zip(old, again[place], strict=True)]
    return Result(made, True)


def outcomes(row: Row, shape: Shape, keep: Sequence[str], version: int, cures: str) -> list[Outcome]:
    """What must become of one source row."""
    if row.line is not None:
        return [Outcome("dead", ("line", row.line), True)]
    if row.fate == "drop" or (row.fate == "dropf" and shape.admitted):
        return [Outcome("filtered", (row.id, None), True)]
    for stage, there in (("before", shape.before), ("expand", shape.flat_map)):
        if there and due(row.fate, stage, row.id, 0, cures):
            return [Outcome("dead", (row.id, None), True)]
    parts = range(copies(row.fate)) if shape.flat_map else [0]
    return [_derived(row, part, shape, keep, version, cures) for part in parts]


def _derived(row: Row, part: int, shape: Shape, keep: Sequence[str], version: int, cures: str) -> Outcome:
    key = (row.id, part if shape.flat_map else None)
    for stage, there in (("after", shape.after), ("model", True), ("post", shape.post)):
        if there and due(row.fate, stage, row.id, part, cures) in {*HARM, *ANSWERS}:
            if stage == "after" and row.fate.rstrip("!").endswith(KILLERS):
                key = (row.id, None)
            return Outcome("dead", key, not shape.flat_map)
    y = row.x * 2.0 + part + version
    y += row.x + 0.5 if shape.before else 0.0
    y += part * 10.0 if shape.after else 0.0
    made: dict[str, Any] = {"id": row.id, "day": row.day, "part": part, "y": y, "w": row.id * version}
    made |= {"t": f"{row.s}|{part}", "vec": (row.x, float(part), float(version), float(part % 4)), "z": y + 0.25}
    names = [*keep, "y", "w", "t", "vec", *(["z"] if shape.post else [])]
    return Outcome("ok", key, not shape.flat_map, tuple(sorted((n, made[n]) for n in names)))


# ---------------------------------------------------------------- making them


def fates(chance: Random, count: int, shape: Shape, poison: Sequence[str]) -> list[str]:
    """Fates of `count` rows: most are well, some are filtered or divided, the poison is put anywhere."""
    plain = ["ok"] * 12 + ["drop"] * 2 + ["dropf"] * shape.admitted + ["split:0", "split:2", "split:3"] * shape.flat_map
    made = [chance.choice(plain) for _ in range(count)]
    for what in poison:
        made[chance.randrange(count)] = what
    return made


def poison(chance: Random, shape: Shape, kinds: Sequence[str], count: int) -> list[str]:
    """Fates that do harm; half of them are curable, and some of derived rows."""
    made = []
    for _ in range(count):
        harm = chance.choice(kinds)
        stage = "model" if harm in ANSWERS else chance.choice(shape.stages())
        # A row that kills its worker in a step is isolated as the source row that it came from.
        single = not shape.flat_map or stage not in ("after", "model", "post") or (stage == "after" and harm in KILLERS)
        at = "" if single else f"@{chance.randrange(3)}"
        made.append(f"{stage}:{harm}{at if chance.random() < 0.7 else ''}{chance.choice(['', '!'])}")
    return made


def make_file(chance: Random, name: str, first: int, count: int, bad_fates: Sequence[str], shape: Shape) -> File:
    """A file of `count` rows whose ids begin at `first`. Names that end in .jsonl or .jsonl.gz may hold bad lines."""
    text = not name.endswith(".csv")
    rows = [
        Row(i, i * 0.25, None if text and chance.random() < 0.05 else chance.choice(TEXTS), fate,
            chance.choice(["2026-01-01", "2026-01-02", "a=b/c", "é"]))
        for i, fate in enumerate(fates(chance, count, shape, bad_fates), first)
    ]  # fmt: skip
    if ".jsonl" in name:
        for n in range(chance.choice([0, 0, 1, 3])):
            rows.insert(chance.randrange(1, len(rows) + 1), Row(-1 - n, line=chance.choice(BAD_LINES)))
    return File(name, tuple(rows))


def write(folder: Path, file: File, chance: Random) -> None:
    """The file on disk, whole at once."""
    path, hidden = folder / file.name, folder / f".{file.name}.part"
    if file.name.endswith(".parquet"):
        table = pa.Table.from_pylist([r.plain() for r in file.rows], schema=SCHEMA)
        pq.write_table(table, hidden, row_group_size=chance.choice([37, 100, 100_000]))
    elif file.name.endswith(".csv"):
        with open(hidden, "w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, list(TYPES), quoting=csv.QUOTE_NONNUMERIC)
            writer.writeheader()
            writer.writerows(r.plain() for r in file.rows)
    else:
        lines = [r.line or json.dumps(r.plain(), ensure_ascii=chance.random() < 0.5).encode() for r in file.rows]
        data = b"\n".join(lines) + chance.choice([b"", b"\n"])
        hidden.write_bytes(gzip.compress(data) if file.name.endswith(".gz") else data)
    hidden.rename(path)
