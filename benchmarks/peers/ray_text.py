"""The same embedding with Ray Data as its guide writes it: a class that loads the model, one actor a core."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
import numpy as np
import ray
from sentence_transformers import SentenceTransformer

model_path, source, target = sys.argv[1:]


class Embed:
    def __init__(self) -> None:
        self.model = SentenceTransformer(model_path, device="cpu")

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"id": batch["id"], "embedding": self.model.encode(list(batch["text"]), show_progress_bar=False)}


cores = os.cpu_count() or 1
# The actors hold a core each; without one more, reading would wait for them, and they for it, for ever.
ray.init("local", num_cpus=cores + 1, logging_level="ERROR", log_to_driver=False, include_dashboard=False)
ray.data.DataContext.get_current().enable_progress_bars = False
# Blocks as the file has them would leave one actor without work near the end.
table = ray.data.read_parquet(source, override_num_blocks=4 * cores)
table.map_batches(Embed, concurrency=cores, batch_size=256).write_parquet(target)
