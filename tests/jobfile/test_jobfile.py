"""Job files: what they say, what overrides what, what is refused and how, and that a written one reads back."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.errors import BadJob
from gristmill.job import specs
from gristmill.job.job import JobSpec, Sink, Source
from gristmill.job.options import EngineSpec, Gates, Running
from gristmill.job.requests import Requests
from gristmill.job.secret import Secret, reveal, scrub, secrets_in
from gristmill.jobfile.document import MOST_BYTES, read_document, write_document
from gristmill.jobfile.jobfile import good_name, is_job, load, read_job_file
from gristmill.jobfile.overlay import Change, changes_of, overlay
from gristmill.jobfile.writing import dump

CONTRACT = """\
vars: {ds: "2026-01-01"}
source: {uri: "data/reviews/dt=${ds}/", columns: [id, text, lang], where: "lang = 'en'"}
steps:  [{flat_map: "chunking:split", args: {size: 256}}]
model:  {embed: "models/minilm", text: text, backend: auto}        # or classify:, onnx:, torchscript:, sklearn:, call:
sink:   {uri: "out/dt=${ds}/", format: parquet, keep: [id]}
gates:  {min_ok: 0.99, warn_failed: 0.001, allow_empty: false}
engine: {name: local, workers: auto}
profiles: {prod: {engine: {name: ray, address: auto, gpus_per_worker: 1, workers: [4, 64]}}}
on_new_files: refuse
"""
SMALL = "source: rows/\nmodel: {call: 'scoring:score'}\nsink: out/\n"


TODAY = '"2026-01-01"'


def swap(old: str, new: str) -> str:
    assert old in CONTRACT
    return CONTRACT.replace(old, new)


def job(tmp_path: Path, text: str, **options: object) -> JobSpec:
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return read_job_file(path, **options)  # type: ignore[arg-type]


def refusal(tmp_path: Path, text: str, **options: object) -> str:
    with pytest.raises(BadJob) as caught:
        job(tmp_path, text, **options)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(str(tmp_path) + "/", "")


# ---------------------------------------------------------------- what a file says


def test_the_contract_s_example_is_read_as_it_is_meant(tmp_path: Path) -> None:
    """The example of the contract, field by field."""
    spec = job(tmp_path, CONTRACT)
    assert spec.source == Source(("data/reviews/dt=2026-01-01/",), columns=("id", "text", "lang"), where="lang = 'en'")
    assert spec.steps == (specs.flat_map("chunking:split", size=256),)
    assert spec.model == gm.TextEmbedder("models/minilm", "text")
    assert spec.sink == Sink("out/dt=2026-01-01/", format="parquet", keep=("id",))
    assert spec.gates == Gates(min_ok=0.99)
    assert spec.engine == EngineSpec() and spec.on_new_files == "refuse"


def test_a_profile_is_merged_over_the_job(tmp_path: Path) -> None:
    """Mappings merge; keys that are not the engine's common ones become its options."""
    spec = job(tmp_path, CONTRACT, profile="prod")
    assert spec.engine == EngineSpec("ray", (4, 64), options={"address": "auto", "gpus_per_worker": 1})
    assert spec.model == gm.TextEmbedder("models/minilm", "text")


def test_a_profile_with_another_kind_of_model_replaces_the_model(tmp_path: Path) -> None:
    """One kind over another is another model, not a model of two kinds."""
    text = CONTRACT + "  \n"
    text = text.replace("profiles: {", "profiles: {other: {model: {onnx: m.onnx, features: [a]}}, ")
    assert job(tmp_path, text, profile="other").model == gm.OnnxModel("m.onnx", ("a",))


def test_strongest_is_set_then_profile_then_file_and_variables_come_last(tmp_path: Path) -> None:
    """--set wins over the profile, and its value may use variables too."""
    text = CONTRACT.replace("engine: {name: ray,", "sink: {uri: 'prod/${ds}'}, engine: {name: ray,")
    assert job(tmp_path, text, profile="prod").sink.uri == "prod/2026-01-01"  # type: ignore[union-attr]
    spec = job(tmp_path, text, profile="prod", sets=["sink.uri=set/${ds}"], variables={"ds": "d"})
    assert spec.sink.uri == "set/d"  # type: ignore[union-attr]


