"""Names of options as a person writes them in Python: right, near to right, and as a type checker knows them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pytest

import gristmill as gm
from gristmill.job import keywords
from gristmill.job.job import JobSpec, Sink, Source
from gristmill.job.options import EngineSpec, Running
from gristmill.job.specs import TextClassifier, TextEmbedder


def score(batch: dict[str, Any]) -> dict[str, Any]:
    """A model that is never run."""
    return batch


def made() -> Any:
    """A job that is never run."""
    return gm.Job("x.csv", score, "out")


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "source": (lambda: gm.source("x.csv", wher="a"), "Source has no option 'wher': did you mean 'where'?"),
    "sink": (lambda: gm.sink("x", keeep=["a"]), "Sink has no option 'keeep': did you mean 'keep'?"),
    "job": (lambda: gm.Job("x.csv", score, "o", wokers=2), "Job has no option 'wokers': did you mean 'workers'"),
    "gates": (
        lambda: gm.Job("x.csv", score, "out", gates={"min_okk": 1}),
        "Gates has no option 'min_okk': did you mean 'min_ok'?",
    ),
    "a gate": (
        lambda: gm.apply("x.csv", "out", fn=score, min_ok=0.5),
        "apply has no option 'min_ok': it is one of gates: gates={'min_ok': …}",
    ),
    "a job's gate": (
        lambda: gm.Job("x.csv", score, "out", max_nulls=0.5),
        "Job has no option 'max_nulls': it is one of gates: gates={'max_nulls': …}",
    ),
    "an argument": (
        lambda: gm.apply("x.csv", "out", fn=score, w=2),
        "apply has no option 'w': an argument of your function goes into args={'w': …}; it has accept, alerts, ",
    ),
    "engine": (lambda: gm.Job("x.csv", score, "out", engine="loca"), "did you mean 'local'?"),
    "engine of a run": (lambda: made().run(engine="loca"), "did you mean 'local'?"),
    "engine as a mapping": (
        lambda: gm.Job("x.csv", score, "out", engine={"name": "local"}),  # type: ignore[arg-type]
        "engine is {'name': 'local'}: give local, ray, spark, or one with options, as gm.ray(address=…)",
    ),
    "engine as a number": (lambda: made().run(engine=3), "engine is 3: give local, ray, spark"),
    "running": (
        lambda: gm.Job("x.csv", score, "out", running=[1]),  # type: ignore[arg-type]
        "running is [1]: give a mapping of its options: batch_tokens, batch_rows",
    ),
    "gates as a list": (
        lambda: gm.Job("x.csv", score, "out", gates=[1]),  # type: ignore[arg-type]
        "gates is [1]: give a mapping of its options: min_ok, warn_failed, allow_empty",
    ),
    "steps": (
        lambda: gm.Job("x.csv", score, "out", steps="m:f"),
        "steps is 'm:f': give a list of steps",
    ),
    "names of columns": (lambda: gm.sink("out", drop=True), "sink drop is True: give a name, or a list of names"),  # type: ignore[arg-type]
    "features": (
        lambda: gm.SklearnModel("m.skops", features=[1]),  # type: ignore[arg-type]
        "features is [1]: give a name, or a list of names",
    ),
    "a flag as text": (lambda: gm.sink("out", overwrite="no"), "sink overwrite is 'no': give True or False"),  # type: ignore[arg-type]
    "a flag of a verb": (lambda: made().run(restart="no"), "Job.run: restart is 'no': give True or False"),
    "a flag of a command": (
        lambda: gm.apply("x.csv", "out", fn=score, accept="no"),  # type: ignore[call-overload]
        "apply: accept is 'no': give True or False",
    ),
    "a gate's flag": (
        lambda: gm.Job("x.csv", score, "out", gates={"allow_empty": "no"}),
        "gates.allow_empty is 'no': give True or False",
    ),
    "a model's flag": (
        lambda: gm.TextEmbedder("m", "t", normalize="no"),  # type: ignore[arg-type]
        "normalize is 'no': give True or False",
    ),
    "a number as text": (
        lambda: gm.TextEmbedder("m", "t", max_length="64"),  # type: ignore[arg-type]
        "max_length is '64': give a whole number",
    ),
    "text as a number": (
        lambda: gm.TextEmbedder("m", "t", prompt=5),  # type: ignore[arg-type]
        "prompt is 5: give text",
    ),
    "sink as a number": (lambda: gm.Job("x.csv", score, 3), "sink is 3: give a folder or a URI"),
    "the source itself": (
        lambda: gm.Job(sourc="x.csv", model=score),  # type: ignore[call-arg]
        "Job has no option 'sourc': did you mean 'source'?",
    ),
    "the model of embed": (
        lambda: gm.embed("x.csv", "out", text="t", modle="m"),  # type: ignore[call-overload]
        "embed has no option 'modle': did you mean 'model'?",
    ),
    "a ray worker's": (lambda: gm.ray(wokers=3), "engine ray has no option 'wokers': did you mean 'workers'?"),
    "stream": (lambda: made().stream(rows=3), "Job.stream has no option 'rows': it has none"),
    "ray": (lambda: gm.ray(adress="auto"), "engine ray has no option 'adress': did you mean 'address'?"),
    "embed": (
        lambda: gm.embed("x.csv", "out", text="t", model="m", bakend="onnx"),
        "embed has no option 'bakend': did you mean 'backend'?",
    ),
    "classify": (
        lambda: gm.classify("x.csv", "out", text="t", model="m", all_score=True),
        "classify has no option 'all_score': did you mean 'all_scores'?",
    ),
    "apply": (
        lambda: gm.apply("x", "out", fn=score, kep=["a"]),
        "apply has no option 'kep': did you mean 'keep'?",
    ),
    "no sink": (
        lambda: gm.apply("x", fn=score, format="npy"),
        "format= is an option of a sink's files, and no sink is given",
    ),
    "embedder": (
        lambda: gm.TextEmbedder("m", "t", promt="x"),
        "TextEmbedder has no option 'promt': did you mean 'prompt'?",
    ),
    "a job's": (
        lambda: gm.TextEmbedder("m", "t", on_null="skip"),
        "TextEmbedder has no option 'on_null': it is an option of the job: gm.Job(…, on_null=…)",
    ),
    "no text": (
        lambda: gm.TorchScriptModel("m.pt", output=["a", "b"]),
        "output is ['a', 'b']: give text",
    ),
    "onnx": (
        lambda: gm.OnnxModel("m.onnx", inpts={}),
        "OnnxModel has no option 'inpts': did you mean 'inputs'?",
    ),
    "run": (lambda: made().run(restrat=True), "Job.run has no option 'restrat': did you mean 'restart'?"),
    "tune": (lambda: made().tune(budget=[1]), "Job.tune has no option 'budget': did you mean 'budgets'?"),
    "verify": (lambda: gm.verify("x", depe=True), "verify has no option 'depe': did you mean 'deep'?"),
    "read": (lambda: gm.read("x", generation=1), "read has no option 'generation': it has sink, storage"),
    "map": (lambda: gm.map(score, [1], retres=2), "map has no option 'retres': did you mean 'retries'?"),
    "parallel map": (
        lambda: gm.remote_parallel_map(score, [1], max_paralelism=2),
        "remote_parallel_map has no option 'max_paralelism': did you mean 'max_parallelism'?",
    ),
    "dead": (lambda: gm.retry_dead(made(), accept_code=True), "did you mean 'accept_code_change'?"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_name_is_told_at_once(case: str) -> None:
    """Wherever it is written: what it is, where, and the name that was probably meant."""
    call, said = WRONG[case]
    with pytest.raises(gm.BadJob) as e:
        call()
    assert said in str(e.value)


def fields(*kinds: type) -> set[str]:
    """Names of the fields of dataclasses."""
    return {f.name for kind in kinds for f in dataclasses.fields(kind)}


def test_every_option_has_a_type() -> None:
    """What checkers and editors are told of the options is what the job's own values have: no more and no less."""
    assert keywords.names_of(keywords.SourceOptions) == fields(Source) - {"uri", "data"}
    assert keywords.names_of(keywords.SinkOptions) == fields(Sink) - {"uri"}
    spec = fields(JobSpec) - {"source", "model", "sink", "steps", "post"}
    assert keywords.names_of(keywords.JobOptions) == (spec | fields(Running, EngineSpec)) - {"name", "options"}
    scoring = keywords.names_of(keywords.ScoreOptions)
    assert keywords.names_of(keywords.EmbedOptions) - scoring == fields(TextEmbedder) - {"model", "text", "output"}
    assert keywords.names_of(keywords.ClassifyOptions) - scoring == fields(TextClassifier) - {"model", "text"}


