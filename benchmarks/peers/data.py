"""The inputs of the benchmarks, made once into a folder: `python data.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

FEATURES = [f"f{i}" for i in range(16)]


def cheap(folder: Path, rows: int = 3_000_000) -> None:
    """`rows` of 16 float32 features and an id, row groups of 122,880 rows; weights of a softmax regression beside
    them.
    """
    rng = np.random.default_rng(0)
    columns = {"id": np.arange(rows), **{f: rng.standard_normal(rows, dtype=np.float32) for f in FEATURES}}
    pq.write_table(pa.table(columns), folder / "features.parquet", row_group_size=122_880)
    np.save(folder / "weights.npy", rng.standard_normal((16, 4)).astype(np.float32))


def texts(folder: Path, rows: int = 4000) -> None:
    """Docstrings of mixed length: id, text."""
    import kit

    table = pa.table({"id": np.arange(rows), "text": kit.docstrings(rows)})
    pq.write_table(table, folder / "texts.parquet", row_group_size=1000)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    where.mkdir(parents=True, exist_ok=True)
    if not (where / "features.parquet").exists():
        cheap(where)
    if not (where / "texts.parquet").exists():
        texts(where)
