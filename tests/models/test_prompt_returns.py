"""Answers with columns from a pydantic class or a JSON Schema: what is sent, what comes of it, what is refused."""

from __future__ import annotations

import datetime
import enum
import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, RootModel, computed_field, field_validator

import gristmill as gm
import kit
from gristmill.errors import BadJob, BadModel, PlanChanged
from gristmill.jobfile.writing import dump
from gristmill.models.answerschema import answers_in
from llmserver import ChatServer

ROWS = pa.table({"id": [1, 2, 3], "text": ["a b", "c", "d e f"]})
pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")


class Tone(enum.Enum):
    """Of a review."""

    warm = "warm"
    cold = "cold"


class Person(BaseModel):
    """Somebody."""

    name: str
    role: Literal["actor", "director"] = "actor"


class Review(BaseModel):
    """What is asked of a text."""

    film: str = Field(alias="Film", description="its title")
    stars: int | None = Field(None, ge=0, le=5)
    tone: Tone
    people: list[Person]
    seen: datetime.date
    price: Decimal = Decimal(7)

    @field_validator("film")
    @classmethod
    def no_row_is_called_c(cls, film: str) -> str:
        """A rule that no schema has."""
        if film == "c":
            raise ValueError("c is no film")
        return film.upper()

    @computed_field
    def people_count(self) -> int:
        """A column of its own."""
        return len(self.people)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"who": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
    "properties": {
        "film": {"type": "string", "pattern": "^.{1,4}$"},
        "stars": {"type": ["integer", "null"], "minimum": 0, "maximum": 5},
        "tone": {"enum": ["warm", "cold"]},
        "score": {"type": "number"},
        "people": {"type": "array", "items": {"$ref": "#/$defs/who"}, "minItems": 1},
    },
    "required": ["film", "tone", "people"],
}


