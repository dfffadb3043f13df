"""What a function's arguments name on disk is part of the model: weights that changed are another model."""

from __future__ import annotations

import collections
import dataclasses
import functools
import glob
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kept_files
import numpy as np
import polars
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import dataset, fs

import gristmill as gm
from gristmill.errors import PlanChanged
from gristmill.fingerprint import modelfiles as files


class Weighted:
    """Multiplies by what a file, or a file in a folder, says."""

    def __init__(self, weights: str | Path, log: str | None = None) -> None:
        path = Path(weights)
        self.w = json.loads((path / "model.bin" if path.is_dir() else path).read_text())
        self.log = log

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write("called\n")
        return {"y": batch["x"] * self.w}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Three rows in a file."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"x": 1}\n{"x": 2}\n{"x": 3}\n')
    return tmp_path / "in"


@pytest.mark.parametrize("kind", ["file", "path", "folder", "in a list"])
def test_other_weights_are_another_model(rows: Path, tmp_path: Path, kind: str) -> None:
    """Refused by name on the old answers' sink, and on what is appended to them; the same content is the same model."""
    file = tmp_path / "m" / "model.bin"
    file.parent.mkdir()
    file.write_text("2")
    given: Any = {"file": str(file), "path": file, "folder": str(file.parent), "in a list": [str(file)]}[kind]
    model = gm.model(first, weights=given) if kind == "in a list" else gm.model(Weighted, weights=given)
    job = gm.Job(str(rows), model, str(tmp_path / "out"), workers=0)
    assert job.run().rows_ok == 3
    file.write_text("2")
    assert job.run().state == "nothing to do"
    file.write_text("3")
    (rows / "b.jsonl").write_text('{"x": 4}\n')
    for verbs in ({}, {"append": True}):
        with pytest.raises(gm.PlanChanged, match=r"file .*argument weights .*changed"):
            job.run(**verbs)
    assert job.run(restart=True).rows_ok == 4
    assert sorted(gm.read(str(tmp_path / "out")).to_table()["y"].to_pylist()) == [3, 6, 9, 12]


def first(batch: dict[str, Any], weights: list[str]) -> dict[str, Any]:
    """As `Weighted`, of the first of many."""
    return Weighted(weights[0])(batch)


def test_what_the_code_writes_itself_is_no_other_model(rows: Path, tmp_path: Path) -> None:
    """A file that was not there before the first run."""
    (tmp_path / "m.json").write_text("2")
    model = gm.model(Weighted, weights=str(tmp_path / "m.json"), log=str(tmp_path / "calls.log"))
    job = gm.Job(str(rows), model, str(tmp_path / "out"), workers=0)
    assert job.run().rows_ok == 3
    assert job.run().state == "nothing to do"
    (rows / "b.jsonl").write_text('{"x": 4}\n')
    assert job.run(append=True).rows_ok == 4
    (tmp_path / "calls.log").unlink()
    assert job.run().state == "nothing to do"
    assert job.run(restart=True).rows_ok == 4
    assert job.run().state == "nothing to do"
    (tmp_path / "m.json").write_text("3")
    with pytest.raises(gm.PlanChanged, match=r"file .*m\.json"):
        job.run()


def answers(sink: Path) -> list[int]:
    """What is published, in order."""
    return sorted(gm.read(str(sink)).to_table()["y"].to_pylist())


@pytest.mark.parametrize("named", ["overrides.json", "over*.json"])
def test_a_file_that_comes_changes_or_goes_between_runs_counts(rows: Path, tmp_path: Path, named: str) -> None:
    """One that the code reads where it is there, as a list of overrides, also after a restart; the way out is named."""
    conf, sink = tmp_path / "conf", tmp_path / "out"
    model = kept_files.doubling(overrides=str(conf / "overrides.json"), log=str(tmp_path / "calls.log"))
    if named != "overrides.json":
        model = gm.model(tripled, given=str(conf / named))
    job = gm.Job(str(rows), model, str(sink), workers=0)
    assert job.run().rows_ok == 3
    conf.mkdir()
    for text, said in (
        ('{"1": 70}', "was not there.*move it away"),
        ('{"1": 80}', "changed"),
        ("", "gone.*put it back"),
    ):
        (conf / "overrides.json").write_text(text) if text else (conf / "overrides.json").unlink()
        (rows / "b.jsonl").write_text('{"x": 4}\n')
        for verbs in ({}, {"append": True}):
            with pytest.raises(gm.PlanChanged, match=rf"(?s)file .*argument .*{said}.*restart"):
                job.run(**verbs)
        (rows / "b.jsonl").unlink()
        if text:
            assert job.run(restart=True).rows_ok == 3
            assert named != "overrides.json" or answers(sink) == [4, 6, json.loads(text)["1"]]
    (conf / "overrides.json").write_text('{"1": 80}')
    assert job.run().state == "nothing to do"