def test_shorthands(tmp_path: Path) -> None:
    """A text for source, sink, engine or a step; a text that is MODULE:NAME is a function, any other a condition."""
    text = SMALL + "engine: local\nsteps: ['m:f', 'x > 1', {filter: 'm:good'}, {map: 'm:g', args: {n: 1}}]\n"
    spec = job(tmp_path, text)
    assert spec.source.uri == ("rows/",) and spec.sink == Sink("out/")
    assert [(s.kind, s.expression, s.call and s.call.target) for s in spec.steps] == [
        ("map", None, "m:f"), ("filter", "x > 1", None), ("filter", None, "m:good"), ("map", None, "m:g"),
    ]  # fmt: skip
    assert job(tmp_path, SMALL.replace("rows/", "[a/, b/]")).source.uri == ("a/", "b/")


def test_scalars_are_yaml_1_2(tmp_path: Path) -> None:
    """`no` and a date are texts, 1e-3 is a number: the surprises of YAML 1.1 do not reach a column name or a folder."""
    text = (
        "source: {uri: 2026-01-01, columns: [no, yes, on]}\nmodel: {call: 'm:f', args: {a: 1e-3, b: 0o17, c: .inf}}\n"
    )
    spec = job(tmp_path, text)
    assert spec.source.uri == ("2026-01-01",) and spec.source.columns == ("no", "yes", "on")
    assert spec.model.call.args == {"a": 0.001, "b": 15, "c": float("inf")}  # type: ignore[union-attr]


def test_variables_keep_their_type_and_can_be_escaped(tmp_path: Path) -> None:
    """A text that is one reference takes the variable's type; $${ is a plain ${."""
    text = "vars: {n: 10, name: x}\n" + SMALL.replace("rows/", "{uri: '${name}/$${kept}/${n}', limit: '${n}'}")
    spec = job(tmp_path, text, variables={"n": "25"})
    assert spec.source.limit == 25 and spec.source.uri == ("x/${kept}/25",)


def test_a_whole_number_of_the_file_may_be_given_with_a_fraction(tmp_path: Path) -> None:
    """2.5 where the file says 2 is a number; where only a whole one fits, its own place refuses it."""
    text = "vars: {k: 2}\n" + SMALL.replace("'scoring:score'", "'m:f', args: {k: '${k}'}")
    assert job(tmp_path, text, variables={"k": "2.5"}).model.call.args == {"k": 2.5}  # type: ignore[union-attr]
    limited = text.replace("rows/", "{uri: rows/, limit: '${k}'}")
    assert "2.5" in refusal(tmp_path, limited, variables={"k": "2.5"})


def test_a_variable_that_only_a_profile_uses_or_declares(tmp_path: Path) -> None:
    """It may be given to the job without that profile, by --var and --set; one may use another."""
    text = swap("{prod: {", "{prod: {vars: {head: a, all: '${head}b'}, sink: '${all}${tail}', ")
    spec = job(tmp_path, text, profile="prod", sets=["vars.tail=c"], variables={"head": "x"})
    assert spec.sink is not None and spec.sink.uri == "xbc"
    spec = job(tmp_path, swap("{prod: {", "{prod: {vars: {ds: x}, "), profile="prod")
    assert spec.source.uri == ("data/reviews/dt=x/",)


WRITTEN = ["1.10", "01234", "1e3", "0x1F", "+5", ".5", "TRUE", "12345678901234567890.10", "-0"]


@pytest.mark.parametrize("text", WRITTEN)
@pytest.mark.parametrize("by", ["file", "profile", "--var", "--set"])
def test_a_variable_in_a_text_is_what_was_written(tmp_path: Path, text: str, by: str) -> None:
    """Version 1.10 is not version 1.1, and a postcode keeps its zeros, also where a number was meant before."""
    before = "false" if text == "TRUE" else text if by == "file" else "1.0"
    plain = f"vars: {{v: {before}}}\nprofiles: {{p: {{vars: {{v: {text}}}}}}}\n" + SMALL.replace("rows/", "v${v}.txt")
    if by == "--var" and text == "0x1F":
        assert "give a number" in refusal(tmp_path, plain, variables={"v": text})
        return
    ways: dict[str, dict] = {"profile": {"profile": "p"}, "--var": {"variables": {"v": text}}}
    ways["--set"] = {"sets": [f"vars.v={text}"]}
    written = plain if by != "file" else plain.replace(f"v: {before}", f"v: {text}", 1)
    assert job(tmp_path, written, **ways.get(by, {})).source.uri == (f"v{text}.txt",)


