"""An update keeps the answers of rows that are as they were, scores all others, and gives what scoring anew would."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import gristmill as gm

CALLS = os.path.join(tempfile.gettempdir(), f"gristmill-update-calls-{os.getpid()}")

Row = tuple[int | None, str | None, int]  # id, text, extra


def told(texts: Sequence[Any]) -> None:
    with open(CALLS, "a") as calls:
        calls.write("".join(f"{text}\n" for text in texts))


def calls() -> list[str]:
    """What the model was asked since the last look."""
    found = Path(CALLS).read_text().splitlines() if os.path.exists(CALLS) else []
    Path(CALLS).unlink(missing_ok=True)
    return found


def score(batch: dict[str, Any]) -> dict[str, Any]:
    told(batch["text"])
    if any(text == "bad" for text in batch["text"]):
        raise ValueError("a bad row")
    lengths = np.array([len(text) for text in batch["text"]], dtype=np.float32)
    return {"vector": np.stack([lengths, lengths * 2], axis=1), "shout": np.array([t.upper() for t in batch["text"]])}


def vector(batch: dict[str, Any]) -> dict[str, Any]:
    return {"vector": score(batch)["vector"]}


def words(row: dict[str, Any]) -> list[dict[str, Any]]:
    if row["text"] is None or row["text"] == "broken":
        raise ValueError("no text")
    return [{**row, "text": word} for word in row["text"].split()]


def short(batch: dict[str, Any]) -> np.ndarray:
    return np.array([text != "skip" for text in batch["text"]])


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {"twice": batch["vector"][:, 0] * 2 + batch["extra"]}


PLAIN = gm.model(score, takes={"text": "string not null"})


@dataclass(frozen=True)
class Shape:
    """A kind of job: its steps, its sink, and what its answers rest on besides the key."""

    sink: dict[str, Any]
    options: dict[str, Any]
    whole: bool = False  # answers rest on all columns
    uri: str = ""
    model: Any = PLAIN


SHAPES = {
    "by place": Shape({"keep": ["id", "extra"], "row_id": "rid"}, {"update": True}),
    "by key": Shape({"keep": ["id", "extra"], "row_id": "rid"}, {"update": {"key": ["id"]}}),
    "by the sink's key": Shape({"keep": ["extra"], "row_id": "rid", "key": ["id"]}, {"update": True}),
    "skipped nulls": Shape({"keep": ["id"]}, {"update": {"key": ["id"]}, "on_null": "skip"}),
    "a condition": Shape({"keep": ["extra"]}, {"update": {"key": "id"}, "steps": [gm.filter("extra < 6")]}),
    "expansions": Shape(
        {"keep": ["id", "extra"], "row_id": "rid", "model_version": "model"},
        {
            "update": {"key": ["id"]},
            "steps": [gm.filter("extra < 7"), gm.flat_map(words), gm.filter(short)],
            "post": [doubled],
        },
        whole=True,
    ),
    "expansions by key": Shape(
        {"keep": ["id"], "row_id": "rid", "key": ["id"]},
        {"update": True, "steps": [gm.flat_map(words)]},
        whole=True,
    ),
    "jsonl": Shape({"keep": ["id", "extra"], "format": "jsonl"}, {"update": {"key": ["id"]}}),
    "partitions": Shape({"keep": ["id"], "partition_by": ["extra"]}, {"update": {"key": ["id"]}}),
    "partitions by answer": Shape({"keep": ["id"], "partition_by": ["shout"]}, {"update": {"key": ["id"]}}),
    "merged": Shape({"keep": ["id", "extra"], "merge": True}, {"update": {"key": ["id"]}}),
    "files": Shape({"keep": ["id"], "files": 2}, {"update": True}),
    "sorted": Shape({"keep": ["id", "extra"], "sort_by": ["extra", "id"], "merge": True}, {"update": {"key": "id"}}),
    "one file": Shape({"keep": ["id", "extra"]}, {"update": {"key": ["id"]}}, uri="out.parquet"),
    "npy": Shape(
        {"keep": ["id", "extra"], "format": "npy"},
        {"update": {"key": ["id"]}},
        model=gm.model(vector, takes={"text": "string not null"}),
    ),
}


BY_KEY = ("by key", "by the sink's key", "jsonl", "partitions", "merged", "one file", "npy")  # of id and text alone


class Scene:
    """A source of a few files, and a job of some shape over it."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.folder, self.shape = folder, shape
        self.source = str(folder / "in")
        os.makedirs(self.source)
        self.night = 0

    def put(self, files: Sequence[Sequence[Row]]) -> None:
        """Make these the source's files; those that are as they were stay untouched."""
        for name in os.listdir(self.source):
            if int(name.split(".")[0]) >= len(files):
                os.unlink(os.path.join(self.source, name))
        for number, rows in enumerate(files):
            path = os.path.join(self.source, f"{number}.parquet")
            table = pa.table(
                [pa.array([r[i] for r in rows], t) for i, t in enumerate((pa.int64(), pa.string(), pa.int64()))],
                ["id", "text", "extra"],
            )
            if not os.path.exists(path) or not pq.read_table(path).equals(table):
                pq.write_table(table, path)
                self.night += 1
                os.utime(path, ns=(10**9 * self.night, 10**9 * self.night))

    def job(self, sink: str | None = None, **more: Any) -> gm.Job:
        uri = sink or str(self.folder / (self.shape.uri or "out/"))
        options = {**self.shape.options, "workers": 0, "shard_rows": 7, "gates": {"min_ok": 0.0, "allow_empty": True}}
        return gm.Job(self.source, self.shape.model, gm.sink(uri, **self.shape.sink), **{**options, **more})

    def run(self, **verbs: Any) -> Any:
        with _quiet():
            return self.job().run(**verbs)

    def outcome(self, sink: str | None = None) -> Any:
        """All that a reader sees."""
        uri = sink or str(self.folder / (self.shape.uri or "out/"))
        dead = gm.dead(uri).select(["source", "position", "copy", "stage", "error"]).to_pylist()
        return self.rows(uri), sorted(map(str, dead))

    def rows(self, uri: str) -> list[Any]:
        if self.shape.sink.get("format") == "npy":
            told = pq.read_table(os.path.join(uri, "manifest.parquet")).to_pylist()
            names = dict.fromkeys(row["output_path"] for row in told)
            vectors = [v for n in names for v in np.load(os.path.join(uri, n)).tolist()]
            ids = [r for n in names for r in pq.read_table(os.path.join(uri, n[:-4] + ".ids.parquet")).to_pylist()]
            counts: Counter[str] = Counter()
            for row in told:
                counts[row["input_path"]] += row["rows"]
            return [list(zip(vectors, ids, strict=True)), sorted(counts.items())]
        return list(gm.read(uri).to_table().to_pylist())

    def anew(self) -> Any:
        """The outcome of scoring all rows again."""
        uri = str(self.folder / "anew" / (self.shape.uri or "out/"))
        os.makedirs(self.folder / "anew", exist_ok=True)
        with _quiet():
            report = self.job(uri, update=None).run(restart=True)
        return self.outcome(uri), report.counts

    def check(self) -> None:
        """The sink verifies, and holds what scoring anew gives, but for where files of several parts are cut."""
        found = gm.verify(str(self.folder / (self.shape.uri or "out/")))
        assert found.ok, found.lines


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


