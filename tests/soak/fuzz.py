"""The fuzz: random schemas, files, steps and options; a reference in plain Python says what becomes of each row."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import gristmill as gm
from soak import columns, rowwise
from soak.witness import Broken, same, same_rows

FORMS = ("numpy", "rows", "arrow", "pandas", "polars")
EXACT = ("arrow",)  # formats that hold every Arrow type; the others have libraries of their own between
STRETCH = 40  # rows that are neighbours: several windows of the smaller ones
BAD_LINES = [b'{"id": 5, broken', b"no json", b'{"id": "\xff"}', b"[1]", b'{"id": "seven"}', b"null"]
# A job may be refused before anything runs, for reasons that a person can read; each is counted.
REFUSALS = (r"partition_by names", r"npy sink", r"jsonl sink")


@dataclass
class Part:
    """A row on its way: where it came from, and what steps added to it."""

    origin: int
    id: int
    made: dict[str, int] = field(default_factory=dict)


@dataclass
class Fates:
    """What the reference says."""

    alive: list[Part]
    dead: list[int] = field(default_factory=list)  # ids
    filtered: int = 0
    exact: bool = True  # whether it is known how many are filtered


@dataclass
class Op:
    """A step of the job, and what it does to the reference's rows."""

    step: Any
    kind: str
    m: int = 0
    name: str = ""
    every: int = 0

    def on(self, f: Fates) -> None:
        if self.every:
            f.dead += [p.id for p in f.alive if p.id % self.every == 0]
            f.alive = [p for p in f.alive if p.id % self.every]
        if self.kind == "drop":
            f.filtered += sum(p.id % self.m == 1 for p in f.alive)
            f.alive = [p for p in f.alive if p.id % self.m != 1]
        elif self.kind == "stretch":  # windows of which no row is left
            f.filtered += sum(p.id // STRETCH % self.m == 1 for p in f.alive)
            f.alive = [p for p in f.alive if p.id // STRETCH % self.m != 1]
        elif self.kind == "add":
            for p in f.alive:
                p.made[self.name] = p.id * self.m
        elif self.kind == "twice":
            f.alive = [Part(p.origin, p.id, dict(p.made)) for p in f.alive for _ in range(1 + (p.id % self.m == 1))]
        elif self.kind == "split":
            f.alive = [Part(p.origin, p.id, {**p.made, self.name: j}) for p in f.alive for j in range(p.id % self.m)]


@dataclass
class Case:
    """One random job."""

    name: str
    folder: Path
    workers: int = 0
    without: tuple[str, ...] = ()
    story: str = ""
    refused: str = ""

    def run(self) -> None:
        """Make it, run it, compare. Raises Broken."""
        self._c = c = Random(self.name)
        self.kind = self._some("parquet", "parquet", "parquet", "jsonl source", "csv", "memory").split()[0]
        rows = c.choice([1, 2, 30, 150, 400])
        self.table = self._table(rows)
        self.forms = FORMS if all(_common(f.type) for f in self.table.schema) else EXACT
        self.bad: list[bytes] = []
        self.source = self._source()
        ops, self.post = self._ops(), self._post()
        post = self.post
        job, keep, echo = self._job(ops, post)
        self.story = f"{self.kind} {rows} rows {self.table.schema.types} ops {[o.kind for o in ops]} {self.options}"
        fates = self._reference(ops, post)
        self._through(job, fates, keep, echo)

    def _some(self, *names: Any) -> Any:
        return self._c.choice([n for n in names if n not in self.without])

    # ------------------------------------------------ the source

    def _table(self, rows: int) -> pa.Table:
        c = self._c
        kinds = {"jsonl": columns.JSON_KINDS, "csv": columns.CSV_KINDS}.get(self.kind)
        made = {"id": pa.array(c.sample(range(1, rows * 3 + 2), rows), pa.int64())}
        made["x"] = pa.array(range(rows), pa.int64())
        folders = ["a", "b/c", "d=e", "%41", "é", "_f", ".g", "", None]
        made["p"] = pa.array([c.choice(folders) for _ in range(rows)], pa.string())
        for n in range(c.choice([0, 1, 3, 6])):
            of = c.choice(kinds) if kinds else columns.kind(c)
            made[c.choice([f"c{n}", f"C {n}", f"é{n}", f"c.{n}"])] = columns.column(
                c, of, rows, c.choice([0, 0, 0.2, 1])
            )
        table = pa.table(made)
        if self.kind in ("jsonl", "csv"):
            table = table.cast(table.schema)
            table = _json_values(table, empty_is_null=self.kind == "csv")
        return table

    def _source(self) -> Any:
        c, folder = self._c, self.folder / "in"
        options: dict[str, Any] = {}
        if c.random() < 0.3:
            options["where"] = "id % 5 <> 2"
        if c.random() < 0.2:
            options["limit"] = c.choice([1, 10, 200])
        self.chosen = options
        if self.kind == "memory":
            return gm.Source(data=self.table, **options)
        folder.mkdir()
        edges = sorted(
            {0, *(c.randrange(self.table.num_rows + 1) for _ in range(c.choice([0, 1, 3]))), self.table.num_rows}
        )
        suffix = self.kind + (c.choice(["", ".gz", ".zst"]) if self.kind == "jsonl" else "")
        for n, (a, b) in enumerate(itertools.pairwise(edges)):
            self._write(folder / f"{n:02d}.{suffix}", self.table.slice(a, b - a))
        if self.kind != "parquet":
            options["types"] = {f.name: _type_name(f.type) for f in self.table.schema if not pa.types.is_struct(f.type)}
        return gm.source(str(folder / f"*.{suffix}"), **options)

    def _write(self, path: Path, table: pa.Table) -> None:
        c = self._c
        if self.kind == "parquet":
            pq.write_table(
                table, path, row_group_size=c.choice([1, 7, 64, 10_000]), use_dictionary=c.random() < 0.5,
                compression=c.choice(["none", "zstd", "snappy"]), data_page_version=c.choice(["1.0", "2.0"]),
            )  # fmt: skip
            return
        if self.kind == "csv":
            with open(path, "w", newline="", encoding="utf-8") as out:
                writer = csv.writer(out, quoting=c.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
                                    lineterminator=c.choice(["\n", "\r\n"]))  # fmt: skip
                writer.writerow(table.column_names)
                for row in table.to_pylist():
                    writer.writerow([_csv_text(v) for v in row.values()])
            return
        lines = [json.dumps(r, ensure_ascii=c.random() < 0.5).encode() for r in table.to_pylist()]
        for _ in range(0 if "limit" in self.chosen else c.choice([0, 0, 2])):  # which count towards a limit
            self.bad.append(c.choice(BAD_LINES))
            lines.insert(c.randrange(len(lines) + 1), self.bad[-1])
        lines = [part for line in lines for part in ([line, b"", b"  "] if c.random() < 0.02 else [line])]
        data = c.choice([b"\n", b"\n", b"\r\n"]).join(lines) + c.choice([b"", b"\n"])
        if path.suffix == ".gz":
            data = gzip.compress(data)
        if path.suffix == ".zst":
            data = pa.compress(data, codec="zstd", asbytes=True)
        path.write_bytes(data)

    # ------------------------------------------------ the job

    def _ops(self) -> list[Op]:
        c, ops = self._c, []
        self.every = dict.fromkeys(("step", "split", "model", "post", "nan"), 0)
        for n in range(c.choice([0, 0, 1, 2, 4])):
            m, every = c.choice([2, 3, 5]), c.choice([0, 0, 37])
            form = c.choice(self.forms)
            kind = self._some("sql", "stretch", "filter", "rows", "add", "replace", "twice", "split")
            if self.forms is EXACT and kind in ("rows", "twice", "split"):
                kind = "add"
            if kind == "sql":
                ops.append(Op(gm.filter(f"id % {m} <> 1"), "drop", m))
            elif kind == "stretch":
                ops.append(Op(gm.filter(f"id // {STRETCH} % {m} <> 1"), "stretch", m))
            elif kind == "filter":
                ops.append(Op(gm.filter(rowwise.unless, batch_format=form, m=m), "drop", m))
            elif kind == "rows":
                ops.append(Op(gm.step(rowwise.rows_unless, m=m), "drop", m))
            elif kind in ("add", "replace"):
                name = "x" if kind == "replace" else f"m{n}"
                step = gm.step(rowwise.times, batch_format=form, name=name, factor=n + 2, every=every)
                ops.append(Op(step, "add", n + 2, name, every))
            elif kind == "twice":
                ops.append(Op(gm.step(rowwise.rows_twice, m=m), "twice", m))
            else:
                step = gm.flat_map(rowwise.split, name=f"j{n}", m=m + 1, every=every)
                ops.append(Op(step, "split", m + 1, f"j{n}", every))
        return ops

    def _post(self) -> list[Op]:
        c, post = self._c, []
        for n in range(c.choice([0, 0, 1, 2])):
            every = c.choice([0, 41])
            step = gm.step(rowwise.times, batch_format=c.choice(self.forms), name=f"z{n}", factor=n + 7, every=every)
            post.append(Op(step, "add", n + 7, f"z{n}", every))
        return post

    def _job(self, ops: Sequence[Op], post: Sequence[Op]) -> tuple[gm.Job, list[str], list[str]]:
        c, names = self._c, self.table.column_names
        keep = ["id", *c.sample(names[1:], c.randrange(len(names)))]
        form = c.choice(self.forms)
        shape = "rows" if form == "rows" else form
        exact = [n for n in names if _survives(self.table.schema.field(n).type, self.table[n], form) and n != "x"]
        echo = c.sample(exact, min(len(exact), c.choice([0, 1, 3])))
        self.every["model"], self.every["nan"] = c.choice([0, 0, 43]), c.choice([0, 0, 29])
        floats = any(_floats(self.table.schema.field(n).type) for n in echo)
        if floats:
            self.every["nan"] = 0
        self.stop = self.folder / "stop"
        args = {
            "shape": shape,
            "echo": echo,
            "every": self.every["model"],
            "nan": self.every["nan"],
            "stop": str(self.stop),
        }
        sink: dict[str, Any] = {"keep": keep, "format": self._some("parquet", "parquet", "jsonl")}
        if sink["format"] == "jsonl":
            sink["options"] = {"compression": c.choice([None, "gz", "zst"])}
        layout = self._some(None, None, "partition", "merge")
        if layout == "partition":
            sink["partition_by"] = ["p"]
            keep = keep if "p" in keep else [*keep, "p"]
            sink["keep"] = c.choice([keep, [n for n in keep if n != "p"]])  # what names folders is kept without it
        elif layout == "merge":
            sink["merge"] = True
        if layout != "merge" and c.random() < 0.3:
            sink["files"] = c.choice([1, 2, 5])
        if c.random() < 0.3:
            sink["sort_by"] = ["p"]
            keep = sink["keep"] if "p" in sink["keep"] else [*sink["keep"], "p"]
            sink["keep"] = c.choice([keep, [n for n in keep if n != "p"]])
        if c.random() < 0.3:
            sink |= {"row_id": "rid"}
        running = {
            "shard_rows": c.choice([1, 9, 60, "auto"] if self.table.num_rows < 100 else [25, 100, "auto"]),
            "batch_rows": c.choice([1, 5, 64, "auto"]),
            "window_bytes": c.choice([1000, 16 << 20]),
        }
        self.options = {
            "form": form,
            "echo": echo,
            **sink,
            **running,
            **self.chosen,
            "every": self.every,
            "workers": self.workers,
        }
        job = gm.Job(
            self.source, gm.model(rowwise.model, batch_format=form, **args), gm.sink(str(self.folder / "out"), **sink),
            steps=[o.step for o in ops], post=[o.step for o in post], workers=self.workers,
            on_nan="keep" if floats else "dead", gates={"min_ok": 0, "warn_failed": 1, "allow_empty": True}, **running,
        )  # fmt: skip
        return job, keep, echo

    # ------------------------------------------------ what must be

    def _reference(self, ops: Sequence[Op], post: Sequence[Op]) -> Fates:
        numbers = self.table["id"].to_pylist()
        fates = Fates([Part(n, i) for n, i in enumerate(numbers)])
        if "where" in self.chosen:
            fates.filtered += sum(p.id % 5 == 2 for p in fates.alive)
            fates.alive = [p for p in fates.alive if p.id % 5 != 2]
        if "limit" in self.chosen:
            self.limited = fates.alive[self.chosen["limit"] :]
            fates.alive = fates.alive[: self.chosen["limit"]]
        for op in ops:
            op.on(fates)
        for every in (self.every["model"], self.every["nan"]):
            if every:
                fates.dead += [p.id for p in fates.alive if p.id % every == 0]
                fates.alive = [p for p in fates.alive if p.id % every]
        for op in post:
            op.on(fates)
        if "partition_by" in self.options:  # Hive has one folder for null and the empty text
            empty = {i for i, p in zip(numbers, self.table["p"].to_pylist(), strict=True) if p == ""}
            fates.dead += [p.id for p in fates.alive if p.id in empty]
            fates.alive = [p for p in fates.alive if p.id not in empty]
        kinds = [op.kind for op in ops if op.kind in ("split", "twice")]
        fates.exact = "split" not in kinds[1:]  # else rows that it makes none of are filtered or not
        return fates

    def _through(self, job: gm.Job, fates: Fates, keep: list[str], echo: list[str]) -> None:
        interrupted = self._c.random() < 0.2 and self.workers == 0
        if interrupted:
            self.stop.mkdir()
        warnings.simplefilter("ignore", gm.GristmillWarning)
        try:
            report = job.run()
        except gm.BadJob as e:
            self._refused(e)
            return
        except KeyboardInterrupt:  # also gm.Interrupted
            report = job.run()
        self._compare(report, fates, keep, echo)
        again = job.run()
        same(again.rows_ok, report.rows_ok, "rows_ok of a run with nothing to do")
        if self._c.random() < 0.15 and "restart" not in self.without:
            self._compare(job.run(restart=True), fates, keep, echo)

    def _refused(self, e: gm.BadJob) -> None:
        if not any(re.search(pattern, str(e)) for pattern in REFUSALS):
            raise Broken(f"refused: {type(e).__name__}: {e}") from e
        self.refused = re.sub(r"'[^']*'|\d+", "…", str(e))[:120]

    def _compare(self, report: Any, fates: Fates, keep: list[str], echo: list[str]) -> None:
        sink = str(self.folder / "out")
        table = gm.read(sink).to_table()
        given = {n: columns.plains(self.table[n]) for n in {*keep, *echo}}
        wanted = [self._row(p, keep, echo, given) for p in fates.alive]
        names = [*keep, *(f"e_{n}" for n in echo), "h", "f", *self._post_names()]
        missing = [n for n in names if n not in table.column_names]
        if missing and wanted:  # what a model gives that was never called, nobody knows
            raise Broken(f"no column {missing} in {table.column_names}")
        got = (
            list(zip(*(columns.plains(table[n]) for n in names), strict=True)) if table.num_rows and not missing else []
        )
        same_rows(got, wanted, "gm.read")
        for n in keep if wanted else []:
            if n not in ("x", "p") and not (
                self.kind == "jsonl" and pa.types.is_struct(self.table.schema.field(n).type)
            ):
                of = self.table.schema.field(n).type
                same(table.schema.field(n).type, getattr(of, "value_type", of) if pa.types.is_dictionary(of) else of,
                     f"the type of {n}")  # fmt: skip
        letters = [json.loads(p) for p in gm.dead(sink)["payload"].to_pylist()]
        same_rows([x["id"] for x in letters if "id" in x], fates.dead, "gm.dead")
        limited = "limit" in self.chosen
        bad = sum("id" not in x for x in letters)
        if not limited:
            same(bad, len(self.bad), "unreadable lines")
            same(report.rows_in, self.table.num_rows + bad, "rows_in")
            if fates.exact:
                same(report.rows_filtered, fates.filtered, "rows_filtered")
        same((report.rows_ok, report.rows_dead), (len(wanted), len(fates.dead) + bad), "the report's rows ok and dead")
        verdict = gm.verify(sink)
        if not verdict.ok:
            raise Broken(f"gm.verify: {verdict.lines[:3]}")
        if "rid" in table.column_names and len(set(table["rid"].to_pylist())) != table.num_rows:
            raise Broken("row ids are not distinct")

    def _post_names(self) -> list[str]:
        return sorted({o.name for o in self.post})

    def _row(self, p: Part, keep: list[str], echo: list[str], given: dict[str, list[Any]]) -> tuple[Any, ...]:
        f = columns.plain(pa.scalar(p.id * 0.5))
        kept = [p.made.get(n, given[n][p.origin]) if n == "x" else given[n][p.origin] for n in keep]
        return (
            *kept,
            *(given[n][p.origin] for n in echo),
            rowwise.answer(p.id),
            f,
            *(p.made[n] for n in self._post_names()),
        )


def _common(of: pa.DataType) -> bool:
    """Whether every batch format has something for a type."""
    t = pa.types
    if t.is_list(of):
        return _common(of.value_type)
    return (
        t.is_integer(of)
        or t.is_float32(of)
        or t.is_float64(of)
        or t.is_string(of)
        or t.is_boolean(of)
        or t.is_date32(of)
    )


def _floats(of: pa.DataType) -> bool:
    if pa.types.is_nested(of):
        return any(_floats(of.field(n).type) for n in range(of.num_fields))
    return bool(pa.types.is_floating(of))


def _survives(of: pa.DataType, values: Any, form: str) -> bool:
    """Whether a column goes through a batch format and back without another type or value."""
    if form == "arrow":
        return True
    return of in (pa.int64(), pa.string(), pa.float64()) and values.null_count == 0 and not (
        form == "pandas" and pa.types.is_floating(of)
    )  # fmt: skip


def _json_values(table: pa.Table, empty_is_null: bool) -> pa.Table:
    """The table without what JSON or CSV cannot hold: NaN, infinities; in CSV an empty text is a null."""

    def fit(v: Any) -> Any:
        if isinstance(v, float) and (v != v or abs(v) == float("inf")):
            return 1.0
        if isinstance(v, list):
            return [fit(x) for x in v]
        return None if empty_is_null and v == "" else v

    made = {n: pa.array([fit(v) for v in table[n].to_pylist()], table.schema.field(n).type) for n in table.column_names}
    return pa.table(made)


def _csv_text(value: Any) -> Any:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else value


def _type_name(of: pa.DataType) -> str:
    if pa.types.is_list(of):
        return f"list<{of.value_type}>"
    return str(of)