def test_a_class_gives_columns_and_checks_answers(chat: ChatServer, tmp_path: Path) -> None:
    """Its own validators, too, in whose words the row is asked once more; what it writes are the columns' values."""
    given = {"Film": "$", "tone": "warm", "people": [{"name": "Ann"}], "seen": "2026-01-02", "stars": None}
    chat.set(answer=json.dumps(given))
    sink = tmp_path / "out"
    report = gm.prompt(ROWS, sink, prompt="{{ text }}", model="m", returns=Review, keep=["id"], gates={"min_ok": 0.5})
    assert report.rows_ok == 2
    found = gm.read(sink).to_table().sort_by("id")
    person = pa.struct([("name", pa.string()), ("role", pa.string())])
    assert {f.name: f.type for f in found.schema} == {
        "id": pa.int64(), "film": pa.string(), "stars": pa.int64(), "tone": pa.string(), "people": pa.list_(person),
        "seen": pa.string(), "price": pa.string(), "people_count": pa.int64(),
    }  # fmt: skip
    assert found.to_pylist()[0] == {
        "id": 1, "film": "A B", "stars": None, "tone": "warm", "people": [{"name": "Ann", "role": "actor"}],
        "seen": "2026-01-02", "price": "7", "people_count": 1,
    }  # fmt: skip
    (dead,) = gm.dead(sink).to_pylist()
    assert dead["error"].endswith("Misfit") and "Film: Value error, c is no film; the answer was" in dead["message"]
    bodies = chat.told()["bodies"]
    schema = bodies[0]["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["Film", "stars", "tone", "people", "seen", "price"]
    assert schema["additionalProperties"] is False and "$defs" not in schema and "default" not in json.dumps(schema)
    assert schema["properties"]["Film"] == {"type": "string", "description": "its title"}
    again = [b["messages"][-1]["content"] for b in bodies if len(b["messages"]) > 1]
    assert len({*again}) == 1 and "That does not fit: Film: Value error, c is no film." in again[0]


@pytest.mark.parametrize("structured", [True, False])
def test_a_schema_gives_columns_and_checks_answers(chat: ChatServer, structured: bool) -> None:
    """By all that it says, whether the endpoint takes it or it is told in the prompt; null is what is absent."""
    given = {"film": "$", "stars": 5, "tone": "cold", "score": None, "people": [{"name": "Ann", "age": 3}]}
    chat.set(answer=json.dumps(given), structured=structured)
    options: dict[str, Any] = {"prompt": "{{ text }}", "model": "m", "keep": ["id"], "gates": {"min_ok": 0.5}}
    found = gm.prompt(ROWS, returns=SCHEMA, **options)
    person = pa.struct([("name", pa.string())])
    assert {f.name: f.type for f in found.schema} == {
        "id": pa.int64(), "film": pa.string(), "stars": pa.int64(), "tone": pa.string(), "score": pa.float64(),
        "people": pa.list_(person),
    }  # fmt: skip
    assert sorted(found["film"].to_pylist()) == ["a b", "c"]  # "d e f" has five letters
    assert found.to_pylist()[0]["people"] == [{"name": "Ann"}] and found["score"].null_count == 2
    asked = [b["messages"][-1]["content"] for b in chat.told()["bodies"]]
    assert any("That does not fit: film: 'd e f' does not match" in text for text in asked)


@pytest.mark.long
def test_the_class_and_the_schema_count(chat: ChatServer, tmp_path: Path) -> None:
    """Another rule in the class is another job, and so is another schema; a file's content counts, not its name."""
    chat.set(answer='{"n": 3}')
    pq.write_table(ROWS, tmp_path / "rows.parquet")

    def run(*options: str, code: int = 0) -> str:
        command = ["gristmill", "prompt", "rows.parquet", "--model", "m", "--prompt"]
        done = subprocess.run(
            [sys.executable, "-m", *command, "{{ text }}", *options], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    written = "from pydantic import BaseModel, Field\nclass N(BaseModel):\n    n: int = Field(le={})\n"
    (tmp_path / "forms.py").write_text(written.format(3))
    run("by_class", "--returns", "forms.py:N")
    assert gm.read(tmp_path / "by_class").to_table()["n"].to_pylist() == [3, 3, 3]
    (tmp_path / "forms.py").write_text(written.format(4))
    assert "forms" in run("by_class", "--returns", "forms.py:N", code=PlanChanged.exit_code)
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 3}}, "required": ["n"]}
    for name in ("one.json", "two.json"):
        (tmp_path / name).write_text(json.dumps(schema))
    run("by_file", "--returns", "@one.json", "--save", "job.yaml")
    assert "nothing to do" in run("by_file", "--returns", "@two.json")
    (tmp_path / "two.json").write_text(json.dumps(schema).replace("3", "4"))
    assert "model.returns" in run("by_file", "--returns", "@two.json", code=PlanChanged.exit_code)
    assert "returns: '@one.json'" in (tmp_path / "job.yaml").read_text()
    done = subprocess.run([sys.executable, "-m", "gristmill", "run", "job.yaml"], cwd=tmp_path, capture_output=True)
    assert b"nothing to do" in done.stdout + done.stderr
    said = run("by_file", "--returns", "@one.json", "--returns", "n=int64", code=2)
    assert "--returns @one.json is all of it: give it alone" in said


def test_a_class_of_a_script_goes_to_workers(chat: ChatServer, tmp_path: Path) -> None:
    """By value, with its validators; a job file names one of a module, also when it is saved."""
    chat.set(answer='{"n": 3}')
    script = (
        "import gristmill as gm\nfrom pydantic import BaseModel, field_validator\n"
        "class N(BaseModel):\n    n: int\n"
        "    @field_validator('n')\n    @classmethod\n    def double(cls, n): return 2 * n\n"
        "rows = [{'text': str(n)} for n in range(40)]\n"
        "report = gm.prompt(rows, 'out', prompt='{{ text }}', model='m', returns=N, workers=2)\n"
        "print(report.read().to_table()['n'].unique().to_pylist())\n"
    )
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "[6]", done.stderr
    job = gm.Job(str(tmp_path / "rows.parquet"), gm.Prompt("{{ text }}", "m", returns=Review), str(tmp_path / "out"))
    assert f"{__name__}:Review" in dump(job.spec)


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


class Tree(BaseModel):
    """One that has no end."""

    n: int
    children: list[Tree] = []


class Loose(BaseModel):
    """One whose member may be anything."""

    ok: int
    anything: dict[str, int]


