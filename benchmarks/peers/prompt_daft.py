"""A prompt a row with Daft's `prompt`, on its native runner; 64 requests at a time."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DAFT_PROGRESS_BAR", "0")
import daft
from daft.functions import prompt

url, source, target = sys.argv[1:]
daft.set_provider("openai", api_key=os.environ["OPENAI_API_KEY"], base_url=url)
frame = daft.read_parquet(source)
answer = prompt(daft.col("text"), provider="openai", model="m", use_chat_completions=True)
frame.select(daft.col("id"), answer.alias("answer")).write_parquet(target)