def test_one_place_in_four_forms(tmp_path: Path) -> None:
    """`read`, `dead`, `status` and `verify` take the folder, the sink, the job and the report alike."""
    source = tmp_path / "in.csv"
    source.write_text("x\n1\n2\n")
    sink = gm.sink(str(tmp_path / "out"), keep=["x"])
    job = gm.Job(str(source), gm.model(doubled), sink, workers=0)
    report = job.run()
    for place in (sink.uri, sink, job, report):
        assert gm.read(place).to_table().to_pydict() == {"x": [1, 2], "y": [2, 4]}
        assert gm.dead(place).num_rows == 0
        assert gm.status(place)["state"] == "done"
        assert gm.verify(place).ok


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    """A row-wise function."""
    return {"y": batch["x"] * 2}


def test_dead_rows_scored_again_from_python(tmp_path: Path) -> None:
    """`gm.retry_dead`: what failed is scored when the cause is gone, and stands beside the others."""
    source, gone = tmp_path / "in.csv", tmp_path / "gone"
    source.write_text("x\n" + "".join(f"{i}\n" for i in range(200)))
    job = gm.Job(str(source), gm.model(picky, gone=str(gone)), gm.sink(str(tmp_path / "out")), workers=0)
    with pytest.warns(gm.GristmillWarning, match="1 of 200"):
        assert job.run().rows_dead == 1
    gone.mkdir()
    report = gm.retry_dead(job)
    assert (report.rows_ok, report.rows_dead) == (200, 0)
    assert sorted(gm.read(report).to_table()["y"].to_pylist()) == list(range(200))