IDS = st.one_of(st.none(), st.integers(0, 6))
TEXTS = st.sampled_from(["a", "b c", "d d e", "skip", "bad", "broken", "", None, "bad f", "skip skip"])
ROWS: Any = st.tuples(IDS, TEXTS, st.integers(0, 8))
FILES = st.lists(st.lists(ROWS, max_size=12), min_size=1, max_size=3)


@st.composite
def nights(draw: Any) -> list[list[list[Row]]]:
    """What a source holds on several nights: rows are edited, moved, repeated, removed and added."""
    files = draw(FILES)
    found = [files]
    for _ in range(draw(st.integers(1, 3))):
        files = [list(f) for f in files]
        for _ in range(draw(st.integers(0, 6))):
            what = draw(st.sampled_from(["edit", "extra", "move", "repeat", "remove", "add", "file", "no file"]))
            at = draw(st.integers(0, len(files) - 1))
            rows = files[at]
            if what == "file":
                files.append(draw(st.lists(ROWS, max_size=8)))
            elif what == "no file" and len(files) > 1:
                del files[at]
            elif what == "add" or not rows:
                rows.insert(draw(st.integers(0, len(rows))), draw(ROWS))
            else:
                n = draw(st.integers(0, len(rows) - 1))
                row = rows[n]
                if what == "edit":
                    rows[n] = (row[0], draw(TEXTS), row[2])
                elif what == "extra":
                    rows[n] = (row[0], row[1], draw(st.integers(0, 8)))
                elif what in ("move", "repeat"):
                    to = files[draw(st.integers(0, len(files) - 1))]
                    if what == "move":
                        del rows[n]
                    to.insert(draw(st.integers(0, len(to))), row)
                elif what == "remove":
                    del rows[n]
        found.append(files)
    return found


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=2, phases=[Phase.generate])
@given(told=nights())
@pytest.mark.few(3)
def test_update_is_scoring_anew(name: str, told: list[list[list[Row]]]) -> None:
    """Whatever changes from night to night, the result is that of scoring all rows, and verifies."""
    updated(name, told)


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=40, phases=[Phase.generate])
@given(told=nights())
def test_update_is_scoring_anew_often(name: str, told: list[list[list[Row]]]) -> None:
    """The same, for many more sources."""
    updated(name, told)


def updated(name: str, told: list[list[list[Row]]]) -> None:
    """A source on several nights, each held against scoring all of it."""
    shape = SHAPES[name]
    before: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(prefix="update-"))
    try:
        scene = Scene(folder, shape)
        for number, files in enumerate(told):
            scene.put(files)
            report = scene.run()
            calls()
            scene.check()
            (rows, dead), counts = scene.anew()
            got, letters = scene.outcome()
            assert (got, letters) == (rows, dead), (number, files)
            assert report.counts == counts
            calls()
            if report.updated and name in BY_KEY and before.get("ok"):
                kept = sum((i, text) in before["alive"] for f in files for i, text, _ in f)
                assert report.updated["kept"] == kept, (number, files)
            alive = {(i, text) for f in files for i, text, _ in f if text not in (None, "bad")}
            before = {"ok": report.rows_ok, "alive": alive}
    finally:
        shutil.rmtree(folder)
