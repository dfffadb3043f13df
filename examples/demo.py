"""`make demo`: embeds 13,905 film reviews with one command, then searches them by meaning.

    python examples/demo.py "a love story with a sad end"

Everything it makes is in the folder `demo`: the reviews as Parquet files, the model, the embeddings. A second run finds
that there is nothing left to embed and goes straight to the search.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

import gristmill as gm

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_QUERY = "a love story that made me cry"
NEAREST = 8

REVIEWS = Path("demo/reviews")
MODEL = Path("demo/minilm-int8")
EMBEDDINGS = Path("demo/emb")


def prepare() -> None:
    """Writes the reviews and the model once: rewritten files would rightly count as other input."""
    sys.path.insert(0, str(ROOT / "tests"))
    import kit

    if not MODEL.is_dir():
        shutil.copytree(kit.minilm_int8(), "demo/.model", dirs_exist_ok=True)
        Path("demo/.model").rename(MODEL)
    if not REVIEWS.is_dir():
        kit.write_reviews("demo/.reviews", files=4)
        Path("demo/.reviews").rename(REVIEWS)


def embed() -> int:
    """Runs the real command, with the terminal; returns its exit code."""
    command = ["gristmill", "embed", str(REVIEWS), str(EMBEDDINGS), "--text", "text", "--model", str(MODEL)]
    command += ["--keep", "review_id,movie_name,category,text"]
    print(f"$ {shlex.join(command)}", flush=True)
    # Ctrl-C reaches the command too, which stops in an orderly way; this process only waits for it.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        return subprocess.Popen([str(Path(sys.executable).with_name(command[0])), *command[1:]]).wait()
    finally:
        signal.signal(signal.SIGINT, before)


def nearest(query: str) -> list[tuple[float, dict[str, object]]]:
    """The reviews nearest to the query: vectors are normalised, so one matrix product gives every cosine."""
    reviews = gm.read(str(EMBEDDINGS)).to_table()
    vectors = matrix(reviews["embedding"])
    asked = gm.embed(pa.table({"text": [query]}), text="text", model=str(MODEL))
    cosines = vectors @ matrix(asked["embedding"])[0]
    found: dict[str, tuple[float, dict[str, object]]] = {}
    for row in np.argsort(-cosines, kind="stable")[: 4 * NEAREST].tolist():
        review = reviews.select(["movie_name", "category", "text"]).slice(row, 1).to_pylist()[0]
        found.setdefault(str(review["text"]), (float(cosines[row]), review))  # some reviews are there twice
    return list(found.values())[:NEAREST]


def matrix(column: pa.ChunkedArray) -> np.ndarray:
    """A column of fixed-size lists as one two-dimensional array."""
    column = column.combine_chunks()
    return column.flatten().to_numpy().reshape(len(column), -1)


def show(query: str, found: list[tuple[float, dict[str, object]]]) -> None:
    """Prints what was found as a table."""
    table = Table(title=f"nearest to “{query}”", title_justify="left", show_lines=False, expand=True)
    table.add_column("cosine", justify="right")
    table.add_column("film", max_width=28)
    table.add_column("", max_width=6)
    table.add_column("review", ratio=1)
    for cosine, review in found:
        text = " ".join(str(review["text"]).split())
        text = text if len(text) <= 220 else text[:219] + "…"
        table.add_row(f"{cosine:.3f}", str(review["movie_name"]).strip(), str(review["category"]), text)
    console = Console()
    console.print()
    console.print(table)
    console.print('Another search: make demo QUERY="a heist that goes wrong"', markup=False, highlight=False)


def main() -> int:
    """The demo; returns the exit code of `gristmill embed` when it is not 0."""
    query = " ".join(sys.argv[1:]).strip() or os.environ.get("QUERY", "").strip() or DEFAULT_QUERY
    os.chdir(ROOT)
    prepare()
    if code := embed():
        return code
    show(query, nearest(query))
    return 0


if __name__ == "__main__":
    sys.exit(main())