def picky(batch: dict[str, Any], gone: str) -> dict[str, Any]:
    """Refuses one row until there is a folder."""
    if 7 in batch["x"] and not Path(gone).exists():
        raise ValueError("not this one")
    return {"y": batch["x"]}


@pytest.mark.parametrize("way", ["run", "table", "stream"])
def test_a_log_file_from_python(way: str, tmp_path: Path) -> None:
    """`log=`: what happens is written as JSON lines, as with --log, whichever way the job is run."""
    log, data = tmp_path / "run.jsonl", [{"x": 1}, {"x": 2}]
    if way == "table":
        gm.apply(data, fn=doubled, workers=0, log=str(log))
    elif way == "run":
        gm.Job(data, gm.model(doubled), str(tmp_path / "out"), workers=0, log=str(log)).run()
    else:
        assert [t.num_rows for t in gm.Job(data, gm.model(doubled), workers=0, log=str(log)).stream()] == [2]
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert {"progress"} <= {e["event"] for e in events}
    assert any(e.get("phase") == "done" for e in events), events


def test_ways_out_of_what_was_read(tmp_path: Path) -> None:
    """`gm.read` is a Dataset, and gives frames and arrays: vectors as [rows, n], none of them for no rows, too."""
    data = [{"x": i} for i in range(5)]
    rows = gm.Job(data, gm.model(doubled_twice), gm.sink(str(tmp_path / "out"), keep=["x"]), workers=0).run().read()
    assert isinstance(rows, ds.Dataset) and rows.count_rows() == 5
    assert rows.to_numpy("v").tolist() == [[i, 2 * i] for i in range(5)] and rows.to_numpy("v").dtype == "float32"
    assert rows.to_pandas(["x"])["x"].tolist() == list(range(5))
    assert rows.to_polars().columns == ["x", "v"]
    with pytest.raises(gm.BadJob, match=r"no column 'w': it has x, v; did you mean 'v'\?|no column 'w': it has x, v"):
        rows.to_numpy("w")
    with pytest.raises(gm.BadJob, match="no column 'w': it has x, v"):
        rows.to_pandas(columns=["x", "w"])
    assert list(rows.to_pandas(columns=["x"]).columns) == ["x"]
    vectors = gm.model(doubled_twice, returns={"v": "float32[2]"})
    nothing = gm.sink(str(tmp_path / "none"))
    gm.Job(data, vectors, nothing, steps=[gm.filter("x > 9")], workers=0, gates={"allow_empty": True}).run()
    assert gm.read(nothing).to_numpy("v").shape == (0, 2)


