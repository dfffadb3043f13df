"""What is typed becomes the job that is meant: flags, their types, --set, and the help that shows them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import gristmill as gm
from gristmill.cli import (
    app,
    common,
    compare,
    deliver,
    export,
    job,
    models,
    prove,
    report,
    score,
    sink,
    tune,
    up,
)
from gristmill.cli.flags import Flag, changes
from gristmill.errors import BadJob
from gristmill.job.job import JobSpec, Sink, Source
from gristmill.job.options import EngineSpec, Gates, Running
from gristmill.job.specs import Call, FunctionModel
from gristmill.jobfile.jobfile import read_job_file
from gristmill.jobfile.literals import literal
from gristmill.jobfile.writing import dump


def typed(*arguments: str) -> JobSpec:
    command = getattr(score, arguments[0])
    context = command.make_context(arguments[0], list(arguments[1:]))
    return score.described(arguments[0], context.params)


EMBED = ("embed", "a.parquet", "out", "--text", "t", "--model", "m")


@pytest.mark.parametrize("zero", [("--workers", "0"), ("--set", "engine.workers=0")])
def test_no_workers_mean_this_process(zero: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever engine the environment, a job file or a Job names; one that is typed beside it has workers."""
    (tmp_path / "job.yaml").write_text("{source: a, model: {call: 'm:f'}, sink: out}")
    (tmp_path / "ray.yaml").write_text("{source: a, model: {call: 'm:f'}, sink: out, engine: {name: ray, address: x}}")
    (tmp_path / "no.yaml").write_text("{source: a, model: {call: 'm:f'}, sink: out, engine: {workers: 0}}")
    name = f"job{zero[1][0]}.py"  # a module stays imported
    (tmp_path / name).write_text("import gristmill as gm\njob = gm.Job('a', print, 'out', workers=4)\n")
    monkeypatch.setenv("GRISTMILL_ENGINE", "ray")

    def engine(file: str, *words: str) -> EngineSpec:
        params = job.run.make_context("run", [str(tmp_path / file), *words]).params
        return job.described(params.pop("job"), params).engine

    here = EngineSpec(workers=0)
    assert typed(*EMBED, *zero).engine == gm.Job("a", print, "out", workers=0).spec.engine == here
    assert [engine(file, *zero) for file in ("job.yaml", "ray.yaml", name)] == [here] * 3
    assert engine("no.yaml") == here
    assert typed(*EMBED).engine.name == engine("job.yaml").name == "ray"
    assert engine("no.yaml", "--set", "engine.name=ray") == EngineSpec("ray")


def test_the_least_that_can_be_typed() -> None:
    """All else is at its default, which stands in the job's description alone."""
    assert typed(*EMBED) == JobSpec(Source(("a.parquet",)), gm.TextEmbedder("m", "t"), Sink("out"))
    assert typed("classify", *EMBED[1:]).model == gm.TextClassifier("m", "t")
    assert typed("apply", "a", "out", "--fn", "m:f").model == FunctionModel(Call("m:f"))


@pytest.mark.parametrize(("typed_as", "label"), [("late", "late"), ("1", 1), ("true", True), ('"1"', "1")])
def test_a_class_is_named_as_it_is(typed_as: str, label: Any) -> None:
    """A text, a number or a truth value, as the estimator has it."""
    spec = typed("predict", "a", "out", "--model", "m.skops", "--method", "predict_proba", "--label", typed_as)
    assert spec.model.label == label and type(spec.model.label) is type(label)


def test_several_sources_as_a_shell_s_glob_gives_them() -> None:
    """The last one is the sink."""
    spec = typed("embed", "a.parquet", "b.parquet", "c/", "out", *EMBED[3:])
    assert spec.source.uri == ("a.parquet", "b.parquet", "c/") and spec.sink == Sink("out")


EVERY_FLAG = """
--where "lang = 'en'" --columns t,id --limit 9 --seed 3 --source-format csv --on-bad-file skip --on-new-files append
--keep "id, lang" --keep day --drop vector --output vector --format jsonl --partition-by day --row-id rid --key id
--model-version mv --overwrite --on-null skip --on-nan keep --min-ok 0.9 --warn-failed 0.5 --allow-empty
--engine ray --workers 4-64 --gpus auto --threads 2 --batch-tokens auto --batch-rows 64 --batch-timeout 5
--shard-rows 100 --worker-memory 1000 --log log.jsonl --device cpu --dtype int8 --backend onnx --max-length 128
--sha256 ab --trust-remote-code --prompt "p: " --prompt-name q --pooling cls --no-normalize --truncate-dim 64
--sort-by id --files 3
"""