@pytest.mark.long
def test_a_run_that_failed_for_want_of_a_file_binds_nobody_to_its_absence(rows: Path, tmp_path: Path) -> None:
    """The file is put there, and the next run's model is that file; the log of the run that failed stays a log."""
    weights, log = tmp_path / "m" / "model.json", tmp_path / "calls.log"
    job = gm.Job(str(rows), gm.model(Late, weights=str(weights), log=str(log)), str(tmp_path / "out"), workers=1)
    with pytest.raises(gm.RunFailed, match="No such file"):
        job.run()
    weights.parent.mkdir()
    weights.write_text("2")
    assert job.run().rows_ok == 3
    assert job.run().state == "nothing to do"
    weights.write_text("1000")
    (rows / "b.jsonl").write_text('{"x": 4}\n')
    for verbs in ({}, {"append": True}):
        with pytest.raises(gm.PlanChanged, match=r"file .*model\.json .*argument weights .*changed"):
            job.run(**verbs)
    assert answers(tmp_path / "out") == [2, 4, 6]
    assert job.run(restart=True).rows_ok == 4
    weights.unlink()
    with pytest.raises(gm.PlanChanged, match=r"file .*model\.json .*argument weights .*gone"):
        job.run()


class Late(Weighted):
    """Begins its log before it looks for its weights."""

    def __init__(self, weights: str, log: str) -> None:
        open(log, "a").close()
        super().__init__(weights, log)


def test_a_file_that_came_during_a_run_is_said(rows: Path, tmp_path: Path) -> None:
    """Once: a person may have put it there, and no change of it is seen."""
    log = tmp_path / "calls.log"
    job = gm.Job(str(rows), kept_files.doubling(log=str(log)), str(tmp_path / "out"), workers=0)
    assert sum("taken for written by the code" in n and str(log) in n for n in job.run().notes) == 1
    assert not any("taken for written" in n for n in job.run(restart=True).notes)


KILLED = """
import sys
sys.path.insert(0, {here!r})
import kept_files
kept_files.told({folder!r}, seconds=0.02).run({verbs})
"""


def kill_9(folder: Path, verbs: str, rows: int) -> None:
    """A run in a process of its own, killed when its log has so many more lines, and something is committed."""
    log = folder / "logs" / "calls.log"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    code = KILLED.format(here=str(Path(__file__).parent), folder=str(folder), verbs=verbs)
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    committed = (folder / "out" / "_gristmill").glob
    ready = "**/receipts/[0-9]*.json"
    while not log.exists() or len(log.read_text().splitlines()) < before + rows or not [*committed(ready)]:
        assert running.poll() is None and time.monotonic() < deadline, "it ended before it was killed"
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()


@pytest.mark.long
def test_a_log_stays_a_log_after_kill_9(tmp_path: Path) -> None:
    """Through resume, append, restart and retry-dead, each killed at its beginning and said again; a file that a person
    puts there meanwhile is none.
    """
    source, overrides = tmp_path / "in", tmp_path / "conf" / "o.json"
    source.mkdir()
    overrides.parent.mkdir()
    (source / "a.jsonl").write_text("".join(f'{{"x": {x}}}\n' for x in range(-1, 39)))
    job = kept_files.told(str(tmp_path), seconds=0.02)
    kill_9(tmp_path, "", 20)
    overrides.write_text('{"1": 70}')
    with pytest.raises(gm.PlanChanged, match=r"(?s)o\.json .*was not there"):
        job.run()
    overrides.unlink()
    report = job.run()
    assert (report.rows_ok, report.rows_dead) == (39, 1)
    assert job.run().state == "nothing to do"
    (source / "b.jsonl").write_text('{"x": 50}\n{"x": -2}\n' * 4)
    kill_9(tmp_path, "append=True", 1)
    assert job.run(append=True).rows_ok == 43
    kill_9(tmp_path, "restart=True", 1)
    assert job.run(restart=True).rows_ok == 43
    overrides.write_text('{"-": 1}')
    with pytest.raises(gm.PlanChanged, match=r"(?s)o\.json .*was not there"):
        gm.retry_dead(job)
    assert gm.retry_dead(job, accept_code_change=True).rows_dead == 0
    (tmp_path / "logs" / "calls.log").write_text("emptied\n")
    assert job.run().state == "nothing to do"