@pytest.mark.parametrize(
    ("returns", "said"),
    [
        (Tree, r"property 'children\[\]' contains itself \(#/\$defs/Tree\).*say how deep"),
        (Loose, "property 'anything' is an object with any names.*name its properties"),
        (_object(a={}), "property 'a' may be anything.*give it a type"),
        (_object(a={"type": "array"}), "property 'a' is an array of anything.*give its items a type"),
        (_object(a=_object(b={"type": ["string", "integer"]})), r"'a.b' is one of several types \(int64, string\)"),
        (_object(a={"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]}), "tuple of several"),
        (_object(a={"$ref": "#/$defs/gone"}), "property 'a' refers to '#/\\$defs/gone'"),
        (_object(a={"$ref": "https://example.org/a.json"}), "refers to 'https://example.org/a.json'"),
        (_object(a={"enum": [1, "a"]}), "property 'a' is one of several types"),
        (_object(a={"type": "text"}), "returns is no JSON Schema, at properties.a.type: 'text' is not valid"),
        ({"type": "array", "items": {"type": "string"}}, "the schema is of array: an answer is an object"),
        (RootModel[list[int]], "the schema is of array"),
        ({"type": "object"}, "the schema is an object with any names"),
        (dict, "returns is dict, which is no pydantic class"),
        ("review.json", "returns is 'review.json': give names and types, @FILE"),
        ("@gone.json", "returns @gone.json: cannot be read"),
        ("json:loads", "returns json:loads is no pydantic class"),
        ({}, "returns is empty"),
        (7, "returns is 7: give a mapping"),
    ],
)
def test_what_is_no_column_is_said_at_once(returns: Any, said: str) -> None:
    """By name, with the way out, before any request."""
    with pytest.raises((BadJob, BadModel), match=said) as e:
        gm.prompt(ROWS, prompt="x", model="m", returns=returns, base_url="http://127.0.0.1:9/v1")
    assert e.value.exit_code == 2


def test_examples_have_the_members_of_the_answer(chat: ChatServer) -> None:
    """As the schema names them."""
    chat.set(answer='{"n": 3}')
    schema = _object(n={"type": "integer"})
    gm.prompt(ROWS, prompt="{{ text }}", model="m", returns=schema, examples=[{"text": "u", "n": 1}])
    assert json.loads(chat.told()["bodies"][0]["messages"][1]["content"]) == {"n": 1}


SCALARS = st.sampled_from([("string", "x"), ("integer", 3), ("number", 0.5), ("boolean", True)])


@given(st.recursive(
    SCALARS.map(lambda kind: ({"type": kind[0]}, kind[1])),
    lambda inner: inner.map(lambda one: ({"type": "array", "items": one[0]}, [one[1]]))
    | st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(
        lambda some: (_object(**{n: s for n, (s, _) in some.items()}), {n: v for n, (_, v) in some.items()})
    )
    | inner.map(lambda one: ({"anyOf": [one[0], {"type": "null"}]}, one[1])),
    max_leaves=6,
))  # fmt: skip
def test_values_of_any_schema_are_its_columns(one: tuple[Any, Any]) -> None:
    """Whole, with everything optional null, and as a schema that is sent accepts them."""
    import jsonschema

    schema, value = one
    answers = answers_in(_object(x=schema))
    assert pa.Table.from_pylist([answers.held({"x": value})], schema=answers.columns).to_pylist() == [{"x": value}]
    assert answers.held({}) == answers.held({"x": None}) == {"x": None}
    jsonschema.validate({"x": None}, answers.sent)


@pytest.mark.long
def test_a_local_model_is_held_to_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a grammar: of arrays with their lengths, nulls, numbers among choices, and objects in objects."""
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    pytest.importorskip("openvino_genai")
    try:
        model = str(kit.smollm())
    except kit.KitError as e:
        pytest.skip(str(e))
    schema = _object(
        choice={"enum": ["red", "blue"]}, level={"enum": [1, 2, None]}, tags={
            "type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3,
        },
        more=_object(sure={"type": "boolean"}),
    )  # fmt: skip
    schema["required"] = ["choice", "level", "tags", "more"]
    found = gm.prompt(ROWS, prompt="A colour for {{ text }}", model=model, returns=schema, max_tokens=60).to_pylist()
    assert len(found) == 3
    for row in found:
        assert row["choice"] in ("red", "blue") and row["level"] in (1, 2, None) and 2 <= len(row["tags"]) <= 3
        assert isinstance(row["more"]["sure"], bool) or row["more"]["sure"] is None