def test_every_common_flag_reaches_its_place() -> None:
    """One of each."""
    spec = typed(*EMBED, *shlex.split(EVERY_FLAG))
    assert spec.source == Source(
        ("a.parquet",), format="csv", columns=("t", "id"), where="lang = 'en'", limit=9, seed=3, on_bad_file="skip"
    )
    made = gm.TextEmbedder("m", "t", "vector", "p: ", "q", "cls", False, 64, 128, "onnx", "int8", "cpu", True, "ab")
    assert spec.model == made
    assert spec.sink == Sink(
        "out", "jsonl", ("id", "lang", "day"), "rid", ("id",), ("day",), model_version="mv", overwrite=True,
        drop=("vector",), sort_by=("id",), files=3,
    )  # fmt: skip
    assert typed(*EMBED, "--merge").sink == Sink("out", merge=True)
    assert (spec.on_null, spec.on_nan, spec.on_new_files) == ("skip", "keep", "append")
    assert spec.running == Running("auto", 64, 100, batch_timeout=5.0, worker_memory=1000, log="log.jsonl")
    assert spec.gates == Gates(0.9, 0.5, True) and spec.engine == EngineSpec("ray", (4, 64), "auto", 2)


def test_arguments_of_a_function_are_json_or_text() -> None:
    """Numbers, lists and true are what they look like; all else is text, also with = in it."""
    spec = typed(
        "apply", "a", "out", "--fn", "m:C", "--arg", "n=3", "--arg", "x=0.5", "--arg", "on=true", "--arg", "l=[1, 2]",
        "--arg", "q=a=b", "--arg", "s=text", "--arg", 't="3"', "--batch-format", "rows", "--returns", "score=float32",
    )  # fmt: skip
    assert spec.model == FunctionModel(
        Call("m:C", {"n": 3, "x": 0.5, "on": True, "l": [1, 2], "q": "a=b", "s": "text", "t": "3"}, "rows"),
        {"score": "float32"},
    )


def test_keeping_nothing_can_be_said() -> None:
    """An empty list is not the same as not saying anything."""
    assert typed(*EMBED, "--keep", "").sink == Sink("out", keep=())


def test_set_reaches_every_field() -> None:
    """Also those without a flag."""
    spec = typed(*EMBED, "--set", "sink.dead_payload=0", "--set", 'source.options={"delimiter": ";"}', "--workers", "2")
    assert spec.sink == Sink("out", dead_payload=0) and spec.source.options == {"delimiter": ";"}
    assert spec.engine == EngineSpec(workers=2)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--workers", "many"), "'many': give a whole number, or auto"),
        (("--workers", "-1"), "'-1': give a whole number, or auto"),
        (("--limit", "x"), "'x' is not a valid integer"),
        (("--on-null", "drop"), "'drop' is not one of 'dead', 'skip', 'keep'"),
        (("--limt", "3"), "--limit"),
        (("--text",), "requires an argument"),
    ],
)
def test_a_wrong_flag_is_a_usage_error(more: tuple[str, ...], said: str) -> None:
    """Before anything is looked at."""
    with pytest.raises(click.UsageError) as caught:
        typed(*EMBED, *more)
    assert said in caught.value.format_message()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--limit", "0"), "--limit: source limit is 0: give a whole number of at least 1"),
        (("--limit", "3", "--sample", "3"), "--limit, --sample: source has both limit and sample"),
        (("--min-ok", "3"), "--min-ok: gates.min_ok is 3.0: give a share between 0 and 1"),
        (("--key", "id"), "--key: sink has key=['id'] but no row_id"),
        (("--format", "csv"), "--format csv: it is the format of the sink: parquet, jsonl, npy or openai-batch"),
        (("--output", "../x"), "model.output is '../x': a column's name has no slash"),
        (("--set", "model.txt=a"), "--set model.txt=a: this model (embed) has no 'txt': did you mean text?"),
    ],
)
def test_a_wrong_job_is_told_by_its_flag(more: tuple[str, ...], said: str) -> None:
    """The value, the flag, the way out."""
    with pytest.raises(BadJob) as caught:
        typed(*EMBED, *more)
    assert said in str(caught.value)


def test_saved_jobs_are_the_jobs_that_were_typed(tmp_path: Any) -> None:
    """--save and run give what the command gave."""
    flags = "--where \"a = '${b}'\" --workers 2-4 --keep no,1e3 --min-ok 0.5 --set running.window_bytes=1000"
    spec = typed("apply", "a", "out", "--fn", "m:C", "--arg", "n=3", "--arg", "s=${x}", *shlex.split(flags))
    (tmp_path / "j.yaml").write_text(dump(spec))
    assert read_job_file(tmp_path / "j.yaml") == spec