@pytest.mark.parametrize("text", [t for t in WRITTEN if t != "TRUE"])
@pytest.mark.parametrize("by", ["file", "profile", "--var"])
def test_a_variable_alone_is_no_number_that_reads_otherwise(tmp_path: Path, text: str, by: str) -> None:
    """Refused with the way out, which works; a number as it is printed is one."""
    alone = SMALL.replace("'scoring:score'", "'m:f', args: {v: '${v}', w: '${w}'}")
    declared = text if by == "file" else "1.0"
    plain = f"vars: {{v: {declared}, w: 2.0}}\nprofiles: {{p: {{vars: {{v: {text}}}}}}}\n" + alone
    way: dict = {"profile": {"profile": "p"}, "--var": {"variables": {"v": text}}}.get(by, {})
    said = refusal(tmp_path, plain, **way)
    assert text in said and (("in quotes" in said and "model.args.v" in said) or "give a number" in said)
    if by == "--var":
        quoted = job(tmp_path, plain.replace("v: 1.0", 'v: "1.0"'), **way)
        assert quoted.model.call.args == {"v": text, "w": 2.0}  # type: ignore[union-attr]
        canonical = job(tmp_path, plain, variables={"v": "-0.25", "w": "3"})
        assert canonical.model.call.args == {"v": -0.25, "w": 3.0}  # type: ignore[union-attr]


