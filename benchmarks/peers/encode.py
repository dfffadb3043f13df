"""The loop around `model.encode` that people write; `unsorted` pads batches of 32 in the order of the rows."""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sentence_transformers import SentenceTransformer

kind, model_path, source, target = sys.argv[1:]
table = pq.read_table(source)
texts = table["text"].to_pylist()
model = SentenceTransformer(model_path, device="cpu")
if kind == "encode":
    vectors = model.encode(texts, show_progress_bar=False)
else:
    parts = [model.encode(texts[i : i + 32], batch_size=32, show_progress_bar=False) for i in range(0, len(texts), 32)]
    vectors = np.concatenate(parts)
column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
pq.write_table(pa.table({"id": table["id"], "embedding": column}), target)
