"""A prompt a row with Curator; 64 requests at a time, as its cache keeps them."""

from __future__ import annotations

import importlib.util
import os
import sys

import pyarrow as pa
import pyarrow.parquet as pq


def main(url: str, source: str, target: str) -> None:
    os.environ.setdefault("CURATOR_CACHE_DIR", target + ".cache")
    os.environ["TELEMETRY_ENABLED"] = os.environ["CURATOR_VIEWER"] = "0"
    # It counts tokens, by a table that it would download; litellm, which it needs, brings one.
    place = importlib.util.find_spec("litellm").submodule_search_locations[0]
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", os.path.join(place, "litellm_core_utils", "tokenizers"))
    from bespokelabs import curator
    from datasets import Dataset

    class Asker(curator.LLM):
        def prompt(self, input: dict) -> str:
            return str(input["text"])

        def parse(self, input: dict, response: str) -> dict:
            return {"id": input["id"], "answer": response}

    llm = Asker(
        model_name="m", backend="openai",
        backend_params={
            "base_url": url, "max_concurrent_requests": 64, "max_requests_per_minute": 1_000_000,
            "max_tokens_per_minute": 1_000_000_000, "require_all_responses": False,
        },
    )  # fmt: skip
    found = llm(Dataset(pq.read_table(source)))
    rows = [(row["id"], row["answer"]) for row in getattr(found, "dataset", found)]
    os.makedirs(target)
    out = pa.table({"id": [number for number, _ in rows], "answer": [answer for _, answer in rows]})
    pq.write_table(out, os.path.join(target, "out.parquet"))


main(*sys.argv[1:])
