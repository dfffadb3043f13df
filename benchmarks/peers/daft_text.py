"""The same embedding with Daft's own function for it, `embed_text`, at its defaults, on its native runner."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DAFT_PROGRESS_BAR", "0")
import daft
from daft.functions import embed_text

model_path, source, target = sys.argv[1:]
frame = daft.read_parquet(source)
vectors = embed_text(daft.col("text"), provider="transformers", model=model_path)
frame.select(daft.col("id"), vectors.alias("embedding")).write_parquet(target)
