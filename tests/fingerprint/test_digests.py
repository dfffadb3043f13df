"""What counts as another job: every option but those that are named as not shaping the output."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import gristmill as gm
from gristmill.driver.jobfingerprint import fingerprint_of
from gristmill.fingerprint.digests import Fingerprint, differences
from gristmill.job.annotations import options_of
from gristmill.job.delivery import Delivery
from gristmill.job.job import JobSpec, Sink, Source
from gristmill.job.options import EngineSpec, Gates, Running
from gristmill.job.schedule import Schedule
from gristmill.job.secret import Secret
from gristmill.job.specs import (
    _OF_ENDPOINTS,
    Call,
    FunctionModel,
    OnnxModel,
    SklearnModel,
    Step,
    TextClassifier,
    TextEmbedder,
    TorchScriptModel,
)
from gristmill.models.contract import ModelInfo
from gristmill.shards.sourcefiles import FileInfo, SourceFile
from gristmill.values import dataclass


def one(batch: Any) -> Any:
    """A step."""
    return batch


def two(batch: Any) -> Any:
    """Another."""
    return batch


MODELS = (
    FunctionModel(Call(one, batch_format="row")),
    TextEmbedder("m", "text"),
    TextClassifier("m", "text"),
    OnnxModel("m"),
    TorchScriptModel("m"),
    SklearnModel("m"),
)
MODELS_OF = tuple(type(m) for m in MODELS)
PRICE = {"input": "1/1M", "output": "1/1M"}
PARTS = (*MODELS, Source(("in",)), Sink("out"), Step("map", Call(one)), Call(one), Running(), Gates(), EngineSpec())
# Fields whose values are not free, or that another field must go with; others are changed by their kind of value.
OTHER: dict[tuple[type, str], Any] = {
    (Source, "on_bad_file"): "skip",
    (Source, "data"): [{"x": 1}],
    (Sink, "key"): ("id",),
    (Step, "kind"): "filter",
    (Step, "call"): Call(two),
    (Call, "target"): two,
    (Call, "batch_format"): "rows",
    (Call, "takes"): {"x": "float32"},
    (FunctionModel, "call"): Call(two),
    **{(kind, "output"): "x" for kind in (TextClassifier, OnnxModel, TorchScriptModel, SklearnModel)},
    (TextEmbedder, "concurrency"): 7,
    (TextEmbedder, "price"): {"input": "2/1M", "output": "2/1M"},
    (TextEmbedder, "max_cost"): 5.0,
    (EngineSpec, "options"): {"grace": 1.0},
    (EngineSpec, "name"): "ray",
    (EngineSpec, "workers"): 2,
    (EngineSpec, "gpus"): 1,
    (EngineSpec, "threads"): 2,
    (JobSpec, "on_null"): "keep",
    (JobSpec, "on_nan"): "keep",
    (JobSpec, "on_new_files"): "append",
    (JobSpec, "audit"): (one,),
    (JobSpec, "schedule"): Schedule("@daily"),
    (JobSpec, "deadline"): "06:00",
    (JobSpec, "on_deadline"): "stop",
    (JobSpec, "reduce"): one,
    (JobSpec, "deliver"): (Delivery("duckdb://s.duckdb#t"),),
    (JobSpec, "source"): Source(("in",), columns=("x",)),
    (JobSpec, "sink"): Sink("out", keep=("x",)),
    (JobSpec, "model"): FunctionModel(Call(two)),
    (JobSpec, "steps"): (Step("map", Call(one)), Step("filter", None, "x > 0")),
    (JobSpec, "post"): (Step("map", Call(two)),),
    (JobSpec, "running"): Running(log="l"),
    (JobSpec, "gates"): Gates(0.5),
    (JobSpec, "update"): {"key": ["id"]},
    (JobSpec, "alerts"): [{"webhook": "https://host/"}],
    (JobSpec, "metrics"): ["run.prom"],
    (Gates, "drift"): {"x": {"psi": 0.2}},
    (JobSpec, "engine"): EngineSpec("ray"),
    (Running, "batch_tokens"): 7,
    (Running, "batch_rows"): 7,
    (Running, "shard_rows"): 7,
    (Running, "hour_price"): 1.5,
}
IN_CODE = frozenset(Call.not_shaping)  # they count as code, not as options
OF_PARTS = ("running", "gates", "engine")  # what they hold is named field by field


def changed(part: Any, name: str) -> Any:
    """The part with another value of one field."""
    before = getattr(part, name)
    if (type(part), name) in OTHER:
        after = OTHER[type(part), name]
    elif isinstance(before, bool):
        after = not before
    elif isinstance(before, (int, float)):
        after = before / 2 + 0.1 if isinstance(before, float) else before + 1
    elif isinstance(before, str):
        after = before + "2"
    else:  # None, or empty
        after = {"mapping": {"x": "1"}, "int": 9, "text": "x", "bool": True, "names": ("x",)}[_kind(part, name)]
    return dataclasses.replace(part, **{name: after})


def _kind(part: Any, name: str) -> str:
    declared = {str(kind) for kind in options_of(type(part))[name].types}
    kinds = {"<class 'str'>": "text", "<class 'int'>": "int", "<class 'bool'>": "bool", "tuple[str, ...]": "names"}
    return next(
        (kinds[kind] for kind in kinds if kind in declared), "mapping" if "Mapping" in str(declared) else "names"
    )


def job_of(part: Any) -> JobSpec:
    """A job that has this part."""
    model = FunctionModel(part) if isinstance(part, Call) else part
    return JobSpec(
        source=part if isinstance(part, Source) else Source(("in",)),
        model=model if isinstance(model, MODELS_OF) else FunctionModel(Call(one)),
        sink=part if isinstance(part, Sink) else Sink("out", row_id="id"),
        steps=(part if isinstance(part, Step) else Step("map", Call(one)),),
        running=part if isinstance(part, Running) else Running(),
        gates=part if isinstance(part, Gates) else Gates(),
        engine=part if isinstance(part, EngineSpec) else EngineSpec(),
    )


def fingerprint(job: JobSpec, files: tuple[FileInfo, ...] = ()) -> Fingerprint:
    """As planning makes it."""
    source, sink = job.source.format or "parquet", (job.sink and job.sink.format) or "parquet"
    info = ModelInfo("m", call=getattr(job.model, "call", None))
    return fingerprint_of(job, job.model, info, files, source, sink)


def lines(before: JobSpec, after: JobSpec) -> list[str]:
    """The difference that a person is shown."""
    return differences(fingerprint(before).stored(), fingerprint(after), fingerprint(before).inputs)


def fields() -> Iterator[Any]:
    """Every field of every part of a job."""
    for part in (*PARTS, JobSpec(Source(("in",)), FunctionModel(Call(one)), Sink("out"), (Step("map", Call(one)),))):
        for field in dataclasses.fields(part):
            yield pytest.param(part, field.name, id=f"{type(part).__name__}.{field.name}")


@pytest.mark.parametrize(("part", "name"), list(fields()))
def test_every_option_counts_but_those_that_are_named(part: Any, name: str) -> None:
    """Another value of any field is a difference that names the field, unless it is said not to shape the output."""
    if isinstance(part, Sink):
        part = dataclasses.replace(part, row_id="id")  # a key needs one
    if isinstance(part, Source) and name == "seed":
        part = dataclasses.replace(part, sample=5)  # a seed draws a sample
    if isinstance(part, TextEmbedder) and name in _OF_ENDPOINTS:
        part = dataclasses.replace(part, base_url="http://a/v1", price=PRICE)
    other = changed(part, name)
    assert getattr(other, name) != getattr(part, name) or name == "data"
    before, after = (p if isinstance(p, JobSpec) else job_of(p) for p in (part, other))
    found = lines(before, after)
    if isinstance(part, Call):
        assert found and all(line.startswith("code: model: ") for line in found)
    elif name in part.not_shaping or (isinstance(part, JobSpec) and name in OF_PARTS):
        assert found == []
    elif name in ("call", "model") and type(part) in (Step, FunctionModel, JobSpec):
        assert any("callable two" in line for line in found)
    else:
        assert found and all(name in line for line in found), found
        assert any(line.startswith("options: ") for line in found)


def test_what_does_not_count_names_only_what_there_is() -> None:
    """Of each type that jobs are made of: each name is a field, with a reason."""
    parts = {type(p) for p in PARTS} | {JobSpec}
    for made in parts:
        assert set(made.not_shaping) <= {f.name for f in dataclasses.fields(made)}, made
        assert all(len(reason) > 10 for reason in made.not_shaping.values())


def test_a_new_option_makes_no_difference_until_it_is_used() -> None:
    """A plan made before an option existed is that of a job that leaves the option as it is."""
    job = job_of(Sink("out"))
    old = fingerprint(job).stored()

    @dataclass(frozen=True)
    class Later(Sink):
        dictionary: bool = False

    same = dataclasses.replace(job, sink=Later("out"))
    other = dataclasses.replace(job, sink=Later("out", dictionary=True))
    assert differences(old, fingerprint(same), {})[1:] == []
    assert "options: sink.dictionary was not given, is true" in differences(old, fingerprint(other), {})


def test_two_steps_of_one_function_are_told_apart() -> None:
    """Arguments, closures and lambdas of one step do not hide those of another that is called the same."""

    def job(first: int, second: int) -> JobSpec:
        def adds(n: int) -> Any:
            return lambda batch: {"x": batch["x"] + n}

        steps = (gm.step(one, by=first), gm.step(one, by=second), gm.step(adds(first)), gm.step(adds(second)))
        return dataclasses.replace(job_of(MODELS[0]), steps=steps)

    assert lines(job(1, 2), job(1, 2)) == []
    found = lines(job(1, 2), job(3, 2))
    assert any("steps[0]: argument by of one" in line for line in found)
    assert any("steps[2]" in line for line in found)
    assert not any("steps[1]" in line or "steps[3]" in line for line in found)


def test_what_says_the_same_is_the_same() -> None:
    """A list for a tuple, a mapping in another order, a format said that is found anyway, a seed of no sample."""
    said = Source(("in",), format="parquet", columns=["a", "b"], options={"a": 1, "b": 2}, seed=4)  # type: ignore[arg-type]
    plain = Source(("in",), columns=("a", "b"), options={"b": 2, "a": 1})
    assert lines(job_of(said), job_of(plain)) == []


@pytest.mark.parametrize("kind", [np.array, pd.Index, pd.Series, pa.array, list])
def test_of_many_names_each_counts_and_the_first_other_one_is_shown(kind: Any) -> None:
    """Features as an array or a column of pandas are all compared, as a list is, and not by what they print as."""
    names = [f"f{n}" for n in range(2000)]
    swapped = [*names[:1000], names[1001], names[1000], *names[1002:]]
    (line,) = lines(job_of(SklearnModel("m", features=kind(names))), job_of(SklearnModel("m", features=kind(swapped))))
    was, now = line.split(", is ")
    assert '"f1000"' in was and '"f999", "f1001"' in now and len(line) < 200
    assert (
        lines(job_of(SklearnModel("m", features=kind(names))), job_of(SklearnModel("m", features=tuple(names)))) == []
    )


def test_no_secret_is_in_it() -> None:
    """An argument or option that comes from the environment is known by its name; its value may change every night."""
    texts = []
    for hidden in ("hunter2-hunter2", "other-other-other"):
        token = Secret("${env:TOKEN}", hidden)
        call = Call(one, {"token": token})
        source = Source(("in",), options={"password": token}, storage={"secret": token})
        job = dataclasses.replace(job_of(FunctionModel(call)), source=source, sink=Sink("o", options={"k": token}))
        texts.append(str(fingerprint(job).stored()))
        assert hidden not in texts[-1]
    assert texts[0] == texts[1]


def info(stamp: str, size: int = 100, layout: str = "l") -> FileInfo:
    """A file as planning knows it."""
    return FileInfo(SourceFile("a.parquet", size, stamp), 1, np.array([0, 1]), True, pa.schema([]), layout=layout)


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (info("1763800000000000000", 123_456), "123,456 bytes, but 100 when planned"),
        (info("1763800003000000000"), "modified 2025-11-22 08:26:43, but 2025-11-22 08:26:40 when planned"),
        (info("1763800000000000001"), "08:26:40.000000001, but 2025-11-22 08:26:40.000000000 when planned"),
        (info("1763800003.500000"), "modified 2025-11-22 08:26:43, but 2025-11-22 08:26:40 when planned"),
        (info("d41d8cd9"), "version d41d8cd9, but 1763800000000000000 when planned"),
        (info("1763800000000000000", layout="m"), "stored otherwise"),
    ],
)
def test_fault_80_a_file_that_differs_is_described_in_words(
    now: FileInfo, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes with thousands, times as times, in the time of the place; the version where a store tells one."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    job, before = job_of(MODELS[0]), (info("1763800000000000000"),)
    old = fingerprint(job, before)
    (line,) = differences(old.stored(), fingerprint(job, (now,)), old.inputs)
    assert line.startswith("input: a.parquet: ") and says in line