MISTAKES = [
    ("", {}, "job.yaml: is empty: a job file is a mapping with `source`, `model` and `sink`"),
    ("- a\n", {}, "job.yaml: holds a list"),
    (
        "a: [1\nb: 2",
        {},
        "job.yaml:2:2: expected ',' or ']', but got ':', parsing a flow sequence that begins in line 1: close",
    ),
    (
        "a: b: c",
        {},
        "job.yaml:1:5: mapping values are not allowed here: close what is open, indent alike and without tabs",
    ),
    ("a: 1\na: 2", {}, "job.yaml:2: 'a' appears twice: first in line 1"),
    ("1: x", {}, "the key 1 is a number: keys must be text, put it in quotes"),
    (
        "a: !!python/object/apply:os.system [x]",
        {},
        "job.yaml:1:4: the tag !!python/object/apply:os.system is not allowed",
    ),
    ("a: !!str 5", {}, "job.yaml:1:4: the tag !!str is not allowed"),
    (
        SMALL.replace("model:", "modle:"),
        {},
        "a job has no key 'modle': did you mean 'model'?\njob.yaml: model is missing",
    ),
    (SMALL + "sinks: 1", {}, "job.yaml:4: a job has no key 'sinks': did you mean 'sink'?"),
    (SMALL + "storage: {}", {}, "no key 'storage': it is a key of source and of sink: write source: {storage: …}"),
    (SMALL + "batch_rows: 1", {}, "job.yaml:4: a job has no key 'batch_rows': did you mean running: {batch_rows: …}?"),
    (
        SMALL.replace("call:", "cal:"),
        {},
        "job.yaml:2: model does not say what it is: give one of embed, classify, onnx,",
    ),
    (
        SMALL + "running: {workers: 0}",
        {},
        "running has no key 'workers': it is a key of engine: write engine: {workers: …}",
    ),
    (SMALL.replace("call:", "cal:"), {}, "did you mean 'call' by 'cal'?"),
    (SMALL.replace("call:", "embed: m, call:"), {}, "job.yaml:2: model has both embed and call: keep one of them"),
    ("source: x\nsink: y\n", {}, "job.yaml: model is missing: What scores the rows"),
    (swap("text: text", "txt: text"), {}, "job.yaml:4: model.text is missing: The column that holds the text"),
    (swap("text: text", "txt: text"), {}, "job.yaml:4: model has no key 'txt': did you mean 'text'?"),
    (SMALL + "update: {kye: [id]}", {}, "job.yaml:4: update has no key 'kye': did you mean 'key'?"),
    (SMALL + "update: {key: 3}", {}, "job.yaml:4: update.key: 3 does not fit: give a list"),
    (SMALL + "update: 3", {}, "job.yaml:4: update: 3 does not fit: give a mapping or true or false"),
    (
        SMALL.replace("{call: 'scoring:score'}", "s.py:score"),
        {},
        "job.yaml:2: model: 's.py:score' does not fit: give a mapping, such as {call: \"s.py:score\"}",
    ),
    (SMALL.replace("{call: 'scoring:score'}", "models/mini"), {}, 'give a mapping, such as {embed: "models/mini"}'),
    (SMALL.replace("{call: 'scoring:score'}", "null"), {}, 'give a mapping, such as {call: "module:name"}'),
    (SMALL + "post: [5]", {}, 'post.0: 5 does not fit: give a mapping, such as {map: "module:name"}'),
    (CONTRACT, {"sets": ["steps=[m:f]"]}, "--set steps=[m:f]: steps: '[m:f]' does not fit: give a list as JSON"),
    (SMALL + "gates: {drift: {y: {psi: -1}}}", {}, "gates.drift.y.psi is -1: give a number from 0"),
    (swap("0.99", "high"), {}, "job.yaml:6: gates.min_ok: 'high' does not fit: give a number"),
    (swap("0.99", "1.5"), {}, "job.yaml:6: gates.min_ok is 1.5: give a share between 0 and 1"),
    (swap("[id, text, lang]", "7"), {}, "job.yaml:2: source.columns: 7 does not fit: give a list"),
    (swap("[id, text, lang]", "[id, 7]"), {}, "source.columns.1: 7 does not fit: give a text (in quotes)"),
    (
        swap("workers: auto", "workers: many"),
        {},
        "job.yaml:7: engine.workers: 'many' does not fit: give a whole number",
    ),
    (
        swap("workers: auto", "on_new_files: append"),
        {},
        "job.yaml:7: engine has no key 'on_new_files': it is a key of the job itself: write on_new_files: … at its top",
    ),
    (swap("workers: auto", "adress: x"), {}, "job.yaml:7: engine has no key 'adress': its keys are name, workers"),
    (swap("refuse", "ignore"), {}, "on_new_files: 'ignore' does not fit: give 'refuse' or 'append'"),
    (
        swap("flat_map:", "flatmap:"),
        {},
        "job.yaml:3: steps.0 does not say what it is: give one of map, flat_map, filter",
    ),
    (swap("chunking:split", "chunking"), {}, "job.yaml:3: callable 'chunking': write it as MODULE:NAME"),
    (swap("{prod: {engine: {name", "{prod: {engnie: {name"), {}, "job.yaml:8: a job has no key 'engnie'"),
    (
        SMALL.replace("call: 'scoring:score'", "prompt: x, model: m"),
        {},
        "model has no key 'model': the language model's",
    ),
    (CONTRACT, {"profile": "pord"}, "--profile pord: job.yaml has no such profile: did you mean prod?"),
    (CONTRACT, {"variables": {"dss": "x"}}, "--var dss=x: job.yaml has no ${dss}; did you mean ds?"),
    (
        swap("{prod: {", "{prod: {vars: {dss: x}, "),
        {},
        "job.yaml:8: profile prod: job.yaml has no ${dss}; did you mean ds?",
    ),
    (
        swap("{prod: {", "{p: {vars: {dss: x}}, prod: {"),
        {"profile": "prod"},
        "job.yaml:8: profile p: job.yaml has no ${dss}",
    ),
    (swap("gpus_per_worker", "gpus_per_workers"), {}, "job.yaml:8: engine has no key 'gpus_per_workers': did you mean"),
    (CONTRACT, {"sets": ["vars.dss=x"]}, "--set vars.dss=x: job.yaml has no ${dss}; did you mean ds?"),
    (swap("=${ds}", "=${dss}"), {}, "job.yaml:2: source.uri uses ${dss}, which is not defined: did you mean ${ds}?"),
    (swap("=${ds}", "=${ds"), {}, "source.uri has an unclosed ${"),
    (swap(TODAY, "null"), {}, "source.uri uses ${ds}, which has no value: give it with --var ds=…"),
    (swap(TODAY, "7"), {"variables": {"ds": "x"}}, "--var ds=x: the job file gives ds as 7: give a number"),
    (swap(TODAY, "[7]"), {}, "job.yaml:1: vars.ds is a list: a variable is one value"),
    (CONTRACT, {"sets": ["model.txt=a"]}, "--set model.txt=a: model has no key 'txt': did you mean 'text'?"),
    (
        CONTRACT,
        {"sets": ["source.limit=0"]},
        "--set source.limit=0: source limit is 0: give a whole number of at least 1",
    ),
    (CONTRACT, {"sets": ["source.limit=true"]}, "source.limit: true does not fit: give a whole number"),
    (CONTRACT, {"sets": ["steps.3.args.n=1"]}, "--set steps.3.args.n=1: there is no number 3 in a list of 1"),
    (CONTRACT, {"sets": ["model"]}, "--set model: write it as a.b=value"),
    (CONTRACT, {"sets": ["on_null.x=1"]}, "--set on_null.x=1: on_null: {'x': 1} does not fit: give 'dead', 'skip'"),
    (swap("keep: [id]", "partition_by: ['../x']"), {}, "sink.partition_by is '../x': a column's name has no slash"),
    (swap("text: text", "text: text, output: '..'"), {}, "model.output is '..': a column's name"),
]


