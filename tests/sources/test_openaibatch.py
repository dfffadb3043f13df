"""OpenAI's batch files as a source: a row for each request; lines that are none as bad rows, or told in a column."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.errors import BadJob

BODY = '{"messages": [{"role": "user", "content": "a\\u00fc\\n"}], "temperature": 0.10}'
GOOD = [
    f'{{"custom_id": "a", "method": "POST", "url": "/v1/x", "body": {BODY}}}',
    '{"body":{},"url":"","method":"","custom_id":"\\"ü\\u20ac"}',
    f' {{"custom_id":"z", "more": [1, {{}}], "method" :"GET","url":"/v1/y" ,"body" : {BODY} }}\t',
]
BAD = [
    "{",
    "nothing",
    "[]",
    "{} {}",
    '{"custom_id": "c", "method": "POST", "url": "/v1/x"}',
    '{"custom_id": "c", "method": "POST", "url": "/v1/x", "body": "{}"}',
    '{"custom_id": null, "method": "POST", "url": "/v1/x", "body": {}}',
    '{"custom_id": "\\ud800", "method": "POST", "url": "/v1/x", "body": {}}',
]


def row(line: str) -> dict[str, Any]:
    """What a good line is."""
    told = json.loads(line)
    body = BODY if BODY in line else "{}"
    return {"custom_id": told["custom_id"], "method": told["method"], "url": told["url"], "body": body}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([*GOOD, *BAD, "", "  "]), max_size=20), st.sampled_from(["", ".gz"]),
    st.lists(st.integers(0, 1500), max_size=6), st.sampled_from([1, 100, 1 << 20]), st.booleans(),
)  # fmt: skip
def test_every_line_once_in_any_ranges(
    scratch: Any, planned: Any, lines: list[str], pack: str, edges: list[int], block_bytes: int, keep: bool
) -> None:
    """In its place: good ones with their texts as they are written; others as bad rows, or as rows that say why."""
    data = "\n".join(lines).encode()
    path = scratch.file(f"in.jsonl{pack}", gzip.compress(data) if pack else data)
    plan = planned(path, format="openai-batch", **({"options": {"invalid": "keep"}} if keep else {}))
    read = plan.in_parts([min(e, len(data)) for e in edges], block_bytes=block_bytes)
    full = [line for line in lines if line.strip()]
    rows = read.pylist()
    if not keep:
        assert rows == [row(line) for line in full if line in GOOD]
        assert [bad.payload.decode() for bad in read.bad] == [line for line in full if line in BAD]
        return
    assert not read.bad and len(rows) == len(full)
    for found, line in zip(rows, full, strict=True):
        if line in GOOD:
            assert found == {**row(line), "invalid": None}
        else:
            assert found["invalid"] and found["body"] in (None, "{}")


def test_columns_and_conditions(scratch: Any, planned: Any) -> None:
    """As of any other format."""
    plan = planned(scratch.file("in.batch", "\n".join(GOOD).encode()), format="openai-batch")
    assert plan.read(columns=["url"], where="method = 'POST'").pylist() == [{"url": "/v1/x"}]
    assert plan.read(where="custom_id = 'z'").filtered == 2


def test_a_job_over_requests(tmp_path: Path) -> None:
    """Lines that are none are dead letters, with the line and why."""
    (tmp_path / "in.jsonl").write_text("\n".join([*GOOD, BAD[4]]))
    source = gm.source(str(tmp_path / "in.jsonl"), format="openai-batch")
    with pytest.warns(gm.GristmillWarning):
        gm.Job(source, lambda b: {"n": [len(x) for x in b["body"]]}, str(tmp_path / "out"), workers=0).run()
    assert gm.read(str(tmp_path / "out")).to_table()["n"].to_pylist() == [len(BODY), 2, len(BODY)]
    (dead,) = gm.dead(str(tmp_path / "out")).to_pylist()
    assert dead["message"].endswith("there is no body") and dead["error"] == "NoRequest"
    assert base64.b64decode(json.loads(dead["payload"])["base64"]).decode() == BAD[4]
    with pytest.raises(BadJob, match="invalid is 'yes': it must be keep or refuse"):
        source = gm.source(str(tmp_path / "in.jsonl"), format="openai-batch", options={"invalid": "yes"})
        gm.Job(source, lambda b: {"n": b["body"]}, None, workers=0).preview()
