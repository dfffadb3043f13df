"""Figures of real runs, as Prometheus and OpenTelemetry read them, and places that cannot take them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import gristmill as gm
from gristmill.errors import BadJob, GateFailed
from gristmill.job.recipients import Metrics
from gristmill.observe.events import Progress
from gristmill.observe.figures import Figures
from listeners import listening, nobody
from nights import OF_FOUR, ROWS, ill, run, well, write_rows

parser = pytest.importorskip("prometheus_client.parser", reason="install gristmill[metrics]")


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Some rows."""
    return write_rows(tmp_path)


def read(text: str) -> dict[Any, float]:
    """Values by name and, for rows, outcome, as Prometheus' own parser reads them."""
    samples = [sample for family in parser.text_string_to_metric_families(text) for sample in family.samples]
    assert samples and all(sample.labels["job_name"] for sample in samples)
    return {(s.name, s.labels.get("outcome")) if "outcome" in s.labels else s.name: s.value for s in samples}


def test_a_file_for_the_collector_of_text_files(source: str, tmp_path: Path) -> None:
    """It has the run's counts, when it ended and how; after a failure also when the last result was published."""
    path = tmp_path / "collected" / "gristmill.prom"
    path.parent.mkdir()
    run(source, tmp_path / "out", well, metrics=str(path))
    good = read(path.read_text())
    assert good["gristmill_rows", "ok"] == ROWS and good["gristmill_run_exit_code"] == 0
    assert good["gristmill_running"] == 0 and good["gristmill_shards_done"] == good["gristmill_shards"] > 0
    with pytest.raises(GateFailed):
        run(source, tmp_path / "out", ill, metrics=str(path), restart=True, gates={"min_ok": 0.9})
    bad = read(path.read_text())
    assert bad["gristmill_rows", "dead"] == OF_FOUR and bad["gristmill_run_exit_code"] == 3
    assert abs(bad["gristmill_published_timestamp_seconds"] - good["gristmill_published_timestamp_seconds"]) < 5
    assert [p.name for p in path.parent.iterdir()] == ["gristmill.prom"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_when_the_result_was_published(source: str, tmp_path: Path) -> None:
    """It is told of a run whose delivery fails, too, and is not when the run ended."""
    store, path = tmp_path / "a.db", tmp_path / "x.prom"

    def harm(staged: Any) -> None:
        store.write_bytes(b"no database " * 1000)

    with pytest.raises(BadJob, match="not a database"):
        run(source, tmp_path / "out", well, metrics=str(path), audit=[harm], deliver=[gm.to(f"sqlite://{store}#t")])
    bad = read(path.read_text())
    published = json.loads((tmp_path / "out" / "_SUCCESS").read_text())["published"]
    at = datetime.strptime(published, "%Y-%m-%dT%H:%M:%S%z").timestamp()
    assert bad["gristmill_run_exit_code"] == 2 and bad["gristmill_published_timestamp_seconds"] == at
    store.unlink()
    time.sleep(1.1)
    report = run(source, tmp_path / "out", well, metrics=str(path), deliver=[gm.to(f"sqlite://{store}#t")])
    good = read(path.read_text())
    assert report.state == "nothing to do" and good["gristmill_published_timestamp_seconds"] == at


def test_a_push_gateway(source: str, tmp_path: Path) -> None:
    """The figures replace those of the same job there; a password in the address is a header."""
    with listening() as heard:
        run(source, tmp_path / "out", well, metrics=heard.url.replace("://", "://me:pass@"))
        method, path, headers, body = heard.requests[-1]
    assert method == "PUT" and path.startswith("/metrics/job/gristmill/job_name@base64/")
    assert headers["Authorization"] == "Basic bWU6cGFzcw=="
    assert read(body.decode())["gristmill_rows", "ok"] == ROWS


def test_places_that_cannot_take_figures(source: str, tmp_path: Path) -> None:
    """A folder that is not there, a gateway that refuses: the run is told of, and well."""
    metrics = [str(tmp_path / "none" / "x.prom"), nobody()]
    with pytest.warns(gm.GristmillWarning, match="not told: metrics") as warned:
        report = run(source, tmp_path / "out", well, metrics=metrics)
    assert report.state == "done"
    told = [str(w.message) for w in warned if "not told" in str(w.message)]
    assert any("cannot be written (No such file or directory)" in line for line in told)
    assert any("it cannot be reached (Connection refused)" in line for line in told)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can mount a full disk")
def test_a_full_disk(source: str, tmp_path: Path) -> None:
    """The figures of before stay whole, nothing is left beside them, and the run is well."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no disk can be mounted here")
    try:
        run(source, tmp_path / "a", well, metrics=str(disk / "x.prom"))
        before = (disk / "x.prom").read_bytes()
        with open(disk / "other", "wb", buffering=0) as other, suppress(OSError):
            while True:
                other.write(b"x" * 512)
        with pytest.warns(gm.GristmillWarning, match="No space left on device"):
            report = run(source, tmp_path / "a", well, restart=True, metrics=str(disk / "x.prom"))
        assert report.state == "done"
        assert (disk / "x.prom").read_bytes() == before
        assert sorted(p.name for p in disk.iterdir()) == ["other", "x.prom"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_figures_while_a_run_runs() -> None:
    """They are sent at a new phase and every 15 s, not with each progress."""
    from gristmill.observe.metrics import Gauges
    from gristmill.observe.teller import Begun

    sent: list[Figures] = []
    now = 0.0
    gauges = Gauges("somebody", lambda figures, until: sent.append(figures), clock=lambda: now)
    gauges._box.put = sent.append  # type: ignore[method-assign]  # what is handed over, whatever the thread has sent
    gauges.began(Begun("job", "run", "sink", 1.0))
    for second in range(31):
        now = float(second)
        gauges.progress(Progress("running", rows_ok=second, generation=2))
    assert [figures.rows.get("ok", 0) for figures in sent] == [0, 0, 15, 30]


def test_a_collector_of_opentelemetry(source: str, tmp_path: Path) -> None:
    """It gets the same figures by OTLP."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="install gristmill[otel]")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    with listening() as heard:
        run(source, tmp_path / "out", well, metrics=[{"to": heard.url.replace("http", "otlp"), "headers": {"x": "y"}}])
        _, path, headers, body = heard.requests[-1]
    assert path == "/v1/metrics" and headers["x"] == "y"
    if headers.get("Content-Encoding") == "gzip":
        import gzip

        body = gzip.decompress(body)
    (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    found = {metric.name: metric.gauge.data_points for metric in resource.scope_metrics[0].metrics}
    assert found["gristmill.run_exit_code"][0].as_double == 0
    outcomes = {p.attributes[-1].value.string_value: p.as_double for p in found["gristmill.rows"]}
    assert outcomes["ok"] == ROWS


def test_a_collector_that_is_not_there(source: str, tmp_path: Path) -> None:
    """The run is well, and soon over."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="install gristmill[otel]")
    with pytest.warns(gm.GristmillWarning, match="not told: metrics to otlp"):
        report = run(source, tmp_path / "out", well, metrics=nobody().replace("http", "otlp"))
    assert report.state == "done" and report.seconds < 15


@pytest.mark.parametrize("to", ["figures.txt", "s3://bucket/x.prom", "ftp://host/x", "http://", "otlp://"])
def test_what_is_no_place_for_figures(to: str) -> None:
    """It is an error before anything runs, which says what there is."""
    with pytest.raises(gm.BadJob, match=r"metrics"):
        Metrics(to)