@pytest.mark.parametrize(("text", "options", "said"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_told_with_value_place_and_way_out(tmp_path: Path, text: str, options: dict, said: str) -> None:
    """One clear line for each mistake, exit 2 (fault 37)."""
    assert said in refusal(tmp_path, text, **options)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    """Nobody wants to fix a file one run at a time."""
    text = CONTRACT.replace("0.99", "high").replace("columns:", "colums:").replace("refuse", "no")
    assert len(refusal(tmp_path, text).split("\n")) == 3


def test_yaml_bombs_are_refused_quickly(tmp_path: Path) -> None:
    """Aliases of aliases, depth, cycles, merges and sheer size end in one line, not in a full memory (fault 37)."""
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
    )
    assert "more than 50,000 values once aliases are written out" in refusal(tmp_path, bomb)
    merge = "a0: &a0 {x: 1}\n" + "".join(
        f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 30)
    )
    assert "more than 50,000 values" in refusal(tmp_path, merge)
    assert "nested more than" in refusal(tmp_path, "a: " + "[" * 100_000)
    assert "nested more than" in refusal(tmp_path, "a: &a [*a]")
    assert f"at most {MOST_BYTES:,}" in refusal(tmp_path, "a: " + "x" * (MOST_BYTES + 1))
    assert "cannot be read" in refusal(tmp_path, "a: " + "9" * 10_000)


def test_merge_keys_work(tmp_path: Path) -> None:
    """`<<` merges mappings, own keys win."""
    text = "vars: {a: 1}\n" + SMALL.replace("{call: 'scoring:score'}", "{call: 'm:f', args: {<<: {a: 1, b: 2}, b: 3}}")
    assert job(tmp_path, text).model.call.args == {"a": 1, "b": 3}  # type: ignore[union-attr]


def test_a_missing_file_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value, the place and the way out."""
    (tmp_path / "job.yaml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadJob, match=r"jbo\.yaml: there is no such job file: did you mean job\.yaml\?"):
        load("jbo.yaml")
    with pytest.raises(BadJob, match="cannot be read: Is a directory"):
        (tmp_path / "d.yaml").mkdir()
        load("d.yaml")


# ---------------------------------------------------------------- secrets

SECRET = """\
source: {uri: "s3://${env:KEY}@bucket/x", storage: {token: "${env:TOKEN}"}}
model: {call: "m:f", args: {key: "${env:TOKEN}", list: ["a-${env:TOKEN}"]}}
sink: out/
"""
ENVIRON = {"KEY": "user:hunter2", "TOKEN": "s3cr3t-value"}


def test_a_secret_shows_itself_as_written_everywhere(tmp_path: Path) -> None:
    """repr, str, JSON, the job file and equality know only ${env:TOKEN} (fault 39); reveal gives the value."""
    spec = job(tmp_path, SECRET, environ=ENVIRON)
    shown = [repr(spec), str(spec), json.dumps(spec.model.call.args), dump(spec), f"{spec.source.storage['token']}"]  # type: ignore[union-attr]
    for text in shown:
        assert "hunter2" not in text and "s3cr3t" not in text
    assert spec.source.storage["token"] == "${env:TOKEN}"
    assert reveal(spec.source.uri) == ("s3://user:hunter2@bucket/x",)
    assert reveal(spec.model.call.args) == {"key": "s3cr3t-value", "list": ["a-s3cr3t-value"]}  # type: ignore[union-attr]
    found = [(str(secret), secret.reveal()) for secret in secrets_in(spec)]
    assert len([shown for shown, _ in found if "${env:" in shown]) == 4 and ("***", "hunter2") in found


def test_a_secret_reaches_a_worker_and_is_scrubbed_from_text(tmp_path: Path) -> None:
    """Pickle carries the value; what a library says about it is cleaned."""
    spec = pickle.loads(pickle.dumps(job(tmp_path, SECRET, environ=ENVIRON)))
    assert reveal(spec.source.storage) == {"token": "s3cr3t-value"}
    assert scrub("403 for s3cr3t-value", secrets_in(spec)) == "403 for ${env:TOKEN}"
    assert scrub("a 1 in 1", [Secret("${env:N}", "1")]) == "a 1 in 1"


def test_two_values_of_a_secret_are_the_same_job(tmp_path: Path) -> None:
    """A rotated token is no other job."""
    assert job(tmp_path, SECRET, environ=ENVIRON) == job(tmp_path, SECRET, environ={"KEY": "a", "TOKEN": "b"})


def test_secrets_stay_out_of_what_shapes_answers(tmp_path: Path) -> None:
    """where=, names and gates are written to plans: a value of the environment cannot stand there."""
    text = SMALL.replace("rows/", "{uri: rows/, where: \"k = '${env:TOKEN}'\"}")
    said = refusal(tmp_path, text, environ=ENVIRON)
    assert "source.where uses ${env:TOKEN}" in said and "--var" in said and "s3cr3t" not in said


def test_a_missing_secret_is_named(tmp_path: Path) -> None:
    """The variable's name, where it is needed, and what to do."""
    assert "job.yaml:1: source.uri needs the environment variable KEY, which is not set: export KEY=…" in refusal(
        tmp_path, SECRET, environ={}
    )


