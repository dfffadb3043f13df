"""Features scored by the library's own call: one process, the whole file."""

from __future__ import annotations

import sys

import pyarrow as pa
import pyarrow.parquet as pq
import skops.io

model_path, source, target = sys.argv[1:]
model = skops.io.load(model_path, trusted=skops.io.get_untrusted_types(file=model_path))
frame = pq.read_table(source).to_pandas()
found = model.predict_proba(frame[list(model.feature_names_in_)])
column = pa.FixedSizeListArray.from_arrays(pa.array(found.ravel()), found.shape[1])
pq.write_table(pa.table({"id": frame["id"], "probabilities": column}), target, compression="zstd")
