"""Daft over the cheap model: a batch function over columns."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DAFT_PROGRESS_BAR", "0")
import daft
import numpy as np
import softmax
from daft import DataType

source, target = sys.argv[1:]
both = DataType.struct({"label": DataType.int8(), "score": DataType.float32()})


@daft.func.batch(return_dtype=both)
def predict(*columns):
    import pyarrow as pa

    out = softmax.predict({f: np.asarray(c.to_arrow()) for f, c in zip(softmax.FEATURES, columns, strict=True)})
    return pa.StructArray.from_arrays([pa.array(out["label"]), pa.array(out["score"])], ["label", "score"])


frame = daft.read_parquet(source)
frame = frame.select(daft.col("id"), predict(*[daft.col(f) for f in softmax.FEATURES]).alias("out"))
frame.select("id", daft.col("out")["label"], daft.col("out")["score"]).write_parquet(target)