def doubled_twice(batch: dict[str, Any]) -> dict[str, Any]:
    """A row-wise function that gives vectors."""
    return {"v": np.stack([batch["x"], batch["x"] * 2], axis=1).astype("float32")}


@pytest.mark.parametrize("name", ["worker", "workers", "n_jobs", "processes"])
def test_workers_of_a_map_are_named_as_elsewhere(name: str) -> None:
    """What other libraries call it leads to the map's own option."""
    with pytest.raises(gm.BadJob, match="did you mean 'max_parallelism'"):
        gm.map(len, ["a"], **{name: 2})


def test_rows_of_nulls_name_the_option_that_leaves_them_out(tmp_path: Path) -> None:
    """A gate that does not hold for empty texts says how rows without text are left out."""
    (tmp_path / "in.csv").write_text("text,n\n" + "a,1\n,2\n" * 20)
    model = gm.model(echoed, takes={"text": "string not null"})
    with pytest.raises(gm.GateFailed, match="--on-null skip"):
        gm.Job(gm.source(str(tmp_path / "in.csv")), model, gm.sink(str(tmp_path / "out")), workers=0).run()


def echoed(batch: dict) -> dict:
    return {"n": [len(t) for t in batch["text"]]}


def test_paths_are_given_one_by_one_or_as_a_list() -> None:
    """Either way they are the same source."""
    assert gm.source(["a.csv", Path("b.csv")], limit=3) == gm.source("a.csv", "b.csv", limit=3)


def test_running_may_be_a_mapping_as_in_a_job_file() -> None:
    """With the names of its options, and no others."""
    job = gm.Job("a.parquet", "m:f", "out", running={"shard_rows": 20}, batch_rows=3)
    assert (job.spec.running.shard_rows, job.spec.running.batch_rows) == (20, 3)
    with pytest.raises(gm.BadJob, match="running has no option 'shard_row': did you mean 'shard_rows'"):
        gm.Job("a.parquet", "m:f", "out", running={"shard_row": 20})


def test_numbers_and_paths_of_other_packages_are_taken() -> None:
    """numpy's whole numbers and floats, a path: the options hold Python's own."""
    assert gm.sink("out", merge=np.True_).merge is True  # type: ignore[arg-type]
    pair = gm.local(workers=(np.int64(1), np.int64(2))).workers  # type: ignore[arg-type]
    assert pair == (1, 2) and {*map(type, pair)} == {int}  # type: ignore[arg-type]
    limit = gm.source("in.csv", limit=np.int64(5)).limit  # type: ignore[arg-type]
    assert (limit, type(limit)) == (5, int)
    assert type(gm.Gates(min_ok=np.float32(0.5)).min_ok) is float  # type: ignore[arg-type]
    assert gm.TextEmbedder(Path("models/minilm"), "t").model == "models/minilm"  # type: ignore[arg-type]
