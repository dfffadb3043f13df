"""The same figures for a collector of OpenTelemetry, by OTLP over HTTP and its own SDK."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gristmill import __version__
from gristmill.job.secret import reveal
from gristmill.job.telling import Metrics
from gristmill.observe.metrics import Figures
from gristmill.observe.posting import EACH_S, NotTold
from gristmill.process.extras import require


def collector(to: Metrics) -> Callable[[Figures, float], None]:
    """What sends figures to a collector. Raises MissingExtra."""
    require("opentelemetry.sdk.metrics", "otel", f"metrics to {to.shown}")
    exporters = require("opentelemetry.exporter.otlp.proto.http.metric_exporter", "otel", f"metrics to {to.shown}")
    scheme, _, rest = reveal(to.to).partition("://")
    address = f"{'https' if scheme == 'otlps' else 'http'}://{rest.rstrip('/')}"
    if "/" not in rest.rstrip("/"):
        address += "/v1/metrics"
    headers = {name: str(value) for name, value in reveal(to.headers).items()}

    def send(now: Figures, until: float) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        timeout = max(0.1, min(EACH_S, until - time.monotonic()))
        exporter = exporters.OTLPMetricExporter(endpoint=address, headers=headers, timeout=timeout)
        try:
            if exporter.export(_data(now)) is not MetricExportResult.SUCCESS:
                raise NotTold("the collector did not take them")
        finally:
            exporter.shutdown()

    return send


def _data(now: Figures) -> Any:
    """The figures as the SDK has them, at this moment."""
    from opentelemetry.sdk.metrics.export import (
        Gauge, Metric, MetricsData, NumberDataPoint, ResourceMetrics, ScopeMetrics,
    )  # fmt: skip
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    at = time.time_ns()
    own = {"gristmill.job": now.job, "gristmill.model": now.model}

    def points(values: Any) -> list[Any]:
        return [
            NumberDataPoint({**own, **({"outcome": outcome} if outcome else {})}, at, at, value)
            for outcome, value in values.items()
        ]

    metrics = [
        Metric(name.replace("gristmill_", "gristmill.", 1), text, "", Gauge(points(values)))
        for name, (text, values) in now.values().items()
    ]
    scope = ScopeMetrics(InstrumentationScope("gristmill", __version__), metrics, "")
    resource = Resource.create({"service.name": "gristmill", "service.version": __version__})
    return MetricsData([ResourceMetrics(resource, [scope], "")])