def test_words_are_no_files(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder or file here that is called as an argument's word does not count."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.json").write_text("2")
    (tmp_path / "mean").mkdir()
    (tmp_path / "sum").write_text("1")
    job = gm.Job(str(rows), gm.model(worded, word="sum", words=["mean"]), str(tmp_path / "out"), workers=0)
    assert job.run().rows_ok == 3
    (tmp_path / "mean" / "a.txt").write_text("more")
    (tmp_path / "sum").write_text("2")
    assert job.run().state == "nothing to do"


def test_sentences_are_no_patterns(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question or a footnote finds no files, whatever here it would find, and none that come; a pattern does."""
    monkeypatch.chdir(tmp_path)
    said = ["Mr. *", "Is it 3.5? or less", "What is 2 * 3.5 ?", "Who?", "*"]
    found = ["Mr. Smith", "Is it 3.5! or less", "What is 2 + 3.5 !", "Who!"]
    for name in (*found, "a.rules"):
        Path(name).write_text("1")
    job = gm.Job(str(rows), gm.model(tripled, given=[*said, "?.rules"]), str(tmp_path / "out"), workers=0)
    assert job.run().notes == ()
    for name in (*found, "Mr. Miller", "Why"):
        Path(name).write_text("22")
    assert job.run().state == "nothing to do"
    Path("a.rules").write_text("22")
    with pytest.raises(gm.PlanChanged, match=r"file \?\.rules \(argument given of tripled\) changed") as refused:
        job.run()
    assert not any(sentence in str(refused.value) for sentence in said)


def worded(batch: dict[str, Any], word: str, words: list[str]) -> dict[str, Any]:
    """Opens nothing."""
    return {"y": [word + words[0]] * len(batch["x"])}


@dataclasses.dataclass
class Files:
    """What a caller keeps paths in."""

    weights: Any
    log: Any = None


SHAPES = {
    "set": lambda p: {p},
    "frozenset": lambda p: frozenset([p]),
    "deque": lambda p: collections.deque([p]),
    "key": lambda p: {p: 1},
    "dataclass": lambda p: Files([Files(p)]),
    "partial": lambda p: functools.partial(first, weights=[p]),
    "array": lambda p: np.array([p]),
    "bytes": lambda p: p.encode(),
    "pattern": lambda p: p.replace("model.bin", "mod*.bin"),
    "deep pattern": lambda p: p.replace("m/model.bin", "**/*.bin"),
    "address": lambda p: f"file://{p}",
}


def tripled(batch: dict[str, Any], given: Any = None) -> dict[str, Any]:
    """Opens nothing: what is given counts all the same."""
    return {"y": batch["x"] * 3}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_file_is_found_however_an_argument_names_it(rows: Path, tmp_path: Path, shape: str) -> None:
    """In any container, as a key, in an object, as a pattern or an address."""
    file = tmp_path / "m" / "model.bin"
    file.parent.mkdir()
    file.write_text("2")
    job = gm.Job(str(rows), gm.model(tripled, given=SHAPES[shape](str(file))), str(tmp_path / "out"), workers=0)
    assert job.run().rows_ok == 3
    assert job.run().state == "nothing to do"
    file.write_text("3")
    with pytest.raises(gm.PlanChanged, match=r"file .*argument given.*changed"):
        job.run()


@pytest.mark.parametrize("named", ["relative", "escaped", "deep"])
def test_a_pattern_holds_in_a_folder_whose_name_has_brackets(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """Seen from there, where workers look at it before each commit, or escaped, as `glob` wants it, however much lies
    beside that folder.
    """
    here = tmp_path / "runs [v1]"
    (here / "m").mkdir(parents=True)
    (here / "m" / "a.bin").write_text("2")
    for n in range(4):
        (tmp_path / f"{n}.txt").write_text("beside")
    monkeypatch.chdir(here)
    monkeypatch.setattr(files, "MOST_FILES", 3)
    given = {"relative": "m/*.bin", "escaped": f"{glob.escape(str(here))}/m/*.bin"}
    given["deep"] = f"{glob.escape(str(here))}/**/*.bin"
    model = gm.model(tripled, given=given[named])
    job = gm.Job(str(rows), model, str(tmp_path / "out"), workers=1, shard_rows=1, batch_rows=1)
    assert job.run().notes == ()
    assert job.run().state == "nothing to do"
    (here / "m" / "a.bin").write_text("3")
    with pytest.raises(gm.PlanChanged, match=r"file .*\*\.bin \(argument given of tripled\) changed"):
        job.run()


def by_hook(batch: dict[str, Any], hook: Any) -> dict[str, Any]:
    """What the hook says of each row."""
    return {"y": [hook(x) for x in batch["x"].tolist()]}


@pytest.mark.parametrize("kind", ["partial", "closure"])
def test_a_function_that_is_an_argument_may_write_a_log_and_read_weights(rows: Path, tmp_path: Path, kind: str) -> None:
    """The log does not count, the weights do, and are named."""
    weights, log = tmp_path / "m.json", tmp_path / "calls.log"
    weights.write_text("2")
    hook: Any = functools.partial(scaled, str(weights), Files(None, str(log)))
    if kind == "closure":
        path, files = str(weights), Files(None, str(log))
        hook = lambda x: scaled(path, files, x)  # noqa: E731
    job = gm.Job(str(rows), gm.model(by_hook, hook=hook), str(tmp_path / "out"), workers=0)
    assert job.run().rows_ok == 3
    assert log.exists() and job.run().state == "nothing to do"
    weights.write_text("3")
    with pytest.raises(gm.PlanChanged, match=r"file .*m\.json .*argument hook.*changed"):
        job.run()


@pytest.mark.parametrize("named", ["", "**/*"])
@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_job_reads_and_writes_is_no_part_of_a_folder(
    rows: Path, tmp_path: Path, named: str, workers: int
) -> None:
    """An argument may name the project's folder: its sink, source and log there come and grow, weights beside count."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "w.bin").write_text("5")
    model = gm.model(folder_answers, folder=str(tmp_path / named))
    job = gm.Job(str(rows), model, str(tmp_path / "out"), workers=workers, log=str(tmp_path / "run.jsonl"))
    assert job.run().rows_ok == 3
    assert job.run().state == "nothing to do"
    shutil.copy(rows / "a.jsonl", rows / "b.jsonl")
    assert job.run(append=True).rows_ok == 6
    assert job.run().state == "nothing to do"
    (tmp_path / "models" / "w.bin").write_text("6")
    with pytest.raises(gm.PlanChanged, match=r"file .*argument folder of folder_answers\) changed"):
        job.run()


def folder_answers(batch: dict[str, Any], folder: str) -> dict[str, Any]:
    """The same for each row."""
    return {"y": batch["x"]}


@pytest.mark.parametrize("held", ["fold0/model.pt", "0_Transformer/pytorch_model.bin", "model.json", "a/b/config.cfg"])
def test_a_folder_is_compared_as_deep_as_it_goes(rows: Path, tmp_path: Path, held: str) -> None:
    """Weights, or the configuration of a model, in a folder of the folder, also where that is a link."""
    file = tmp_path / "stored" / held
    file.parent.mkdir(parents=True)
    file.write_text("2")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "current").symlink_to(tmp_path / "stored")
    (tmp_path / "stored" / "again").symlink_to(tmp_path / "m")
    job = gm.Job(str(rows), gm.model(tripled, given=str(tmp_path / "m")), str(tmp_path / "out"), workers=0)
    report = job.run()
    assert not any("not detected" in note for note in report.notes)
    assert job.run().state == "nothing to do"
    file.write_text("3")
    with pytest.raises(gm.PlanChanged, match=r"file .*argument given.*changed"):
        job.run()


def test_folders_that_are_not_compared_are_said_once(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pictures, say: a note, and no refusal, whatever comes into them; one that is empty needs none."""
    (tmp_path / "out of it").mkdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_text("1")
    given = [str(tmp_path / "pictures"), str(tmp_path / "out of it")]
    job = gm.Job(str(rows), gm.model(tripled, given=given), str(tmp_path / "out"), workers=0)
    assert sum("pictures" in note and "not detected" in note for note in job.run().notes) == 1
    for name in given:
        (Path(name) / "b.png").write_text("2")
    assert job.run().state == "nothing to do"
    monkeypatch.setattr(files, "MOST_FILES", 1)
    assert files.TOO_MANY in dict(files.named_files(given[0])).values()
    (tmp_path / "w.bin").write_text("22")
    monkeypatch.setattr(files, "MOST_BYTES", 1)
    (digest,) = (d for _, d in files.named_files(str(tmp_path / "*.bin")))
    assert digest.startswith(files.BY_TIMES)


def test_a_checkpoint_is_of_the_weights_that_a_partial_names(tmp_path: Path) -> None:
    """And not of the log that the function writes itself."""
    weights, log, kept = tmp_path / "w.bin", tmp_path / "calls.log", str(tmp_path / "kept")
    scored = functools.partial(scaled, str(weights), Files(None, str(log)))
    for factor in (1, 100):
        weights.write_text(str(factor))
        for _ in range(2):
            assert gm.map(scored, [1, 2], checkpoint=kept) == [factor, factor * 2]
        assert len(log.read_text().splitlines()) == (2 if factor == 1 else 4)
    assert gm.map(lambda x: scaled(str(weights), Files(None, str(log)), x), [1], checkpoint=kept) == [100]
    weights.write_text("3")
    assert gm.map(lambda x: scaled(str(weights), Files(None, str(log)), x), [1], checkpoint=kept) == [3]


def test_a_checkpoint_is_of_files_that_came_between_calls(tmp_path: Path) -> None:
    """Also of one that was missing when the first call failed, beside one that was there; not of a log."""
    conf, weights, log, kept = (tmp_path / name for name in ("c.json", "w.json", "calls.log", "kept"))
    conf.write_text("1")
    scored = functools.partial(both, str(conf), str(weights), str(log))
    with pytest.raises(FileNotFoundError):
        gm.map(scored, [1, 2], checkpoint=str(kept))
    failed = len(log.read_text().splitlines())
    for number, factor in enumerate((2, 10), 1):
        weights.write_text(str(factor))
        for _ in range(2):
            assert gm.map(scored, [1, 2], checkpoint=str(kept)) == [factor, factor * 2]
        assert len(log.read_text().splitlines()) == failed + number * 2


def test_a_checkpoint_keeps_nothing_of_weights_that_are_replaced_meanwhile(tmp_path: Path) -> None:
    """The map stops, and what was kept before is of what the weights were."""
    weights, kept = tmp_path / "w.bin", str(tmp_path / "kept")
    weights.write_text("2")
    scored = functools.partial(slowly, str(weights))
    given = iter(gm.map(scored, range(1, 200), checkpoint=kept, generator=True))
    found = [next(given) for _ in range(5)]
    (tmp_path / "new").write_text("3")
    (tmp_path / "new").replace(weights)
    with pytest.raises(PlanChanged, match=r"w\.bin.*was changed after.*call the map again"):
        found += list(given)
    weights.write_text("2")
    assert gm.map(scored, range(1, 40), checkpoint=kept) == [2.0 * x for x in range(1, 40)]
    assert len(found) < 199


def slowly(weights: str, x: int) -> float:
    """Times what a file says now."""
    time.sleep(0.05)
    return x * float(Path(weights).read_text())


def both(conf: str, weights: str, log: str, x: int) -> float:
    """Times what two files say; begins its log first."""
    with open(log, "a") as file:
        file.write("called\n")
    return x * json.loads(Path(conf).read_text()) * json.loads(Path(weights).read_text())


@pytest.mark.long
def test_a_checkpoint_knows_a_log_after_kill_9(tmp_path: Path) -> None:
    """What was computed before the kill is not computed again."""
    log = tmp_path / "calls.log"
    code = f"""
import functools, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import kept_files, gristmill as gm
print(gm.map(functools.partial(kept_files.slow, {str(log)!r}), range(40), checkpoint={str(tmp_path / "kept")!r}))
"""
    line = [sys.executable, "-c", code]
    running = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not log.exists() or len(log.read_text().splitlines()) < 20:
        assert running.poll() is None and time.monotonic() < deadline, "it ended before it was killed"
        time.sleep(0.01)
    below = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGKILL)
    running.wait()
    psutil.wait_procs(below, timeout=30)  # whoever is at a call writes its line yet
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [x * 2 for x in range(40)]
    assert len(log.read_text().splitlines()) < 60, "all is computed again"


def scaled(weights: str, files: Files, x: int) -> float:
    """Times what a file says; notes that it was called."""
    with open(files.log, "a") as log:
        log.write("called\n")
    return x * json.loads(Path(weights).read_text())


class Priced:
    """Rows times what a dataset, or a lazy frame, says when it is asked."""

    def __init__(self, prices: Any) -> None:
        found = prices.collect().to_arrow() if hasattr(prices, "collect") else prices.read()
        self.price = found["p"][0].as_py()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": batch["x"] * self.price}


class Asked:
    """A dataset of pyarrow in an object of one's own."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def read(self) -> Any:
        """All of it."""
        return self.of.to_table()


def subtree(folder: Path) -> Any:
    """A dataset of a folder that is the root of a file system."""
    return dataset.dataset("a.parquet", filesystem=fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem()))


LAZY = {
    "dataset": lambda folder: Asked(dataset.dataset(str(folder))),
    "several": lambda folder: Asked(dataset.dataset([dataset.dataset(str(folder)), dataset.dataset(str(folder))])),
    "subtree": lambda folder: Asked(subtree(folder)),
    "parquet": lambda folder: pq.ParquetDataset(str(folder)),
    "scan": lambda folder: polars.scan_parquet(folder / "a.parquet").filter(polars.col("p") > 0),
    "pattern": lambda folder: polars.scan_parquet(str(folder / "*.parquet")),
    "folder": lambda folder: polars.concat([polars.scan_parquet(folder)]),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", LAZY)
def test_what_is_read_when_it_is_asked_counts_by_its_files(rows: Path, tmp_path: Path, kind: str) -> None:
    """A dataset of pyarrow and a lazy frame of polars hold paths: other values in these files are another model."""
    prices = tmp_path / "prices"
    prices.mkdir()

    def job(price: float) -> gm.Job:
        pq.write_table(pa.table({"p": [price] * 3}), prices / "a.parquet")
        return gm.Job(str(rows), gm.model(Priced, prices=LAZY[kind](prices)), str(tmp_path / "out"), workers=0)

    assert job(2.0).run().rows_ok == 3
    assert job(2.0).run().state == "nothing to do"
    with pytest.raises(gm.PlanChanged, match=r"file .*prices.*argument prices of Priced.* changed"):
        job(3.0).run()


def test_a_lazy_frame_that_does_not_tell_its_files_is_named(rows: Path, tmp_path: Path) -> None:
    """As one over a dataset of pyarrow, which polars keeps as a function."""
    pq.write_table(pa.table({"p": [2.0] * 3}), tmp_path / "a.parquet")
    lazy = polars.scan_pyarrow_dataset(dataset.dataset(str(tmp_path / "a.parquet")))
    report = gm.Job(str(rows), gm.model(Priced, prices=lazy), str(tmp_path / "out"), workers=0).run()
    assert any("changes of these values are not detected: argument prices" in note for note in report.notes)


class Labelled(np.ndarray):
    """An array with an attribute, which its pickle leaves out."""

    weight: int = 1


def weigh(batch: dict[str, Any], by: Any) -> dict[str, Any]:
    """A model that reads that attribute."""
    return {"y": batch["a"] * by.weight}


@pytest.mark.parametrize("workers", [0, 1])
def test_the_model_sees_of_an_argument_what_counts_as_the_job(workers: int) -> None:
    """What pickle leaves out of an argument is neither compared nor given to the model, in whichever process it is:
    else other values would be appended to a result as if they came from the same job.
    """
    by = np.arange(2).view(Labelled)
    by.weight = 10
    found = gm.apply(pa.table({"a": [1, 2]}), fn=weigh, args={"by": by}, workers=workers)
    assert found["y"].to_pylist() == [1, 2]
