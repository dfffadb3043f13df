"""Embed shards of documents: each Parquet file becomes an .npy file of vectors, and a manifest tells what was done.

    python examples/embedding_shards.py MODEL DOCUMENTS/ VECTORS/

The files of DOCUMENTS have a column `text`; MODEL is a sentence-transformers folder. Only the import line is
Gristmill's.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from gristmill import remote_parallel_map

MODEL, DOCUMENTS, VECTORS = sys.argv[1:]


def embed_shard(path, target):
    begun = time.monotonic()
    if not hasattr(embed_shard, "_model"):
        from sentence_transformers import SentenceTransformer

        embed_shard._model = SentenceTransformer(MODEL, device="cpu")
    texts = pq.read_table(path, columns=["text"])["text"].to_pylist()
    vectors = embed_shard._model.encode(texts, convert_to_numpy=True)
    np.save(target, vectors)
    return {
        "input": path,
        "output": target,
        "rows": len(texts),
        "dimensions": int(vectors.shape[1]),
        "seconds": round(time.monotonic() - begun, 3),
    }


Path(VECTORS).mkdir(parents=True, exist_ok=True)
shards = [(str(p), str(Path(VECTORS, p.stem + ".npy"))) for p in sorted(Path(DOCUMENTS).glob("*.parquet"))]

reports = remote_parallel_map(embed_shard, shards, func_cpu=1)

reports.sort(key=lambda report: report["input"])
Path(VECTORS, "manifest.json").write_text(json.dumps(reports, indent=1) + "\n")
print("embedded", sum(report["rows"] for report in reports), "documents in", len(reports), "shards")
