"""Spark's mapInArrow over the cheap model."""

from __future__ import annotations

import os
import sys

source, target = sys.argv[1:]
os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")

from pyspark.sql import SparkSession  # noqa: E402

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "65536")


def run(batches):
    import pyarrow as pa
    import softmax

    for batch in batches:
        out = softmax.predict({f: batch.column(f).to_numpy() for f in softmax.FEATURES})
        yield pa.RecordBatch.from_arrays(
            [batch.column("id"), pa.array(out["label"]), pa.array(out["score"])], ["id", "label", "score"]
        )


frame = spark.read.parquet(source)
frame.mapInArrow(run, "id long, label byte, score float").write.mode("overwrite").parquet(target)
spark.stop()
