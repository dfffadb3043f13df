"""A session of Spark that several processes share, as they do the catalog of a metastore: one starts it, others join
its JVM, and may be killed.
"""

from __future__ import annotations

import os
from typing import Any


def address(spark: Any) -> str:
    """What another process needs to join a session."""
    about = spark.sparkContext._gateway.java_parameters
    return f"{about.port}:{about.auth_token}"


def join(at: str) -> Any:
    """The session at an address, as this process's own."""
    os.environ["PYSPARK_GATEWAY_PORT"], _, os.environ["PYSPARK_GATEWAY_SECRET"] = at.partition(":")
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    gateway = launch_gateway()
    jvm = gateway.jvm
    inner = jvm.org.apache.spark.SparkContext.getOrCreate()
    context = jvm.org.apache.spark.api.java.JavaSparkContext(inner)
    made = SparkContext(gateway=gateway, jsc=context, conf=SparkConf(_jconf=inner.getConf()))
    return SparkSession(made, jvm.org.apache.spark.sql.classic.SparkSession.builder().getOrCreate())
