"""A run as events in OpenLineage's form: START, RUNNING, and one of COMPLETE, FAIL and ABORT, with the data sets that
it reads and writes, which column is made of which, and what is known of their quality.

https://openlineage.io/spec/2-0-2/OpenLineage.json; names of data sets as its "Naming" page says.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any
from urllib.parse import unquote, urlsplit

from gristmill import __version__
from gristmill.job.recipients import WEB, Lineage
from gristmill.job.secret import reveal
from gristmill.job.uris import local_path
from gristmill.observe.events import Progress
from gristmill.observe.outbox import Outbox
from gristmill.observe.posting import NotTold, post
from gristmill.observe.teller import Begun, Column, Data, Ended, Sign

PRODUCER = f"https://pypi.org/project/gristmill/{__version__}"
SPEC = "https://openlineage.io/spec"
SCHEMA = f"{SPEC}/2-0-2/OpenLineage.json#/$defs/RunEvent"
EVERY_S = 60.0  # seconds between two RUNNING events
WITHIN_S = 6.0
_FACETS = {  # where each is described, by class
    "SchemaDatasetFacet": "1-2-0", "ColumnLineageDatasetFacet": "1-2-0", "DataQualityMetricsInputDatasetFacet": "1-0-3",
    "DataQualityMetricsDatasetFacet": "1-0-0", "DataQualityAssertionsDatasetFacet": "1-1-0",
    "InputStatisticsInputDatasetFacet": "1-0-0", "OutputStatisticsOutputDatasetFacet": "1-0-2",
    "ErrorMessageRunFacet": "1-0-1", "ProcessingEngineRunFacet": "1-1-1", "JobTypeJobFacet": "2-0-4",
}  # fmt: skip
_PORTS = {"postgresql": 5432, "postgres": 5432, "redis": 6379, "kafka": 9092, "cassandra": 9042, "qdrant": 6333}
_OTHER_NAMES = {"postgresql": "postgres", "s3a": "s3", "gcs": "gs"}


class Events:
    """Sends the events of a run to one place, in order."""

    def __init__(self, to: Lineage, clock: Callable[[], float] = time.monotonic) -> None:
        self._to, self._clock = to, clock
        self._box = Outbox(to.shown, self._send, within=WITHIN_S)
        self._run: Begun | None = None
        self._said = clock()

    def began(self, run: Begun) -> None:
        """START, after an ABORT of each earlier run that was killed."""
        self._run = run
        for dead, how in run.died:
            self._put("ABORT", self._event("ABORT", run, dead, time.time(), {"errorMessage": _error(how)}))
        self._put("START", self._event("START", run, run.run, run.started))

    def progress(self, now: Progress) -> None:
        """RUNNING, once a minute, with the rows so far."""
        if self._run is not None and now.phase == "running" and self._clock() - self._said >= EVERY_S:
            self._said = self._clock()
            so_far = Data(self._run.sink, rows=now.rows_ok)
            self._put("RUNNING", self._event("RUNNING", self._run, self._run.run, time.time(), {}, so_far))

    def raised(self, sign: Sign) -> None:
        """Incidents are for alerts."""

    def ended(self, end: Ended) -> None:
        """COMPLETE, FAIL with its error, or ABORT for a run that was stopped."""
        if self._run is None:
            return
        kind = "COMPLETE" if end.good else "ABORT" if end.state == "stopped" else "FAIL"
        facets = {} if end.good else {"errorMessage": _error(end.text or end.state)}
        self._put(kind, self._event(kind, self._run, self._run.run, end.at, facets, end.output, end.assertions))

    def close(self, until: float) -> list[str]:
        return [f"lineage to {line}" for line in self._box.close(until)]

    def _put(self, kind: str, event: Mapping[str, Any]) -> None:
        self._box.put(json.dumps(event, ensure_ascii=False, default=str))

    def _event(self, kind: str, run: Begun, run_id: str, at: float, facets: Mapping[str, Any] | None = None,
               output: Data | None = None, assertions: Sequence[tuple[str, bool]] = ()) -> dict[str, Any]:  # fmt: skip
        engine = _facet("ProcessingEngineRunFacet", version=__version__, name="gristmill")
        about = _facet("JobTypeJobFacet", processingType="BATCH", integration="GRISTMILL", jobType="JOB")
        found = output or run.output
        return {
            "eventType": kind,
            "eventTime": _time(at),
            "producer": PRODUCER,
            "schemaURL": SCHEMA,
            "run": {"runId": run_id, "facets": {"processing_engine": engine, **(facets or {})}},
            "job": {"namespace": self._to.namespace, "name": self._to.job or run.job, "facets": {"jobType": about}},
            "inputs": [_input(data, assertions) for data in run.inputs],
            "outputs": [] if found is None else [_output(found, run.inputs)],
        }

    def _send(self, event: str, until: float) -> None:
        address = reveal(self._to.to)
        if urlsplit(address).scheme in WEB:
            headers = {n: str(v) for n, v in reveal(self._to.headers).items()}
            post(address, event.encode(), {"Content-Type": "application/json", **headers}, until)
            return
        try:
            # One write of the whole line: lines of several jobs do not mix, and one that a kill cut off is ended.
            with open(local_path(address), "ab+", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n" if hasattr(os, "pread") else False
                file.write(b"\n" * torn + event.encode() + b"\n")
        except OSError as e:
            raise NotTold(f"cannot be written ({e.strerror})") from None


def named(uri: str) -> tuple[str, str]:
    """Namespace and name of a data set at an address."""
    if "://" not in uri or uri.startswith("file:"):
        return "file", local_path(uri).rstrip("/") or "/"
    parts = urlsplit(uri)
    scheme = parts.scheme.partition("+")[0]
    host, path = parts.netloc.rpartition("@")[2], unquote(parts.path).strip("/")
    if scheme in ("duckdb", "sqlite", "lmdb", "delta", "usearch", "faiss", "lance") and not host:
        return "file", f"/{path}" + (f"#{parts.fragment}" if parts.fragment else "")
    if scheme in _PORTS and host and ":" not in host:
        host = f"{host}:{_PORTS[scheme]}"
    name = ".".join(p for p in (path, parts.fragment) if p) if scheme in ("postgresql", "postgres") else path
    if parts.fragment and name == path:
        name = f"{path}#{parts.fragment}" if path else parts.fragment
    return f"{_OTHER_NAMES.get(scheme, scheme)}://{host}", name or "/"


def _facet(kind: str, **fields: Any) -> dict[str, Any]:
    known = {name: value for name, value in fields.items() if value is not None}
    return {"_producer": PRODUCER, "_schemaURL": f"{SPEC}/facets/{_FACETS[kind]}/{kind}.json#/$defs/{kind}", **known}


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _error(text: str) -> dict[str, Any]:
    return _facet("ErrorMessageRunFacet", message=text, programmingLanguage="PYTHON")


def _schema(columns: Sequence[Column]) -> dict[str, Any]:
    fields = [{"name": c.name, "type": c.type, "ordinal_position": i} for i, c in enumerate(columns, 1)]
    return {"schema": _facet("SchemaDatasetFacet", fields=fields)} if columns else {}


def _input(data: Data, assertions: Sequence[tuple[str, bool]]) -> dict[str, Any]:
    namespace, name = named(data.uri)
    nulls = {column: {"nullCount": count} for column, count in data.nulls.items()}
    size = {"rowCount": data.rows, "fileCount": data.files}
    held = [{"assertion": gate, "success": fine} for gate, fine in assertions]
    return {
        "namespace": namespace,
        "name": name,
        "facets": _schema(data.columns),
        "inputFacets": {
            "inputStatistics": _facet("InputStatisticsInputDatasetFacet", size=data.bytes, **size),
            "dataQualityMetrics": _facet(
                "DataQualityMetricsInputDatasetFacet", bytes=data.bytes, columnMetrics=nulls, **size
            ),
            **({"dataQualityAssertions": _facet("DataQualityAssertionsDatasetFacet", assertions=held)} if held else {}),
        },
    }


def _output(data: Data, inputs: Sequence[Data]) -> dict[str, Any]:
    namespace, name = named(data.uri)
    facets = _schema(data.columns)
    if data.columns:
        fields = {c.name: {"inputFields": _made_of(c, inputs)} for c in data.columns if c.of}
        facets["columnLineage"] = _facet("ColumnLineageDatasetFacet", fields=fields)
    size = {"rowCount": data.rows, "fileCount": data.files}
    if data.rows is not None:
        nulls = {column: {"nullCount": count} for column, count in data.nulls.items()}
        facets["dataQualityMetrics"] = _facet(
            "DataQualityMetricsDatasetFacet", bytes=data.bytes, columnMetrics=nulls, **size
        )
    statistics = _facet("OutputStatisticsOutputDatasetFacet", size=data.bytes, **size)
    return {"namespace": namespace, "name": name, "facets": facets, "outputFacets": {"outputStatistics": statistics}}


def _made_of(column: Column, inputs: Sequence[Data]) -> list[dict[str, Any]]:
    how = {"type": "DIRECT", "subtype": "IDENTITY" if column.kept else "TRANSFORMATION", "description": "",
           "masking": False}  # fmt: skip
    found = []
    for data in inputs:
        namespace, name = named(data.uri)
        there = {c.name for c in data.columns}
        found += [
            {"namespace": namespace, "name": name, "field": source, "transformations": [how]}
            for source in column.of
            if source in there
        ]
    return found
