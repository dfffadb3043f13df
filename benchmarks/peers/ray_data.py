"""Ray Data over the cheap model."""

from __future__ import annotations

import sys

import ray
import softmax

source, target = sys.argv[1:]
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
ray.data.DataContext.get_current().enable_progress_bars = False


def run(batch):
    return {"id": batch["id"], **softmax.predict(batch)}


ray.data.read_parquet(source).map_batches(run, batch_size=65_536, batch_format="numpy").write_parquet(target)
