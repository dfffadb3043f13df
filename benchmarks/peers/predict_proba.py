"""Features scored by the library's own call, the whole file in one process:
`python predict_proba.py MODEL SOURCE TARGET`.
"""

from __future__ import annotations

import sys

import pyarrow as pa
import pyarrow.parquet as pq

model_path, source, target = sys.argv[1:]
frame = pq.read_table(source).to_pandas()
if model_path.endswith(".onnx"):
    import numpy as np
    import onnxruntime

    session = onnxruntime.InferenceSession(model_path)
    features = [n for n in frame.columns if n != "id"]
    (found,) = session.run(["probabilities"], {"x": frame[features].to_numpy(np.float32)})
else:
    if model_path.endswith(".skops"):
        import skops.io

        model = skops.io.load(model_path, trusted=skops.io.get_untrusted_types(file=model_path))
    else:
        import joblib

        model = joblib.load(model_path)
    found = model.predict_proba(frame[list(model.feature_names_in_)])
column = pa.FixedSizeListArray.from_arrays(pa.array(found.ravel()), found.shape[1])
pq.write_table(pa.table({"id": frame["id"], "probabilities": column}), target, compression="zstd")
