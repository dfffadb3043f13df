"""Score reviews in batches with a Hugging Face classifier, which each worker loads once and keeps on the function.

    python examples/batch_scoring.py MODEL REVIEWS.parquet SCORES.jsonl

REVIEWS.parquet has the columns `review_id` and `text`. Only the import line is Gristmill's.
"""

import json
import sys

import pyarrow.parquet as pq

from gristmill import remote_parallel_map

MODEL, REVIEWS, SCORES = sys.argv[1:]
BATCH = 64


def score_reviews(batch):
    if not hasattr(score_reviews, "_model"):
        from transformers import pipeline

        score_reviews._model = pipeline("text-classification", model=MODEL, device="cpu")
        print("loaded", MODEL)
    texts = [row["text"] for row in batch]
    found = score_reviews._model(texts, batch_size=len(texts), truncation=True)
    return [
        {"review_id": row["review_id"], "label": one["label"], "score": one["score"]}
        for row, one in zip(batch, found, strict=True)
    ]


rows = pq.read_table(REVIEWS, columns=["review_id", "text"]).to_pylist()
batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]

with open(SCORES, "w") as out:
    for scored in remote_parallel_map(score_reviews, batches, func_cpu=1, generator=True):
        for row in scored:
            out.write(json.dumps(row) + "\n")

print("scored", len(rows), "reviews")
