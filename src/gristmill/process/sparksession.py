"""Spark sessions: an existing one, or one that lasts as long as it is used."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from gristmill.errors import BadJob, MissingExtra
from gristmill.job.options import SparkOptions


@contextlib.contextmanager
def session(options: SparkOptions, workers: int = 1) -> Iterator[Any]:
    """A Spark session: that of `options`, else this process's, else one that lasts while inside.

    Raises BadJob if none is available, MissingExtra without pyspark.
    """
    try:
        from pyspark import SparkContext
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as e:
        raise MissingExtra("engine spark needs pyspark, which is not installed: pip install 'gristmill[spark]'") from e
    if options.session is not None:
        if not hasattr(options.session, "_jsc"):
            raise BadJob("engine spark: a session of Spark Connect cannot run Python stages: use a classic session")
        yield options.session
        return
    running = SparkContext._active_spark_context
    if running is not None:
        if options.master not in (None, running.master):
            raise BadJob(
                f"engine spark: master is {options.master!r}, but this process has a session on {running.master!r}: "
                "stop it, or leave master out to use it"
            )
        yield SparkSession.builder.getOrCreate()
        return
    with _signals_kept():
        spark = _started(SparkSession.builder, options, workers)
    try:
        yield spark
    finally:
        spark.stop()


def _started(builder: Any, options: SparkOptions, workers: int) -> Any:
    conf = {"spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}  # the run shows its own progress
    if options.master is not None:
        conf["spark.master"] = options.master
    elif "PYSPARK_GATEWAY_PORT" not in os.environ:  # otherwise spark-submit has set the master
        # Four tries, so that a dying Python worker does not end the stage; the engine ignores the retries.
        conf["spark.master"] = f"local[{workers * options.cpus_per_task},4]"
    if conf.get("spark.master", "").startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # with what the driver has installed
        conf |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.ui.enabled": "false"}
    conf |= {"spark.task.cpus": str(options.cpus_per_task), **{k: str(v) for k, v in options.conf.items()}}
    builder = builder.appName(options.app_name)
    for name, value in conf.items():
        builder = builder.config(name, value)
    try:
        return builder.getOrCreate()
    except Exception as e:
        raise BadJob(f"engine spark: cannot start a session (master {options.master}): {first_line(e)}") from e


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the run's own SIGINT handler, which starting a session replaces."""
    before = signal.getsignal(signal.SIGINT)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, before)


def first_line(error: BaseException) -> str:
    """The first line of a Spark error; the lines after it are the JVM's stack."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return lines[len(lines) > 1 and lines[0].startswith("An error occurred")].lstrip(": ")[:300]