def test_flags_lie_over_a_job_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` takes the common flags too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "j.yaml").write_text(
        "source: a\nmodel: {embed: m, text: t}\nsink: {uri: o, keep: [id]}\nvars: {n: 1}\n"
    )

    def described(more: str) -> JobSpec:
        arguments = shlex.split(f"j.yaml --limit 5 --output v --var n=2 {more}")
        return job.described("j.yaml", job.run.make_context("run", arguments).params)

    spec = described("--set sink.merge=true --batch-rows 8")
    assert spec.source.limit == 5 and spec.sink == Sink("o", keep=("id",), merge=True)
    assert spec.model == gm.TextEmbedder("m", "t", "v") and spec.running.batch_rows == 8
    with pytest.raises(BadJob, match="--var n=3: n is given twice, first as '2'"):
        described("--var n=3")


# ---------------------------------------------------------------- help

MODULES = {"score": score, "job": job, "sink": sink, "tune": tune, "compare": compare, "deliver": deliver}
MODULES |= {"models": models, "prove": prove, "report": report, "up": up, "export": export}
COMMANDS = {name: getattr(MODULES[module], name.replace("-", "_")) for name, (module, _) in app.COMMANDS.items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_examples_that_parse(name: str) -> None:
    """An example that does not work is worse than none."""
    command = COMMANDS[name]
    lines = [text.strip() for text in command.examples.splitlines() if text.strip().startswith("gristmill ")]
    assert lines, name
    for text in lines:
        words = shlex.split(text.split(" > ")[0])[1:]
        assert words[0] == name
        command.make_context(name, words[1:])
    shown = command.get_help(click.Context(command, info_name=f"gristmill {name}"))
    assert all(text in shown for text in lines) and "Examples:" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_line_of_help(name: str) -> None:
    """No option without a word about it."""
    assert all(p.help for p in COMMANDS[name].params if isinstance(p, click.Option))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_tells_the_options_of_its_first_example(name: str) -> None:
    """Also the short one."""
    command = COMMANDS[name]
    told, _, examples = CliRunner().invoke(command, ["--help"]).output.partition("Examples:")
    first = shlex.split(command.examples.strip().splitlines()[0])
    listed = {word.rstrip(",") for word in told.split()}
    assert [word for word in first if word.startswith("-") and word not in listed] == [], examples


def test_every_flag_is_a_field() -> None:
    """Flags derive from the frozen options: one that leads nowhere cannot be built."""
    for flag in (*common.COMMON, *common.EMBED, *common.CLASSIFY, *common.APPLY):
        assert isinstance(flag, Flag) and changes([flag], {}) == []


def test_help_and_version_import_nothing_heavy() -> None:
    """They are instant: no numpy, pyarrow, pydantic, yaml or rich."""
    code = (
        "import sys, io, contextlib\nfrom gristmill.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    for a in (['--help'], ['--version'], ['embed', '--help'], ['run', '--help'], ['dead', '--help']):\n"
        "        assert main(a) == 0, a\n"
        "print([m for m in ('numpy', 'pyarrow', 'pydantic', 'yaml', 'rich', 'duckdb', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "command", [score.embed, score.classify, score.apply, job.run, tune.tune], ids=lambda c: c.name
)
def test_the_help_is_short_and_the_whole_of_it_is_to_be_had(command: Any) -> None:
    """A command of many options shows the usual ones and those it cannot do without; --help-all shows every one."""
    runner = CliRunner()
    short, whole = (runner.invoke(command, [flag]) for flag in ("--help", "--help-all"))
    assert short.exit_code == whole.exit_code == 0
    listed = [set(re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", text.output, re.MULTILINE)) for text in (short, whole)]
    every = {p.opts[-1] for p in command.get_params(click.Context(command)) if isinstance(p, click.Option)}
    assert listed[1] == every and listed[0] < every
    assert {"--help", "--help-all"} <= listed[0] and 8 <= len(listed[0]) <= 16
    assert {p.opts[-1] for p in command.params if isinstance(p, click.Option) and p.required} <= listed[0]
    assert "Examples:" in short.output


def test_the_schema_is_printed() -> None:
    """As JSON."""
    done = subprocess.run([sys.executable, "-m", "gristmill", "schema"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["title"] == "A gristmill job"


def test_the_environment_s_list_is_in_the_help() -> None:
    """And complete: no other GRISTMILL_ name stands in the sources of the command line."""
    import pathlib

    folder = pathlib.Path(app.__file__).parent
    used = {name for path in folder.glob("*.py") for name in re.findall(r"GRISTMILL_[A-Z]+", path.read_text())}
    assert used == set(re.findall(r"GRISTMILL_[A-Z]+", app.EPILOG))


@pytest.mark.parametrize("text", ["1.10", "12e4567", "1234e56", "NaN", "Infinity", "-0", "0.1234567890123456789"])
def test_a_number_that_is_not_what_was_typed_is_refused(text: str) -> None:
    """As a version or a digest it is text: both ways out are said; what a number keeps is one."""
    with pytest.raises(BadJob, match=f"--arg v={text}.*not {text}.*'\"{text}\"' for the text"):
        literal(text, f"--arg v={text}")
    assert literal(f'"{text}"', "") == text
    for number in ("0.00001", "1e-5", "1e5", "2.50e3", "3", "1.0", "12345678901234567890123", "0.1"):
        assert repr(literal(number, "")) == repr(json.loads(number))


def test_arguments_are_what_was_typed(folder: Any) -> None:
    """--arg goes through the same door, and takes a name once."""
    (folder.path / "m.py").write_text("def f(batch, v=None): return [repr(v)] * len(batch['x'])\n")
    (folder.path / "a.jsonl").write_text('{"x": 1}\n')
    line = ("apply", "a.jsonl", "out", "--fn", "m:f", "--preview", "1", "--json", "--arg")
    assert "'1.10'" in folder.run(*line, 'v="1.10"').out
    assert folder.run(*line, "v=1.10").code == 2
    assert "--arg v=… is given twice" in folder.run(*line, "v=1", "--arg", "v=2").err
