"""The same figures for a collector of OpenTelemetry, by OTLP over HTTP and its own SDK."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gristmill import __version__
from gristmill.job.recipients import Metrics
from gristmill.job.secret import reveal
from gristmill.observe.figures import Figures
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
        timeout = max(0.1, min(EACH_S / 2, until - time.monotonic()))
        exporter = exporters.OTLPMetricExporter(endpoint=address, headers=headers, timeout=timeout)
        try:
            if exporter.export(_data(now)).name != "SUCCESS":
                raise NotTold("the collector did not take them")
        finally:
            exporter.shutdown()

    return send


def _data(now: Figures) -> Any:
    """The figures as the SDK has them, at this moment."""
    from opentelemetry.sdk.metrics import export
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    at = time.time_ns()
    own = {"gristmill.job": now.job, "gristmill.model": now.model}

    def points(values: Any) -> list[Any]:
        return [
            export.NumberDataPoint({**own, **({"outcome": outcome} if outcome else {})}, at, at, value)
            for outcome, value in values.items()
        ]

    metrics = [
        export.Metric(name.replace("gristmill_", "gristmill.", 1), text, "", export.Gauge(points(values)))
        for name, (text, values) in now.values().items()
    ]
    scope = export.ScopeMetrics(InstrumentationScope("gristmill", __version__), metrics, "")
    resource = Resource.create({"service.name": "gristmill", "service.version": __version__})
    return export.MetricsData([export.ResourceMetrics(resource, [scope], "")])
