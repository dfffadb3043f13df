"""A prompt a row with Ray Data's HTTP request processor (`ray.data.llm`), 64 rows a batch."""

from __future__ import annotations

import os
import sys

import ray
from ray.data.llm import HttpRequestProcessorConfig, build_processor

url, source, target = sys.argv[1:]
ray.init("local", logging_level="ERROR", include_dashboard=False)
ray.data.DataContext.get_current().enable_progress_bars = False
config = HttpRequestProcessorConfig(
    url=f"{url}/chat/completions", headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    batch_size=64, concurrency=1, max_retries=10, base_retry_wait_time_in_s=0.5,
)  # fmt: skip
asked = build_processor(
    config,
    preprocess=lambda row: {
        "id": row["id"], "payload": {"model": "m", "messages": [{"role": "user", "content": row["text"]}]},
    },
    postprocess=lambda row: {"id": row["id"], "answer": row["http_response"]["choices"][0]["message"]["content"]},
)  # fmt: skip
asked(ray.data.read_parquet(source)).write_parquet(target)
