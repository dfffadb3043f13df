"""Lines of OpenAI's batch files: members of objects as they are written, and a sink of such lines."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gristmill as gm
from gristmill.errors import BadJob
from gristmill.sinks.jsonmembers import members, quoted

pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=5)
SPACED = st.tuples(OBJECTS, st.booleans(), st.sampled_from([None, 1])).map(
    lambda o: json.dumps(o[0], ensure_ascii=o[1], indent=o[2])
)


@given(SPACED)
def test_members_are_the_text_of_an_object(text: str) -> None:
    """Each is a part of it, and all of them are what it means."""
    found = members(text)
    assert {name: json.loads(value) for name, value in found.items()} == json.loads(text)
    assert all(value in text for value in found.values())


@pytest.mark.long
@given(SPACED, st.data())
def test_what_is_not_an_object_has_no_members(text: str, data: st.DataObject) -> None:
    """Exactly if a reader of JSON says so: of texts with a character put in, or left out."""
    at = data.draw(st.integers(0, len(text)))
    sign = data.draw(st.sampled_from(["", *'{}[]:,"\\ x1\n']))
    changed = text[:at] + sign + text[at + (sign == "") :]
    means: Any = None
    with contextlib.suppress(ValueError):
        means = json.loads(changed)
    if isinstance(means, dict):
        assert {name: json.loads(value) for name, value in members(changed).items()} == means
    else:
        with pytest.raises(ValueError, match=r"\w"):
            members(changed)


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": ' + "[" * 100_000, "", "[]", "{} {}"])
def test_numbers_that_json_lacks_and_depths_without_end(text: str) -> None:
    """Are no JSON."""
    with pytest.raises(ValueError, match=r"NaN is not a number|nested too deeply|is expected|something follows"):
        members(text)


def test_members_as_texts_of_json() -> None:
    """Other members stay as they are, and null is null."""
    lines = b'{"body":{"a": [1.50]},"n":1.50}\n{"n":null,"body":null}\n'
    assert quoted(lines, {"body"}) == b'{"body":"{\\"a\\": [1.50]}","n":1.50}\n{"n":null,"body":null}\n'


SEED = '{"model": "m", "temperature": 0.10,\n "seed": 123456789012345678901}'
BODIES = [SEED, '{"x": "\\ud800 ü"}', "nonsense", "[1} ", None]


def lines(path: Path) -> list[str]:
    return [line for file in sorted(path.glob("*.jsonl")) for line in file.read_text(encoding="utf-8").splitlines()]


def test_requests_made_of_rows(tmp_path: Path) -> None:
    """Text that is JSON stands in the line as it is, a struct as an object; text that is none is a dead letter. What
    is read back are the texts, and a source of requests has the rows.
    """

    def ask(batch: dict[str, Any]) -> dict[str, Any]:
        return {"url": ["/v1/embeddings"] * len(batch["n"]), "method": ["POST"] * len(batch["n"])}

    rows = pa.table({"n": range(5), "custom_id": list("abcde"), "body": BODIES})
    sink = gm.sink(str(tmp_path / "out"), format="openai-batch", keep=["custom_id", "body"])
    gm.Job(rows, ask, sink, gates={"min_ok": 0}, workers=0).run()
    found = lines(tmp_path / "out")
    assert [list(json.loads(line)) for line in found] == [["custom_id", "method", "url", "body"]] * 3
    assert '"body":{"model": "m", "temperature": 0.10,  "seed": 123456789012345678901}' in found[0]
    assert '"body":{"x": "\\ud800 ü"}' in found[1] and json.loads(found[2])["body"] is None
    read = gm.read(str(tmp_path / "out")).to_table().to_pylist()
    assert [row["body"] for row in read] == [SEED.replace("\n", " "), BODIES[1], None]
    dead = gm.dead(str(tmp_path / "out")).to_pylist()
    assert [row["error"] for row in dead] == ["NotJson"] * 2 and "column 'body' is not JSON" in dead[0]["message"]
    assert gm.verify(str(tmp_path / "out"), deep=True).ok


def test_structs_are_objects(tmp_path: Path) -> None:
    """In one file, which a source of requests reads."""

    def ask(batch: dict[str, Any]) -> dict[str, Any]:
        bodies = [{"input": f"text {n}", "dimensions": 8} for n in batch["n"]]
        count = len(bodies)
        return {"custom_id": [f"r{n}" for n in batch["n"]], "method": ["POST"] * count, "url": ["/v1/x"] * count,
                "body": bodies}  # fmt: skip

    sink = gm.sink(str(tmp_path / "batch.jsonl"), format="openai-batch")
    gm.Job(pa.table({"n": range(3)}), ask, sink, workers=0).run()
    source = gm.source(str(tmp_path / "batch.jsonl"), format="openai-batch")
    told = gm.Job(source, lambda b: {"k": b["custom_id"]}, None, workers=0).preview(9)
    assert told["k"].to_pylist() == ["r0", "r1", "r2"]
    assert gm.read(str(tmp_path / "batch.jsonl")).to_table()["body"][0].as_py() == {"input": "text 0", "dimensions": 8}


def test_other_columns_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    """With what such lines have."""
    sink = gm.sink(str(tmp_path / "out"), format="openai-batch")
    with pytest.raises(BadJob, match="writes custom_id, method, url, body, or id, custom_id, response, error, and the"):
        gm.Job(pa.table({"n": [1]}), lambda b: {"custom_id": ["a"]}, sink, workers=0).run()
