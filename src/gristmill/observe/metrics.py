"""Figures of a run for Prometheus, by its own client: a file for node_exporter's collector of text files, which is
replaced whole, or a push gateway.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, cast

from gristmill.job.recipients import WEB, Metrics
from gristmill.job.secret import reveal
from gristmill.job.uris import local_path
from gristmill.observe.events import ENDED, Progress
from gristmill.observe.figures import Figures
from gristmill.observe.outbox import Outbox
from gristmill.observe.posting import NotTold, post
from gristmill.observe.teller import Begun, Ended, Sign
from gristmill.process.extras import require

EVERY_S = 15.0  # seconds between two updates while a run runs: Prometheus asks every 15 to 60 s
WITHIN_S = 8.0


class Gauges:
    """Keeps the figures of a run and hands the newest to `send`, every few seconds and when it ends."""

    def __init__(self, name: str, send: Callable[[Figures, float], None], clock: Callable[[], float] = time.monotonic):
        self._box = Outbox(name, send, within=WITHIN_S, latest=True)
        self._now = Figures("")
        self._clock, self._sent, self._phase = clock, float("-inf"), ""

    def began(self, run: Begun) -> None:
        """The run's name and when it began."""
        self._change(
            job=run.job, model=run.model, generation=run.generation, running=True, started=run.started,
            published=run.published,
        )  # fmt: skip
        self._send()

    def progress(self, now: Progress) -> None:
        """New figures, of which some are sent."""
        if not self._now.job or now.phase in ENDED:
            return
        self._change(
            rows={"ok": now.rows_ok, "dead": now.rows_dead, "filtered": now.rows_filtered},
            rows_total=now.rows_total, rows_per_second=now.rows_per_second, shards=now.shards_total,
            shards_done=now.shards_done, workers=now.workers, seconds=now.elapsed, generation=now.generation,
        )  # fmt: skip
        if now.phase != self._phase or self._clock() - self._sent >= EVERY_S:
            self._phase = now.phase
            self._send()

    def raised(self, sign: Sign) -> None:
        """Alerts are made of these figures by whoever collects them."""

    def ended(self, end: Ended) -> None:
        """The last figures, which stay until the next run."""
        rows = {"ok": end.rows_ok, "dead": end.rows_dead, "filtered": end.rows_filtered}
        published = {} if end.published is None else {"published": end.published}
        counts = {"rows": rows, "shards_done": end.shards_done} if end.rows_in else {}
        self._change(
            running=False, seconds=end.seconds, ended=end.at, exit_code=end.exit_code, workers=0, rows_per_second=0.0,
            **published, **counts,
        )  # fmt: skip
        if self._now.job:
            self._send()

    def close(self, until: float) -> list[str]:
        return [f"metrics to {line}" for line in self._box.close(until)]

    def _change(self, **changes: Any) -> None:
        self._now = Figures(**{**vars(self._now), **changes})

    def _send(self) -> None:
        self._sent = self._clock()
        self._box.put(self._now)


def gauges(to: Metrics) -> Gauges:
    """The teller for one address. Raises MissingExtra."""
    if to.scheme in ("otlp", "otlps"):
        from gristmill.observe.otel import collector

        return Gauges(to.shown, collector(to))
    require("prometheus_client", "metrics", f"metrics to {to.shown}")
    if to.scheme in WEB:
        return Gauges(to.shown, lambda now, until: _push(to, now, until))
    path = local_path(reveal(to.to))
    return Gauges(path, lambda now, until: _write(path, now))


def exposed(several: tuple[Figures, ...]) -> bytes:
    """Figures of jobs in Prometheus' text form."""
    import prometheus_client as prometheus

    registry = prometheus.CollectorRegistry()
    made: dict[str, Any] = {}
    for figures in several:
        for name, (text, values) in figures.values().items():
            labels = ("job_name", "model", "outcome") if name == "gristmill_rows" else ("job_name", "model")
            gauge = made.get(name) or prometheus.Gauge(name, text, labels, registry=registry)
            made[name] = gauge
            for outcome, value in values.items():
                gauge.labels(figures.job, figures.model, *([outcome] if outcome else [])).set(value)
    return cast(bytes, prometheus.generate_latest(registry))


def _write(path: str, now: Figures) -> None:
    """Replace the file in one step: whoever reads it finds the old figures or the new ones, never half."""
    staged = f"{path}.{os.getpid()}.tmp"
    try:
        with open(staged, "wb") as file:
            file.write(exposed((now,)))
        os.chmod(staged, 0o644)  # the collector is another user
        os.replace(staged, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            os.unlink(staged)
        raise NotTold(f"cannot be written ({e.strerror})") from None


def _push(to: Metrics, now: Figures, until: float) -> None:
    from base64 import urlsafe_b64encode

    base = reveal(to.to).rstrip("/")
    if "/metrics/job" not in base:  # else the address says under which key
        key = urlsafe_b64encode(now.job.encode()).decode()
        base = f"{base}/metrics/job/gristmill/job_name@base64/{key}"
    headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    sent = {**headers, **{n: str(v) for n, v in reveal(to.headers).items()}}
    post(base, exposed((now,)), sent, until, method="PUT", tries=1)  # newer figures follow