def test_a_variable_can_hold_a_secret(tmp_path: Path) -> None:
    """What is made from it is a secret too, and stays out of the same places."""
    text = "vars: {token: '${env:TOKEN}'}\n" + SMALL.replace("'scoring:score'", "'m:f', args: {a: 'x${token}'}")
    spec = job(tmp_path, text, environ=ENVIRON)
    assert spec.model.call.args == {"a": "x${env:TOKEN}"}  # type: ignore[union-attr]
    assert reveal(spec.model.call.args) == {"a": "xs3cr3t-value"}  # type: ignore[union-attr]


# ---------------------------------------------------------------- jobs in Python

PYTHON = """\
import gristmill as gm
def score(batch): return {"y": batch["x"]}
job = gm.Job("rows/", score, "out/")
other = gm.Job("rows/", gm.TextEmbedder("m", text="t"), "out2/")
number = 7
"""


def test_python_files_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FILE.py is its `job`, FILE.py:NAME and MODULE:NAME another one; the module is importable by its own name."""
    (tmp_path / "pipe_a.py").write_text(PYTHON)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load(str(tmp_path / "pipe_a.py")).sink == Sink("out/")
    assert load(str(tmp_path / "pipe_a.py") + ":other").sink == Sink("out2/")
    assert load("pipe_a:other").model == gm.TextEmbedder("m", text="t")
    assert sys.modules["pipe_a"].job.spec.model.call.target.__module__ == "pipe_a"
    with pytest.raises(BadJob, match=r"nope is not there: its jobs are job, other"):
        load("pipe_a:nope")
    with pytest.raises(BadJob, match="number is a int, not a gristmill Job"):
        load("pipe_a:number")
    with pytest.raises(BadJob, match=r"--var ds=1: .* is Python, which has no variables"):
        load("pipe_a:job", variables={"ds": "1"})


def test_python_that_does_not_import_is_told_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own line, not ours."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "pipe_b.py").write_text("x = 1\ny = 1 / 0\n")
    with pytest.raises(BadJob, match=r"ZeroDivisionError: division by zero \(.*pipe_b\.py:2\)"):
        load(str(tmp_path / "pipe_b.py"))
    (tmp_path / "pipe_c.py").write_text("import not_installed_here\n")
    with pytest.raises(BadJob, match="needs the module 'not_installed_here'"):
        load(str(tmp_path / "pipe_c.py"))
    with pytest.raises(BadJob, match="no module named 'pipe_zz'"):
        load("pipe_zz:job")
    with pytest.raises(BadJob, match="there is no such file"):
        load(str(tmp_path / "pipe_zz.py"))
    (tmp_path / "json.py").write_text(PYTHON)
    with pytest.raises(BadJob, match="there is already a module named 'json'"):
        load(str(tmp_path / "json.py"))
    with pytest.raises(BadJob, match="not a job: give a job file"):
        load("what ever")


@pytest.mark.parametrize(
    ("ref", "is_one"),
    [("job.yaml", True), ("a/b.yml", True), ("p.py", True), ("p.py:x", True), ("m.n:x", True), ("out/", False),
     ("s3://bucket/x", False), ("out", False), ("C:\\out", False)],
)  # fmt: skip
def test_jobs_are_told_from_sinks(ref: str, is_one: bool) -> None:
    """status and verify take either."""
    assert is_job(ref) is is_one


# ---------------------------------------------------------------- laid over


def test_set_on_a_job_made_in_python() -> None:
    """The paths are a job file's, whatever the classes are; values that depend on each other are set together."""
    spec = gm.Job("rows/", gm.model("m:f", size=1), "out/", steps=[gm.flat_map("m:g", n=1)]).spec
    sets = ["model.args.size=2", "model.batch_format=rows", "sink.key=id", "sink.row_id=rid", "source.options.x=1",
            "steps.0.args.n=5", "on_null=skip", "gates.min_ok=0.5"]  # fmt: skip
    made = overlay(spec, changes_of(sets))
    assert made.model.call == specs.Call("m:f", {"size": 2}, "rows")  # type: ignore[union-attr]
    assert made.sink == Sink("out/", key=("id",), row_id="rid") and made.source.options == {"x": 1}
    assert made.steps[0].call.args == {"n": 5} and made.on_null == "skip" and made.gates.min_ok == 0.5  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("source.limt=1", "source has no 'limt': did you mean limit?"),
        ("source.limit=x", "--set source.limit=x: 'x' does not fit: give a whole number"),
        ("model.device=cpu", "this model (call) has no 'device'"),
        ("model=1", "model is a whole section"),
        ("steps.4.args.n=1", "there is no number 4 in a list of 1"),
        ("engine.adress=x", "engine has no 'adress'"),
        ("source.limit=0", "--set source.limit=0: source limit is 0"),
    ],
)
def test_a_wrong_set_on_a_job_made_in_python(text: str, said: str) -> None:
    """The same care as for a file."""
    spec = gm.Job("rows/", gm.model("m:f", size=1), "out/", steps=[gm.flat_map("m:g", n=1)]).spec
    with pytest.raises(BadJob) as caught:
        overlay(spec, changes_of([text]))
    assert said in str(caught.value)


