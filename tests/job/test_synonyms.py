"""An option that has another name elsewhere is told by ours, in Python, in a job file and on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gristmill as gm
from gristmill.cli.app import main
from gristmill.job.annotations import options_of
from gristmill.job.keywords import ApplyOptions, JobOptions, PromptOptions, Verbs, names_of
from gristmill.job.specs import MODELS
from gristmill.job.synonyms import _NAMES, meant, said
from gristmill.jobfile.jobfile import read_job_file
from gristmill.jobfile.sections import _SECTIONS, DeliverySection, JobSection

KEYS = {name for section in _SECTIONS.values() for name in section.model_fields}
OURS = KEYS | set(JobSection.model_fields) | set(DeliverySection.model_fields) | names_of(JobOptions) | names_of(Verbs)
MORE = {"max_parallelism", "func_cpu", "func_gpu", "func_ram", "ordered", "return_exceptions", "checkpoint", "detach"}
FLAGS = {"arg", "alert", "preview", "progress", "listen", "at_once", "delimiter", "fn", "args"}


def test_each_name_of_ours_is_one_that_some_command_or_call_has() -> None:
    """A hint at an option that there is no longer would send people the wrong way."""
    models = {name for kind in MODELS.ours for name in options_of(MODELS.get(kind))}
    there = OURS | models | MORE | FLAGS | names_of(ApplyOptions) | names_of(PromptOptions)
    there |= {"cpus_per_worker", "gpus_per_worker"}
    assert set(_NAMES) <= there, set(_NAMES) - there


@pytest.mark.parametrize(
    ("theirs", "known", "ours"),
    [
        ("num_workers", ["workers", "gpus"], "workers"),
        ("num_workers", ["max_parallelism"], "max_parallelism"),
        ("concurrency", ["workers", "log"], "workers"),
        ("batchsize", ["batch_rows"], "batch_rows"),
        ("fn_constructor_kwargs", ["args"], "args"),
        ("max_errored_blocks", ["min_ok", "drift"], "min_ok"),
        ("deduplicate", ["dedupe"], "dedupe"),
        ("--Num-Workers", ["--workers"], "--workers"),
        ("--force", ["--restart", "--overwrite"], "--restart"),
        ("max_new_tokens", ["max_tokens"], "max_tokens"),
        ("whatever", ["max_tokens"], None),
    ],
)
def test_a_name_from_elsewhere(theirs: str, known: list[str], ours: str | None) -> None:
    """The one of those that the place has."""
    assert meant(theirs, known) == ours


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: gm.Job("a", print, "o", retries=3), "gristmill retry-dead"),
        (lambda: gm.Job("a", print, "o", num_cpus=3), "did you mean 'threads'"),
        (lambda: gm.apply("a", "o", fn=print, fn_constructor_kwargs={}), "did you mean 'args'"),  # type: ignore[call-arg]
        (lambda: gm.apply("a", "o", fn=print, max_errored_blocks=1), "gates={'min_ok': 0.99}"),  # type: ignore[call-arg]
        (lambda: gm.embed("a", "o", text="t", model="m", normalize_embeddings=True), "did you mean 'normalize'"),  # type: ignore[call-arg]
        (lambda: gm.source("a", column=["x"]), "did you mean 'columns'"),  # type: ignore[call-arg]
        (lambda: gm.source("a", filter="b"), "did you mean 'where'"),  # type: ignore[call-arg]
        (lambda: gm.source("a", encoding="cp1252"), "iconv"),  # type: ignore[call-arg]
    ],
)
def test_in_python(call: Any, hint: str) -> None:
    """As it is written there."""
    with pytest.raises(gm.BadJob) as error:
        call()
    assert hint in str(error.value)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("retries: 3", "did you mean schedule: {retries: …}?"),
        ("num_workers: 3", "did you mean engine: {workers: …}?"),
        ("max_errors: 3", "did you mean gates: {min_ok: …}?"),
        ("max_cost: 3", "it is a key of model: write model: {…, max_cost: …}"),
        ("output: x", "did you mean 'sink'?"),
        ("schedule: {cron: '@daily', tz: UTC}", "did you mean 'timezone'?"),
        ("deliver: [{uri: 'duckdb://x#t'}]", "did you mean 'to'?"),
        ("model: {call: 'm:f', take: {x: float}}", "did you mean 'takes'?"),
        ("update: id", "such as update: {key: [id]}"),
        ("gates: {min_ok: 99%}", "give a number, which for 99% is 0.99"),
    ],
)
def test_in_a_job_file(line: str, hint: str, tmp_path: Path) -> None:
    """In the section that has it."""
    model = "" if line.startswith("model") else "model: {call: 'm:f'}\n"
    (tmp_path / "job.yaml").write_text(f"source: a\n{model}sink: o\n{line}\n")
    with pytest.raises(gm.BadJob) as error:
        read_job_file(str(tmp_path / "job.yaml"))
    assert hint in str(error.value)


def test_an_option_of_csv_stands_under_options(tmp_path: Path) -> None:
    """`sep` of a source is `options: {delimiter: …}`."""
    (tmp_path / "job.yaml").write_text("source: {uri: a, sep: ';'}\nmodel: {call: 'm:f'}\nsink: o\n")
    with pytest.raises(gm.BadJob, match=r"did you mean options: \{delimiter: …\}"):
        read_job_file(str(tmp_path / "job.yaml"))


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--retries", "gristmill retry-dead"),
        ("--force", "did you mean --restart?"),
        ("--quiet", "--progress off"),
        ("--api-key", "OPENAI_API_KEY"),
        ("--num-workers", "did you mean --workers?"),
        ("--batch-size", "did you mean --batch-rows?"),
        ("--out", "SOURCE SINK"),
        ("--dedupe", "option of prompt"),
        ("--wher", "--where"),
    ],
)
def test_on_the_command_line(
    flag: str, hint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a flag."""
    monkeypatch.chdir(tmp_path)
    assert main(["apply", "a", "o", "--fn", "m:f", flag, "x"]) == 2
    assert hint in capsys.readouterr().err


def test_what_is_said_names_no_option_that_is_known_where_it_is_said() -> None:
    """It stands for options that we do not have."""
    assert said("retries") and said("--api-key") and said("bogus") is None
