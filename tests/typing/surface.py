"""What a type checker knows of the public functions: checked by `make lint`, run by nobody.

Each line with an ignore is one that must be refused: `warn_unused_ignores` tells when it no longer is.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from typing_extensions import assert_type

import gristmill as gm


def score(batch: dict[str, Any]) -> dict[str, Any]:
    """A model."""
    return batch


# A sink gives a report, none gives the rows.
assert_type(gm.apply("rows.csv", "out", fn=score, keep=["id"], workers=2, on_null="skip"), gm.Report)
assert_type(gm.apply("rows.csv", fn=score, limit=10), pa.Table)
assert_type(gm.embed(["a.csv"], gm.sink("out", row_id="id"), text="t", model="m", backend="onnx"), gm.Report)
assert_type(gm.embed("rows.csv", text="t", model="m"), pa.Table)
assert_type(gm.classify("rows.csv", text="t", model="m", all_scores=True), pa.Table)
assert_type(gm.Job("rows.csv", score, "out", engine=gm.ray(workers=(1, 4)), gates={"min_ok": 1}).run(), gm.Report)
for engine in (gm.local(workers=2, grace=3), gm.ray(address="auto"), gm.spark(master="local[2]"), "spark"):
    gm.Job("rows.csv", score, "out", engine=engine)
gm.spark.predict_udf(score, on_null="null")
assert_type(gm.retry_dead("job.yaml", accept_code_change=True), gm.Report)
assert_type(gm.verify("out", deep=True).ok, bool)
assert_type(gm.dead("out"), pa.Table)
assert_type(gm.deliver("out", "duckdb://s.duckdb#t", mode="upsert", key=["id"]).rows, int)
assert_type(gm.lookup("lmdb://s.lmdb").get_many(range(3)), list[dict[str, Any] | None])
assert_type(gm.lookup("usearch://s.usearch").nearest([0.1], 3, metric="l2")[0], dict[str, Any])
gm.lookup("usearch://s.usearch").nearest([0.1], metric="l3")  # type: ignore[arg-type]
gm.Job("rows.csv", score, "out", deliver=[gm.to("lmdb://s.lmdb", key="id"), "duckdb://s.duckdb#t"])
assert_type(gm.compare("a", "b", on="id", min_agreement=0.9).matched, int)

gm.source("rows.csv", wher="x > 1")  # type: ignore[call-arg]
gm.sink("out", keep=7)  # type: ignore[arg-type]
gm.local(address="auto")  # type: ignore[call-arg]
gm.ray(adress="auto")  # type: ignore[call-arg]
gm.spark(workers="two")  # type: ignore[arg-type]
gm.Job("rows.csv", score, "out", wokers=2)  # type: ignore[call-arg]
gm.Job("rows.csv", score, "out", on_null="ded")  # type: ignore[arg-type]
gm.embed("rows.csv", "out", text="t", model="m", bakend="onnx")  # type: ignore[call-overload]
gm.to("lmdb://s.lmdb", keys="id")  # type: ignore[call-arg]
gm.run("job.yaml", restrat=True)  # type: ignore[call-arg]


def lengths(texts: list[str]) -> list[int]:
    """A function on a batch."""
    return [len(text) for text in texts]


# Decorators of dynamic batching have the options of their kind, and keep the function's types.
assert_type(gm.dynamically(lengths)("a"), int)
assert_type(gm.dynamically(batch_size=8, when_full="refuse")(lengths)(["a"]), list[int])
assert_type(gm.aio.dynamically(cache=None, priority_strategy="length")(lengths), gm.aio.AsyncBatchProcessor[str, int])
gm.inference.dynamically(pad_tokens={"ids": 0}, padding_side="left")
gm.aio.inference.dynamically(pad_tokens={"ids": 0}, max_batch_length=4096)

gm.dynamically(bach_size=8)  # type: ignore[call-overload]
gm.dynamically(batch_size="8")  # type: ignore[call-overload]
gm.dynamically(pad_tokens={})  # type: ignore[call-overload]
gm.inference.dynamically(cache=None)  # type: ignore[call-overload]


async def looked_up() -> None:
    """Lookups for coroutines."""
    async with gm.aio.lookup("lmdb://s.lmdb", key="id") as lookup:
        assert_type(await lookup.get(3), dict[str, Any] | None)
        assert_type((await lookup.nearest([0.1]))[0], dict[str, Any])
