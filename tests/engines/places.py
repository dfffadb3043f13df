"""The engines that the suite runs on, each as it is started for tests and named in a job. A new one is a line here."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MEMORY = 100 << 20  # bytes of a Ray node's object store
SPARK_ENV = {
    "PYSPARK_PYTHON": sys.executable,
    "SPARK_LOCAL_IP": "127.0.0.1",
    "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # starts in two thirds of the time
}


@dataclass(frozen=True)
class Place:
    """An engine that is there to be used. `engine` are the fields of its EngineSpec as plain values, `env` the
    variables that a process apart needs to use it.
    """

    name: str
    engine: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def _local() -> Iterator[Place]:
    yield Place("local", {"name": "local", "workers": 2})


@contextlib.contextmanager
def head() -> Iterator[Any]:
    """A Ray cluster whose head runs nothing; this process is connected to it, as a user's would be."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "object_store_memory": MEMORY,
            "include_dashboard": False,
            # A node that is only slow to answer, because the machine is busy, is not given up.
            "_system_config": {"health_check_failure_threshold": 60},
        },
    )
    try:
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextlib.contextmanager
def _ray() -> Iterator[Place]:
    with head() as cluster:
        cluster.add_node(num_cpus=2, object_store_memory=MEMORY)
        yield Place("ray", {"name": "ray", "workers": 2, "options": {"address": cluster.address}})


@contextlib.contextmanager
def _spark() -> Iterator[Place]:
    """A session on two threads of this machine, which the test process has as a user's would. It is started once, and
    ends with the process.
    """
    os.environ.update(SPARK_ENV)
    from pyspark.sql import SparkSession

    # Where the files of tests are, since tables are made by links to them; it goes with the process.
    warehouse = tempfile.mkdtemp(prefix="gristmill-warehouse-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
    atexit.register(shutil.rmtree, warehouse, ignore_errors=True)
    conf = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.warehouse.dir": warehouse,
        "spark.sql.shuffle.partitions": "2",
    }
    SparkSession.builder.master("local[2]").config(map=conf).getOrCreate()
    yield Place("spark", {"name": "spark", "workers": 2, "options": {"master": "local[2]"}}, SPARK_ENV)


_STARTED: dict[str, Callable[[], contextlib.AbstractContextManager[Place]]] = {
    "local": _local,
    "ray": _ray,
    "spark": _spark,
}
NAMES = list(_STARTED)
OURS = ("local",)  # engines all of whose processes are gristmill's own


def started(name: str) -> contextlib.AbstractContextManager[Place]:
    """The engine, running while inside."""
    return _STARTED[name]()