def test_a_flag_that_the_model_does_not_have_is_refused_by_its_name() -> None:
    """--dtype for a function says so instead of doing nothing."""
    with pytest.raises(BadJob, match=r"--dtype: this model \(call\) has no 'dtype'"):
        overlay(gm.Job("rows/", gm.model("m:f"), "out/").spec, [Change(("model", "dtype"), "int8", "--dtype")])


# ---------------------------------------------------------------- there and back

names = st.text(min_size=1, max_size=12)
columns = st.text(min_size=1, max_size=12).filter(good_name)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=8), plain, max_size=3)
targets = st.sampled_from(["m:f", "a.b:C", "m_1:f.g"])
calls = st.builds(specs.Call, targets, arguments, st.sampled_from(get_args(specs.BatchFormat)))
of_steps = calls.filter(lambda call: call.batch_format != "row")  # which is for models
sources = st.builds(
    Source,
    uri=st.lists(names, min_size=1, max_size=3).map(tuple),
    format=st.none() | names,
    columns=st.none() | st.lists(names, max_size=3).map(tuple),
    where=st.none() | names,
    limit=st.none() | st.integers(1, 10**9),
    seed=st.integers(0, 10),
    types=st.none() | st.dictionaries(names, names, max_size=2),
    on_bad_file=st.sampled_from(["fail", "skip"]),
    options=arguments,
    storage=arguments,
)
sink_fields = {
    "uri": names,
    "format": st.none() | st.sampled_from(["parquet", "jsonl", "npy", "openai-batch"]),
    "keep": st.none() | st.lists(names, max_size=3).map(tuple),
    "row_id": columns,
    "key": st.lists(columns, max_size=2).map(tuple),
    "dead_payload": st.integers(0, 10**9),
}
sinks = st.builds(Sink, **sink_fields, merge=st.booleans()) | st.builds(
    Sink,
    **sink_fields,
    partition_by=st.lists(columns, max_size=2).map(tuple),
    sort_by=st.lists(columns, max_size=2).map(tuple),
    files=st.none() | st.integers(1, 99),
)
steps = st.one_of(
    st.builds(
        specs.Step,
        st.sampled_from(["map", "flat_map", "filter"]),
        of_steps,
    ),
    st.builds(lambda e: specs.Step("filter", None, e), st.text(max_size=20).filter(lambda e: ":" not in e)),
)
models = st.one_of(
    st.builds(specs.FunctionModel, calls, st.none() | st.dictionaries(columns, names, max_size=2), st.none() | columns),
    st.builds(
        specs.TextEmbedder, names, names, columns, prompt=st.none() | st.text(max_size=9),
        normalize=st.none() | st.booleans(), truncate_dim=st.none() | st.integers(1, 99),
    ),
    st.builds(specs.TextClassifier, names, names, all_scores=st.booleans()),
    st.builds(specs.OnnxModel, names, st.none() | st.lists(names, max_size=2).map(tuple), st.none() | arguments),
    st.builds(Requests, names, concurrency=st.integers(1, 99), cache=st.none() | names),
    st.builds(specs.SklearnModel, names, method=st.just("predict_proba"), allow_pickle=st.booleans()),
)  # fmt: skip
engines = st.one_of(
    st.builds(EngineSpec, workers=st.just("auto") | st.integers(0, 9)),
    st.builds(
        EngineSpec,
        st.just("ray"),
        st.tuples(st.integers(1, 4), st.integers(4, 9)),
        options=st.just({"address": "auto"}),
    ),
)
jobs = st.builds(
    JobSpec,
    source=sources,
    model=models,
    sink=st.none() | sinks,
    steps=st.lists(steps, max_size=2).map(tuple),
    post=st.lists(st.builds(specs.Step, st.just("map"), of_steps), max_size=2).map(tuple),
    on_null=st.sampled_from(["dead", "skip", "keep"]),
    running=st.builds(Running, batch_rows=st.just("auto") | st.integers(1, 99), batch_timeout=st.floats(0.1, 1e6)),
    gates=st.builds(Gates, min_ok=st.floats(0, 1), allow_empty=st.booleans()),
    engine=engines,
)


