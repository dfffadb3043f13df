"""Events of real runs, valid by OpenLineage's own schemas, with data sets, columns and counts that are true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry, Resource

import gristmill as gm
from gristmill.errors import GateFailed
from gristmill.job.recipients import Lineage
from gristmill.observe.events import Progress
from gristmill.observe.lineage import Events, named
from gristmill.observe.teller import Begun, Data
from listeners import listening, nobody
from nights import ROWS, ill, more, run, well, write_rows

SCHEMAS = {
    found["$id"]: found
    for path in (Path(__file__).parent / "openlineage").glob("*.json")
    if (found := json.loads(path.read_text()))
}
REGISTRY: Any = Registry().with_resources([(name, Resource.from_contents(found)) for name, found in SCHEMAS.items()])


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Rows, some of them with nulls in another column."""
    return write_rows(tmp_path)


def checked(events: list[dict[str, Any]]) -> list[str]:
    """The types of events that are valid, each of their facets by the schema that it names."""
    for event in events:
        valid(event, event["schemaURL"])
        for facets in every_facet(event):
            for facet in facets.values():
                valid(facet, facet["_schemaURL"])
    return [event["eventType"] for event in events]


def valid(value: Any, schema: str) -> None:
    assert schema.partition("#")[0] in SCHEMAS, schema
    formats = jsonschema.FormatChecker()
    jsonschema.Draft202012Validator({"$ref": schema}, registry=REGISTRY, format_checker=formats).validate(value)


def every_facet(event: dict[str, Any]) -> list[dict[str, Any]]:
    sets = [*event["inputs"], *event["outputs"]]
    inside = [s.get(name, {}) for s in sets for name in ("facets", "inputFacets", "outputFacets")]
    return [event["run"]["facets"], event["job"]["facets"], *inside]


def assertions(event: dict[str, Any]) -> dict[str, bool]:
    """Gates of an event, and whether they held."""
    facet = event["inputs"][0]["inputFacets"]["dataQualityAssertions"]
    return {one["assertion"]: one["success"] for one in facet["assertions"]}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_to_a_file(source: str, tmp_path: Path) -> None:
    """START and COMPLETE, with schemas, counts, nulls, and which column is made of which."""
    sink, file = tmp_path / "out", tmp_path / "events.jsonl"
    run(source, sink, well, lineage=str(file))
    events = lines(file)
    assert checked(events) == ["START", "COMPLETE"]
    start, end = events
    assert start["run"]["runId"] == end["run"]["runId"] and end["job"]["name"] == str(sink)
    (read,), (written,) = end["inputs"], end["outputs"]
    assert (read["namespace"], read["name"]) == ("file", source)
    assert read["inputFacets"]["dataQualityMetrics"]["columnMetrics"]["y"] == {"nullCount": 5}
    assert read["inputFacets"]["inputStatistics"]["rowCount"] == ROWS
    assert written["outputFacets"]["outputStatistics"]["rowCount"] == ROWS
    assert [f["name"] for f in written["facets"]["schema"]["fields"]] == ["x", "score"]
    made = written["facets"]["columnLineage"]["fields"]
    assert [(f["field"], f["transformations"][0]["subtype"]) for f in made["x"]["inputFields"]] == [("x", "IDENTITY")]
    assert {f["field"] for f in made["score"]["inputFields"]} == {"x", "y"}
    assert assertions(end) == {"rows_accounted_for": True, "min_ok 0.99": True, "all gates": True}


def test_a_gate_that_does_not_hold_and_one_that_was_set_aside(source: str, tmp_path: Path) -> None:
    """FAIL with the error, then COMPLETE in which the gate still did not hold; lines are added to the file."""
    file, options = tmp_path / "events.jsonl", {"gates": {"min_ok": 0.9}}
    with pytest.raises(GateFailed):
        run(source, tmp_path / "out", ill, lineage=str(file), **options)
    run(source, tmp_path / "out", ill, lineage=str(file), accept=True, **options)
    events = lines(file)
    assert checked(events) == ["START", "FAIL", "START", "COMPLETE"]
    assert "min_ok 0.9" in events[1]["run"]["facets"]["errorMessage"]["message"]
    for event in (events[1], events[3]):
        held = assertions(event)
        assert held == {"rows_accounted_for": True, "min_ok 0.9": False, "all gates": False}


