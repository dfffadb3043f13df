"""The loop a person would write for the cheap model: one process, pyarrow in, pyarrow out."""

from __future__ import annotations

import sys

import pyarrow as pa
import pyarrow.parquet as pq
import softmax

source, target = sys.argv[1:]
writer = None
for batch in pq.ParquetFile(source).iter_batches(batch_size=65_536):
    out = softmax.predict({f: batch.column(f).to_numpy() for f in softmax.FEATURES})
    table = pa.table({"id": batch.column("id"), **out})
    writer = writer or pq.ParquetWriter(target, table.schema, compression="zstd")
    writer.write_table(table)
writer.close()