@given(jobs)
@settings(max_examples=60, deadline=None)
def test_a_job_written_and_read_is_the_same_job(tmp_path_factory: pytest.TempPathFactory, spec: JobSpec) -> None:
    """Whatever the names and arguments hold: ${, quotes, line breaks, numbers that look like text."""
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    path.write_text(dump(spec), encoding="utf-8")
    assert read_job_file(path, environ={}) == spec


@given(st.dictionaries(st.text(max_size=8).filter(lambda key: key != "vars"), plain, max_size=4))  # kept as written
@settings(max_examples=120, deadline=None)
def test_plain_values_survive_the_yaml(value: dict) -> None:
    """Text stays text and numbers stay numbers, of the same type."""
    assert repr(read_document(write_document(value).encode(), "x").value) == repr(value) or not value


@given(st.text(max_size=40) | st.binary(max_size=40))
@settings(max_examples=120, deadline=None)
def test_any_bytes_end_in_a_job_or_in_one_clear_refusal(text: str | bytes) -> None:
    """Never a traceback of the parser's (fault 37)."""
    try:
        read_document(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text, "x")
    except BadJob as e:
        assert str(e).startswith("x")


def test_functions_are_written_by_name_and_lambdas_refused() -> None:
    """What a job file cannot hold is refused, not written wrongly."""
    assert "call: 'json:dumps'" in dump(gm.Job("r/", json.dumps, "o/").spec)
    with pytest.raises(BadJob, match="put it in a module"):
        dump(gm.Job("r/", lambda batch: batch, "o/").spec)
    with pytest.raises(BadJob, match="a table in memory"):
        dump(gm.Job([{"x": 1}], json.dumps, "o/").spec)


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_the_examples_are_jobs(path: Path) -> None:
    """With each of their profiles, and as the schema has it."""
    jsonschema = pytest.importorskip("jsonschema")
    from gristmill.jobfile.sections import json_schema

    environ = {"WAREHOUSE_KEY": "key", "WAREHOUSE_SECRET": "secret"}
    text = read_document(path.read_bytes(), path.name).value
    jsonschema.validate(text, json_schema(), cls=jsonschema.Draft202012Validator)
    for profile in (None, *text.get("profiles", {})):
        spec = read_job_file(path, profile=profile, environ=environ)
        assert spec.sink is not None


# ---------------------------------------------------------------- the schema


def test_the_schema_accepts_the_contract_s_example_and_refuses_what_reading_refuses() -> None:
    """An editor that uses it agrees with the command."""
    jsonschema = pytest.importorskip("jsonschema")
    from gristmill.jobfile.sections import json_schema

    schema = json_schema()
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    good = read_document(CONTRACT.encode(), "x").value
    assert validator.is_valid(good)
    assert validator.is_valid({"source": "rows/", "model": {"call": "m:f"}, "sink": "out/", "steps": ["m:f"]})
    assert validator.is_valid({**good, "source": {"uri": ["a", "b"], "limit": "${n}"}})
    for wrong in (
        {**good, "sinks": 1},
        {**good, "model": {"embed": "x"}},
        {**good, "model": {"text": "x"}},
        {**good, "gates": {"min_ok": "high"}},
        {**good, "source": {"limit": 5}},
        {**good, "steps": [{"flatmap": "m:f"}]},
        {**good, "on_null": "drop"},
    ):
        assert not validator.is_valid(wrong), wrong


def test_every_field_of_a_job_is_described() -> None:
    """For --help and for editors: a field without a line is a build error, and the schema shows the lines."""
    from gristmill.jobfile.sections import json_schema

    schema = json_schema()
    for section in (schema, *schema["$defs"].values()):
        assert all("description" in field for field in section["properties"].values())