def test_a_run_to_an_address(source: str, tmp_path: Path) -> None:
    """Each event is a POST, with the headers that were given and a namespace and name of one's own."""
    with listening(201) as heard:
        to = {"to": f"{heard.url}/api/v1/lineage", "namespace": "nightly", "job": "reviews", "headers": {"x-key": "k"}}
        run(source, tmp_path / "out", well, lineage=[to])
        assert checked(heard.bodies) == ["START", "COMPLETE"]
        for _, path, headers, _ in heard.requests:
            assert path == "/api/v1/lineage" and "k" in headers.values()
        assert {(body["job"]["namespace"], body["job"]["name"]) for body in heard.bodies} == {("nightly", "reviews")}


def test_columns_that_code_makes(source: str, tmp_path: Path) -> None:
    """After a step that is code, any column may be made of any."""
    file = tmp_path / "events.jsonl"

    run(source, tmp_path / "out", well, lineage=str(file), steps=[more])
    made = lines(file)[-1]["outputs"][0]["facets"]["columnLineage"]["fields"]
    assert {f["field"] for f in made["x"]["inputFields"]} == {"x", "y"}


def test_running_once_a_minute() -> None:
    """With the rows so far."""
    now, put = 0.0, list[str]()
    events = Events(Lineage("/tmp/x.jsonl"), clock=lambda: now)
    events._box.put = put.append  # type: ignore[method-assign]
    events.began(Begun("job", "a8b1c1de-0a8e-4d9c-8a53-9d5a35a1d7c1", "/out", 1.0, inputs=(Data("/in"),)))
    for second in range(0, 200, 5):
        now = float(second)
        events.progress(Progress("running", rows_ok=second))
    found = [json.loads(line) for line in put]
    assert checked(found) == ["START", "RUNNING", "RUNNING", "RUNNING"]
    assert [e["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] for e in found[1:]] == [60, 120, 180]


@pytest.mark.long
def test_places_that_take_no_events(source: str, tmp_path: Path) -> None:
    """A folder that is not there, an address that refuses or answers 500: the run is well, and says so."""
    with listening(500) as heard:
        to = [str(tmp_path / "none" / "x.jsonl"), nobody(), heard.url]
        with pytest.warns(gm.GristmillWarning, match="not told: lineage to") as warned:
            report = run(source, tmp_path / "out", well, lineage=to)
    assert report.state == "done"
    assert len([w for w in warned if "not told" in str(w.message)]) == 3


def test_a_line_that_was_cut_off_is_ended(source: str, tmp_path: Path) -> None:
    """A process that was killed while it wrote spoils one line, and not the next."""
    file = tmp_path / "events.jsonl"
    file.write_text('{"eventType": "STA')
    run(source, tmp_path / "out", well, lineage=str(file))
    torn, *others = file.read_text().splitlines()
    assert torn == '{"eventType": "STA' and checked([json.loads(line) for line in others]) == ["START", "COMPLETE"]


@pytest.mark.parametrize(
    ("uri", "names"),
    [
        ("/srv/rows/", ("file", "/srv/rows")),
        ("s3://bucket/a/b.parquet", ("s3://bucket", "a/b.parquet")),
        ("gcs://bucket/a", ("gs://bucket", "a")),
        ("postgresql://db/shop#public.rows", ("postgres://db:5432", "shop.public.rows")),
        ("postgresql://db:6000/shop#rows", ("postgres://db:6000", "shop.rows")),
        ("kafka://broker:9092/topic", ("kafka://broker:9092", "topic")),
        ("duckdb:///srv/x.duckdb#rows", ("file", "/srv/x.duckdb#rows")),
        ("iceberg://catalog/ns.rows", ("iceberg://catalog", "ns.rows")),
    ],
)
def test_names_of_data_sets(uri: str, names: tuple[str, str]) -> None:
    """As OpenLineage's page on naming has them."""
    assert named(uri) == names
