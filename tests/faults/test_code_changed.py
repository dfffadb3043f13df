"""A user's module that changes while a run goes on: no worker computes with another one than was planned."""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib
import json
import pickle
import re
import subprocess
import sys
import warnings
import zipfile
import zipimport
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.fingerprint import modules, pins
from gristmill.fingerprint.code import digests
from gristmill.job.secret import Secret
from gristmill.job.specs import Call

SCORING = """
import os, pathlib, shutil, time
from {name}_rates import RATE

def score(batch, folder):
    folder = pathlib.Path(folder)
    if 160 in batch["id"].tolist() and not (folder / "marker").exists():
        (folder / "marker").touch()
        for new in folder.glob("*.new"):
            shutil.copy(new, new.with_suffix(".py"))
        time.sleep(0.5)  # the shards before are committed
        os.kill(os.getpid(), 9)
    return {{"y": batch["id"] * RATE}}

def unused():
    return 1
"""

CHANGES = {  # the module, what is written there in place of what, and whether that is another program
    "answer": ("", '"id"] * RATE', '"id"] * RATE + 1', True),
    "below": ("_rates", "RATE = 2", "RATE = 3", True),
    "runs": ("_rates", "RATE = 2", "RATE = 2\nlist.__name__.upper()", True),
    "comment": ("", "def score", "# scores\ndef score", False),
    "unused": ("", "return 1", "return 2", False),
    "touched": ("", "", "", False),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_changes_during_a_run_is_exit_4(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next worker refuses it by its file's name, and what is committed stands: put back, the run goes on. No
    change are a comment, what the job does not use, and another time of the file.
    """
    suffix, old, new, another = CHANGES[change]
    name = f"edited_{change}"
    texts = {name: SCORING.format(name=name), f"{name}_rates": "RATE = 2\n"}
    for module, text in texts.items():
        (tmp_path / f"{module}.py").write_text(text)
    edited = tmp_path / f"{name}{suffix}.py"
    edited.with_suffix(".new").write_text(edited.read_text().replace(old, new))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    pq.write_table(pa.table({"id": range(200)}), tmp_path / "in.parquet")
    model = gm.model(importlib.import_module(name).score, folder=str(tmp_path))
    sink = gm.sink(str(tmp_path / "out"), keep=["id"])
    job = gm.Job(str(tmp_path / "in.parquet"), model, sink, workers=1, shard_rows=25)
    if another:
        with pytest.raises(gm.PlanChanged, match=rf"{edited.name}: module {edited.stem} was changed after") as stopped:
            job.run()
        assert stopped.value.exit_code == 4 and not (tmp_path / "out" / "_SUCCESS").exists()
        with pytest.raises((gm.PlanChanged, gm.BadJob)):  # and it is another job as long as it is so
            job.run()
        edited.write_text(texts[edited.stem])
    report = job.run()
    assert report.read().to_table()["y"].to_pylist() == [2 * i for i in range(200)]
    assert (tmp_path / "marker").exists() and bool(report.shards_resumed) == another


LATE = """
import pathlib, shutil

def late(batch, folder):
    if batch["id"][0] < 50:
        return {{"y": batch["id"] * 2}}
    for new in pathlib.Path(folder).glob("*.new"):
        shutil.copy(new, new.with_suffix(".py"))
    import {name}_rules
    return {{"y": batch["id"] * {name}_rules.FACTOR}}
"""


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    """What the step made."""
    return {"z": batch["y"]}


@pytest.mark.long
@pytest.mark.parametrize("place", ["model", "step beside it"])
def test_a_module_that_is_imported_late_is_the_planned_one(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edited after the worker began and before a call imports it: exit 4, and nothing that was made with it is kept.
    What is edited after it was imported changes nothing.
    """
    name = f"late_{place[:4]}"
    rules = tmp_path / f"{name}_rules.py"
    (tmp_path / f"{name}.py").write_text(LATE.format(name=name))
    rules.write_text("FACTOR = 2\n")
    rules.with_suffix(".new").write_text("FACTOR = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    pq.write_table(pa.table({"id": range(100)}), tmp_path / "in.parquet")
    late = functools.partial(importlib.import_module(name).late, folder=str(tmp_path))
    beside = {"steps": [late], "steps_workers": 1} if place != "model" else {}
    model = doubled if beside else late
    sink = gm.sink(str(tmp_path / "out"), keep=["id"])
    job = gm.Job(str(tmp_path / "in.parquet"), model, sink, workers=1, shard_rows=25, **beside)
    with pytest.raises(gm.PlanChanged, match=f"module {rules.stem} was changed after") as stopped:
        job.run()
    assert stopped.value.exit_code == 4 and not (tmp_path / "out" / "_SUCCESS").exists()
    rules.write_text("FACTOR = 2\n")
    rules.with_suffix(".new").write_text("FACTOR = 2 # again\n")
    report = job.run()
    assert report.read().to_table()["y" if not beside else "z"].to_pylist() == [2 * i for i in range(100)]
    assert report.shards_resumed >= 1


HANDED = """
class Policy:
    def __init__(self, folder):
        self.folder = folder

    def decide(self, batch):
        return batch["id"] * 2

def clean(batch):
    return batch["id"] * 2
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("given", ["function", "object", "in a list"])
def test_code_that_an_argument_holds_is_the_planned_one(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function, an object, and functions in a container, of a module that nothing else of the job imports: a worker
    that starts after it was edited stops the run.
    """
    name = f"handed_{given[-4:]}"
    for module, text in ((f"{name}_policies", HANDED), (name, HOLDER)):
        (tmp_path / f"{module}.py").write_text(text)
    edited = tmp_path / f"{name}_policies.py"
    edited.with_suffix(".new").write_text(HANDED.replace("* 2", "* 3"))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    policies = importlib.import_module(f"{name}_policies")
    held = {"function": policies.clean, "object": policies.Policy(str(tmp_path)), "in a list": [policies.clean]}[given]
    pq.write_table(pa.table({"id": range(200)}), tmp_path / "in.parquet")
    model = gm.model(importlib.import_module(name).Scorer, held=held, folder=str(tmp_path))
    sink = gm.sink(str(tmp_path / "out"), keep=["id"])
    job = gm.Job(str(tmp_path / "in.parquet"), model, sink, workers=1, shard_rows=25)
    with pytest.raises(gm.PlanChanged, match=f"module {edited.stem} was changed after"):
        job.run()
    edited.write_text(HANDED)
    assert job.run().read().to_table()["y"].to_pylist() == [2 * i for i in range(200)]


HOLDER = """
import os, pathlib, shutil, time

class Scorer:
    def __init__(self, held, folder):
        self.held, self.folder = held[0] if isinstance(held, list) else held, pathlib.Path(folder)

    def __call__(self, batch):
        if 160 in batch["id"].tolist() and not (self.folder / "marker").exists():
            (self.folder / "marker").touch()
            for new in self.folder.glob("*.new"):
                shutil.copy(new, new.with_suffix(".py"))
            time.sleep(0.5)  # the shards before are committed
            os.kill(os.getpid(), 9)
        return {"y": self.held.decide(batch) if hasattr(self.held, "decide") else self.held(batch)}
"""


def test_the_package_that_a_function_is_of_counts_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed again under the same version: refused, by workers too, and in a process that has the old one in memory.
    What the package wrote itself is none of its files.
    """
    site = tmp_path / "site-packages"

    def installed(code: str, rate: str = "2") -> gm.Job:
        files = {"acme_rates/__init__.py": "", "acme_rates/score.py": code, "acme_rates/rate.txt": rate}
        about = {"METADATA": "Metadata-Version: 2.1\nName: acme-rates\nVersion: 1.0\n", "top_level.txt": "acme_rates\n"}
        about["RECORD"] = "".join(f"{name},,\n" for name in files)
        for name, text in {**files, **{f"acme_rates-1.0.dist-info/{n}": t for n, t in about.items()}}.items():
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_text(text)
        sys.modules.pop("acme_rates.score", None)
        return gm.Job(
            str(tmp_path / "in.parquet"), gm.model("acme_rates.score:score"), str(tmp_path / "out"), workers=0
        )

    code = "def score(batch):\n    return {'y': batch['id'] * 2}\n"
    pq.write_table(pa.table({"id": range(20)}), tmp_path / "in.parquet")
    monkeypatch.syspath_prepend(str(site))
    assert installed(code).run().rows_ok == 20
    (site / "acme_rates" / "cache.json").write_text("{}")
    assert installed(code).run().state == "nothing to do"
    planned = pins.pins(digests(Call("acme_rates.score:score")))
    for changed in ((code, "3"), (code.replace("* 2", "* 3 + 1"), "2")):
        with pytest.raises(gm.PlanChanged, match="package acme_rates changed"):
            installed(*changed).run()
        with pytest.raises(gm.PlanChanged, match="installed package acme_rates was changed after"):
            pins.check(planned)
    importlib.import_module("acme_rates.score")
    (site / "acme_rates" / "score.py").write_text(code)
    with pytest.raises(gm.BadJob, match="restart the process"):
        gm.Job(str(tmp_path / "in.parquet"), gm.model("acme_rates.score:score"), str(tmp_path / "out")).run()
    assert installed(code).run().state == "nothing to do"


@pytest.mark.long
def test_what_a_script_sets_in_a_module_is_refused_where_workers_do_not_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain values of modules and classes, by both values and the way out; what may be a cache,
    what code sets as it runs and what differs by machine are only warned of.
    """
    text = (
        "import os\nimport {name}_conf\nfrom {name}_conf import LIMIT\nTHRESHOLD = 1 / 2\nLABELS = {{'a': 1}}\n"
        "SEEN = 0\nHOME = os.environ.get('NO_SUCH', 'none')\n\nclass Conf:\n    name = 'default'\n\n"
        "def count():\n    global SEEN\n    SEEN += 1\n\n"
        "def score(batch):\n    answer = [THRESHOLD, LIMIT, {name}_conf.STEP, Conf.name, LABELS, SEEN, HOME]\n"
        "    return {{'y': [str(answer)] * len(batch['id'])}}\n"
    )
    (tmp_path / "set_values.py").write_text(text.format(name="set_values"))
    (tmp_path / "set_values_conf.py").write_text("LIMIT = 3\nSTEP = (1, 'a')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    pq.write_table(pa.table({"id": range(20)}), tmp_path / "in.parquet")
    module = importlib.import_module("set_values")
    conf = importlib.import_module("set_values_conf")

    def job(workers: int, sink: str) -> gm.Job:
        return gm.Job(str(tmp_path / "in.parquet"), module.score, str(tmp_path / sink), workers=workers)

    plain = [(module, "THRESHOLD", 0.9), (module, "LIMIT", 4), (conf, "STEP", (1, "b")), (module.Conf, "name", "x")]
    for number, (where, name, value) in enumerate(plain):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, value)
            assert job(0, f"out{number}").run().rows_ok == 20
            with pytest.raises(
                gm.BadJob, match=rf"{name} is {re.escape(repr(value))} where .* in its workers.*argument"
            ):
                job(1, f"new{number}").run()
    for number, (name, value) in enumerate((("LABELS", {"a": 2}), ("SEEN", 7), ("HOME", "here"))):
        with monkeypatch.context() as patched, pytest.warns(gm.GristmillWarning, match=f"set_values.{name} is"):
            patched.setattr(module, name, value)
            assert job(1, f"warned{number}").run().rows_ok == 20
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* in its workers")
        assert job(1, "out").run().rows_ok == 20


def test_the_users_own_code_in_a_pickled_estimator_is_part_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function of a transformer and a class of one's own, which the file only names: changed, it is another job, and
    put back the same. They are labelled as another version, and workers check them.
    """
    joblib = pytest.importorskip("joblib")
    pipeline = pytest.importorskip("sklearn.pipeline")
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    code = (
        "from sklearn.base import BaseEstimator\nBY = 2.0\ndef clean(x):\n    return x * BY\n"
        "class Own(BaseEstimator):\n    def fit(self, x, y=None):\n        self.fitted_ = True\n        return self\n"
        "    def predict(self, x):\n        return x[:, 0] + 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    pq.write_table(pa.table({"x": [1.0, 2.0, 3.0]}), tmp_path / "in.parquet")

    def job(text: str) -> gm.Job:
        (tmp_path / "own_cleaning.py").write_text(text)
        sys.modules.pop("own_cleaning", None)
        importlib.invalidate_caches()
        own = importlib.import_module("own_cleaning")
        if not (file := tmp_path / "m.joblib").exists():
            steps = preprocessing.FunctionTransformer(own.clean), own.Own()
            joblib.dump(pipeline.make_pipeline(*steps).fit(np.ones((1, 1)), [1.0]), file)
        pinned = hashlib.sha256(file.read_bytes()).hexdigest()
        model = gm.SklearnModel(str(file), features=["x"], allow_pickle=True, sha256=pinned)
        return gm.Job(str(tmp_path / "in.parquet"), model, gm.sink(str(tmp_path / "out"), model_version="v"), workers=0)

    first = job(code).run().read().to_table()
    assert first["prediction"].to_pylist() == [3.0, 5.0, 7.0]
    for old, new, part in (("BY = 2", "BY = 3", "BY"), ("x * BY", "x + BY", "clean"), ("+ 1.0", "+ 2.0", "class Own")):
        with pytest.raises(gm.PlanChanged, match=f"own_cleaning.*{part} changed"):
            job(code.replace(old, new)).run()
    assert job(code).run().state == "nothing to do"
    other = job(code.replace("+ 1.0", "+ 2.0")).run(restart=True).read().to_table()
    assert other["prediction"].to_pylist() == [4.0, 6.0, 8.0] and other["v"][0] != first["v"][0]


LOCKED = """
import threading
from sklearn.base import BaseEstimator

class Double:
    def __call__(self, x):
        return x * 2.0

class Cleaner:
    def __init__(self, double=None):
        self.double, self.open = double, False
    def __getstate__(self):
        if self.open:
            raise TypeError("cannot pickle what is open")
        return self.__dict__
    def __setstate__(self, state):
        self.__dict__.update(state)
        self.open = True
    def __call__(self, x):
        return self.double(x)

class Locked(BaseEstimator):
    def __init__(self, cleaner=None):
        self.cleaner = cleaner
    def fit(self, x, y=None):
        self.fitted_ = True
        return self
    def __setstate__(self, state):
        self.__dict__.update(state)
        self.lock_ = threading.Lock()
    def predict(self, x):
        with self.lock_:
            return self.cleaner(x[:, 0])
"""


@pytest.mark.long
def test_an_estimator_that_cannot_be_saved_again_runs_and_its_code_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that makes a lock as it is loaded; also the code of what it holds beside the lock, and of what that does."""
    joblib = pytest.importorskip("joblib")
    monkeypatch.syspath_prepend(str(tmp_path))
    pq.write_table(pa.table({"x": [1.0, 2.0, 3.0]}), tmp_path / "in.parquet")
    file = tmp_path / "m.joblib"

    def job(text: str) -> gm.Job:
        (tmp_path / "own_locked.py").write_text(text)
        sys.modules.pop("own_locked", None)
        importlib.invalidate_caches()
        own = importlib.import_module("own_locked")
        if not file.exists():
            joblib.dump(own.Locked(own.Cleaner(own.Double())).fit(np.ones((1, 1))), file)
        pinned = hashlib.sha256(file.read_bytes()).hexdigest()
        model = gm.SklearnModel(str(file), features=["x"], allow_pickle=True, sha256=pinned)
        return gm.Job(str(tmp_path / "in.parquet"), model, str(tmp_path / "out"), workers=1)

    assert job(LOCKED).run().read().to_table()["prediction"].to_pylist() == [2.0, 4.0, 6.0]
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(joblib.load(file))
    assert job(LOCKED).run().state == "nothing to do"
    edits = ("* 2.0", "* 3.0", "Double"), ("double(x)", "double(-x)", "Cleaner"), ("x[:, 0]", "-x[:, 0]", "Locked")
    for old, new, part in edits:
        with pytest.raises(gm.PlanChanged, match=f"own_locked.*class {part} changed"):
            job(LOCKED.replace(old, new)).run()


SETTINGS = """
import json, os, secrets, time, uuid
from datetime import datetime
from pathlib import Path

class Settings:
    def __init__(self, **given):
        self.began = time.time()
        self.began_ns = time.monotonic_ns()
        self.day = datetime.now().isoformat()
        self.seed = secrets.token_hex(16)
        self.month = uuid.uuid4().hex
        self.digest = uuid.uuid4().hex
        self.share = time.process_time()
        self.token = secrets.token_urlsafe(48)
        self.run = f"run-{os.getpid()}"
        self.number = uuid.uuid4().int
        self.stamp = datetime.now().strftime("%Y%m%d_%H%M%S")
        self.until = time.time() + 3600
        vars(self).update(given)

SETTINGS = Settings(**json.loads((Path(__file__).parent / "settings.json").read_text()))

def score(batch):
    return {"y": [str(vars(SETTINGS)[k]) for k in batch["k"]]}
"""


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("began", (86400.0 * 365, 86400.0 * 730)),
        ("began_ns", (1, 2)),
        ("day", ("2020-01-01T00:00:00", "2021-01-01T00:00:00")),
        ("seed", ("winter", "summer")),
        ("month", ("20240101000040008000000000000000", "20240201000040008000000000000000")),
        ("token", ("Llama-3-8B-Instruct-GGUF-Q4", "Llama-3-70B-Instruct-GGUF-Q4")),
        ("digest", ("b1946ac92492d2347c6235b4d2611184", "591785b794601e212b260e25925636fd")),
        ("share", (0.0, 0.25)),
        ("run", ("prompt-1.1", "prompt-1.2")),
        ("number", (1234, 4321)),
        ("stamp", ("20240101_000000", "20250101_000000")),
        ("until", (86400.0 * 365, 86400.0 * 730)),
    ],
)
def test_what_a_configuration_gives_counts_and_what_is_drawn_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, values: tuple[Any, Any]
) -> None:
    """An attribute that a class sets to the time, or draws: a run again in which it is another is the same job, which
    is said; where a file gives it instead, another value is another job.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    pq.write_table(pa.table({"k": [name]}), tmp_path / "in.parquet")
    module = f"own_settings_{name}"
    (tmp_path / f"{module}.py").write_text(SETTINGS)

    def run(out: str, **given: Any) -> gm.Report:
        (tmp_path / "settings.json").write_text(json.dumps(given))
        sys.modules.pop(module, None)
        importlib.invalidate_caches()
        model = gm.model(importlib.import_module(module).score)
        return gm.Job(str(tmp_path / "in.parquet"), model, str(tmp_path / out), workers=0).run()

    assert any(f".{name} (other in every process)" in note for note in run("drawn").notes)
    for _ in range(5):
        assert run("drawn").state == "nothing to do"
    first, second = values
    assert run("given", **{name: first}).read().to_table()["y"].to_pylist() == [str(first)]
    assert run("given", **{name: first}).state == "nothing to do"
    with pytest.raises(gm.PlanChanged, match="SETTINGS changed"):
        run("given", **{name: second})


READER = """
import json, os, pathlib, time

class Reader:
    def __init__(self, weights, when):
        self.path, self.when = pathlib.Path(weights), when
        self.factor = None if when == "each call" else self.read()

    def read(self):
        path = next(self.path.glob("*.bin")) if self.path.is_dir() else self.path
        return json.loads(path.read_text())

    def __call__(self, batch):
        if 160 in batch["id"].tolist() and (new := self.path.parent / "new").exists():
            time.sleep(0.5)  # the shards before are committed
            path = next(self.path.glob("*.bin")) if self.path.is_dir() else self.path
            os.replace(new, path)
            if self.when == "new worker":
                os.kill(os.getpid(), 9)
        return {"y": batch["id"] * (self.factor or self.read())}
"""


@pytest.mark.long
@pytest.mark.parametrize(("named", "when"), [("file", "new worker"), ("folder", "each call"), ("secret", "each call")])
def test_a_file_that_an_argument_names_is_the_planned_one(
    named: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaced during the run, no worker that starts later, and no call that reads it then, gives an answer that is
    kept: exit 4. Put back, or only written again, the run goes on.
    """
    name = f"reads_{named}_{when[:3]}"
    (tmp_path / f"{name}.py").write_text(READER)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    weights, new = tmp_path / "m" / "weights.bin", tmp_path / "m" / "new"
    if named == "folder":
        new = tmp_path / "new"
    weights.parent.mkdir()
    weights.write_text("2")
    new.write_text("3")
    pq.write_table(pa.table({"id": range(200)}), tmp_path / "in.parquet")
    path = str(weights.parent if named == "folder" else weights)
    given = Secret("${env:WEIGHTS}", path) if named == "secret" else path
    model = gm.model(f"{name}:Reader", weights=given, when=when)
    sink = gm.sink(str(tmp_path / "out"), keep=["id"])
    job = gm.Job(str(tmp_path / "in.parquet"), model, sink, workers=1, shard_rows=25)
    with pytest.raises(gm.PlanChanged, match=r"file .*\(argument weights of Reader\) was changed after") as stopped:
        job.run()
    assert stopped.value.exit_code == 4 and not (tmp_path / "out" / "_SUCCESS").exists()
    weights.write_text("2")
    new.write_text("2")
    report = job.run()
    assert report.read().to_table()["y"].to_pylist() == [2 * i for i in range(200)]
    assert report.shards_resumed and not new.exists()


def test_a_module_in_an_archive_is_read_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `spark-submit --py-files` has it: it runs, its code counts, and workers compute with what was planned."""
    archive = tmp_path / "app.zip"

    def packed(by: int) -> gm.Job:
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("packed/__init__.py", "")
            file.writestr("packed/score.py", f"BY = {by}\ndef score(batch):\n    return {{'y': batch['id'] * BY}}\n")
        for name in ("packed.score", "packed"):
            sys.modules.pop(name, None)
        zipimport._zip_directory_cache.clear()  # type: ignore[attr-defined]  # as in a new process
        sys.path_importer_cache.clear()
        modules._found_file.cache_clear()
        model = gm.model("packed.score:score")
        return gm.Job(str(tmp_path / "in.parquet"), model, gm.sink(str(tmp_path / "out"), keep=["id"]), workers=1)

    pq.write_table(pa.table({"id": range(20)}), tmp_path / "in.parquet")
    monkeypatch.syspath_prepend(str(archive))
    assert packed(2).run().read().to_table()["y"].to_pylist() == [2 * i for i in range(20)]
    planned = pins.pins(digests(Call("packed.score:score")))
    assert packed(2).run().state == "nothing to do"
    with pytest.raises(gm.PlanChanged, match=r"module packed\.score: BY changed"):
        packed(3).run()
    with pytest.raises(gm.PlanChanged, match=r"score\.py: module packed\.score was changed after"):
        pins.check(planned)


SERVING = """
import pickle
from pathlib import Path
import {name}_idle

class Model:
    def __init__(self):
        with open(Path(__file__).with_name("model.pkl"), "rb") as file:
            self.model = pickle.load(file)

    def __call__(self, batch):
        return {{"y": self.model.predict(batch["id"])}}
"""
PARTS = "class Shifted:\n    def predict(self, x):\n        return x + 1\n"


def test_the_code_that_a_pickle_brings_along_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was loaded as the code ran is compared at the next run, but for a comment and what it does not name."""
    name = f"served_{tmp_path.name}"
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{name}.py").write_text(SERVING.format(name=name))
    (tmp_path / f"{name}_idle.py").write_text("def unused():\n    return 1\n")
    parts = tmp_path / f"{name}_parts.py"
    parts.write_text(PARTS)
    (tmp_path / "model.pkl").write_bytes(b"\x80\x04" + f"c{name}_parts\nShifted\n)R.".encode())
    pq.write_table(pa.table({"id": range(40)}), tmp_path / "in.parquet")
    model = importlib.import_module(name).Model
    sink = str(tmp_path / "out")
    job = gm.Job(str(tmp_path / "in.parquet"), model, sink, workers=1, shard_rows=10)
    assert job.run().rows_ok == 40
    parts.write_text("# shifts\n" + PARTS)
    (tmp_path / f"{name}_idle.py").write_text("def unused():\n    return 2\n")
    assert job.run().state == "nothing to do"
    parts.write_text(PARTS.replace("+ 1", "+ 2"))
    with pytest.raises(gm.PlanChanged, match=f"{name}_parts:Shifted, which the code loaded as it ran, has changed"):
        job.run()
    job.run(restart=True)
    assert sorted(gm.read(sink).to_table()["y"].to_pylist()) == list(range(2, 42))
    assert job.run().state == "nothing to do"


def test_a_class_in_a_pickle_counts_though_its_module_is_imported_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports that nothing names are there for a pickle; what else stands in the module is another matter. An append
    that opens another pickle does not forget it.
    """
    name = f"kept_{tmp_path.name}"
    monkeypatch.syspath_prepend(str(tmp_path))
    serving = SERVING.format(name=name).replace(
        f"import {name}_idle", f"from {name}_parts import Shifted, made  # noqa"
    )
    (tmp_path / f"{name}.py").write_text(f"{serving}\ndef trained():\n    return {name}_parts.made(1)\n")
    parts = tmp_path / f"{name}_parts.py"
    parts.write_text(PARTS + "\n\ndef made(x):\n    return x\n")
    (tmp_path / "model.pkl").write_bytes(b"\x80\x04" + f"c{name}_parts\nShifted\n)R.".encode())
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"id": range(40)}), tmp_path / "in" / "a.parquet")
    source = str(tmp_path / "in")
    job = gm.Job(source, importlib.import_module(name).Model, str(tmp_path / "out"), workers=1, shard_rows=10)
    assert job.run().rows_ok == 40
    parts.write_text(PARTS + "\n\ndef made(x):\n    return x, x\n")
    assert job.run().state == "nothing to do"
    pq.write_table(pa.table({"id": range(40, 50)}), tmp_path / "in" / "b.parquet")
    assert job.run(append=True).rows_ok == 50
    parts.write_text(PARTS.replace("+ 1", "+ 2"))
    pq.write_table(pa.table({"id": range(50, 60)}), tmp_path / "in" / "c.parquet")
    for append in (False, True):
        with pytest.raises(gm.PlanChanged, match=f"{name}_parts:Shifted, which the code loaded"):
            job.run(append=append)


@pytest.mark.long
def test_a_pickle_s_code_that_changes_during_a_run_is_exit_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it was loaded and before it is noted, nobody can tell what it was; a later worker loads what others had."""
    name = f"swapped_{tmp_path.name}"
    monkeypatch.syspath_prepend(str(tmp_path))
    parts = tmp_path / f"{name}_parts.py"
    swaps = f"""
        if int(batch["id"].max()) >= {{row}} and not Path({str(tmp_path / "swapped")!r}).exists():
            Path({str(tmp_path / "swapped")!r}).touch()
            Path({str(parts)!r}).write_text({PARTS.replace("+ 1", "+ 2")!r})
            {{then}}
"""
    (tmp_path / f"{name}_idle.py").touch()
    (tmp_path / "model.pkl").write_bytes(b"\x80\x04" + f"c{name}_parts\nShifted\n)R.".encode())
    pq.write_table(pa.table({"id": range(400)}), tmp_path / "in.parquet")
    for row, then in ((5, "pass"), (290, "import os, time; time.sleep(1); os.kill(os.getpid(), 9)")):
        (tmp_path / "swapped").unlink(missing_ok=True)
        parts.write_text(PARTS)
        before, after = SERVING.format(name=name).split("\n        return")
        text = f"{before}{swaps.format(row=row, then=then)}        return{after}"
        (tmp_path / f"{name}{row}.py").write_text(text)
        model = importlib.import_module(f"{name}{row}").Model
        out = str(tmp_path / f"out{row}")
        job = gm.Job(str(tmp_path / "in.parquet"), model, out, workers=1, shard_rows=10, batch_rows=10)
        with pytest.raises(gm.PlanChanged, match=rf"{name}_parts.*was changed after the run was planned"):
            job.run()
        parts.write_text(PARTS)
        assert job.run().rows_ok == 400
        assert gm.read(out).to_table()["y"].to_pylist() == list(range(1, 401))


COMING = """
import os, sys, tempfile, time, zipfile
from pathlib import Path

class Model:
    def __init__(self, archive):
        here = Path(__file__).parent
        folder = here / "made" if {way!r} == "written" else Path(tempfile.mkdtemp(dir=here))
        folder.mkdir(exist_ok=True)
        if archive.endswith(".zip"):
            zipfile.ZipFile(archive).extractall(folder)
        else:
            text = Path(archive).read_text().replace("PID", str(os.getpid()))
            (folder / "{name}_rules.py").write_text(text)
            os.utime(folder / "{name}_rules.py", (time.time() + 600,) * 2)
        sys.path.insert(0, str(folder))
        import {name}_rules
        if {way!r} == "gone":
            (folder / "{name}_rules.py").unlink()
        self.plus = {name}_rules.plus

    def __call__(self, batch):
        time.sleep(0.1)
        return {{"y": self.plus(batch["id"])}}
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ("unpacked", "gone", "written", "other"))
def test_code_that_each_worker_brings_along_is_told_by_what_it_says(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of its own, in a file that is gone, or written again and dated ahead; other code is refused."""
    name = f"coming_{tmp_path.name}"
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{name}.py").write_text(COMING.format(name=name, way=way))
    text = "def plus(x):\n    return x + 1\n"
    archive = tmp_path / ("model.zip" if way in ("unpacked", "gone") else "rules.txt")
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr(f"{name}_rules.py", text)
    else:
        archive.write_text(text + "BY = PID\n" if way == "other" else text)
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"id": range(100)}), tmp_path / "in" / "a.parquet")
    model = gm.model(importlib.import_module(name).Model, archive=str(archive))
    out = str(tmp_path / "out")
    workers = 1 if way == "other" else 2
    job = gm.Job(str(tmp_path / "in"), model, out, workers=workers, shard_rows=10, batch_rows=10)
    assert job.run().rows_ok == 100
    pq.write_table(pa.table({"id": range(100, 120)}), tmp_path / "in" / "b.parquet")
    if way == "other":
        with pytest.raises(gm.PlanChanged, match=f"{name}_rules, which the code loads.*was changed after the run"):
            job.run(append=True)
        return
    assert job.run(append=True).rows_ok == 120
    assert sorted(gm.read(out).to_table()["y"].to_pylist()) == list(range(1, 121))
    if way == "written":
        (tmp_path / "made" / f"{name}_rules.py").write_text(text.replace("+ 1", "+ 2"))
        with pytest.raises(gm.PlanChanged, match=f"{name}_rules, which the code loaded as it ran, has changed"):
            job.run()


OPENING = """
import asyncio, functools, os, pathlib, pickle
from concurrent.futures import ThreadPoolExecutor
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))

@functools.cache
def weights():
    return np.load(os.path.join(HERE, "w.npy"))

LOG = os.path.join(HERE, "calls.log")

def late(batch):
    with open(LOG, "a") as file:
        file.write(str(len(batch["id"])))
    return {"y": batch["id"] * weights()}

class Model:
    def __init__(self):
        with open(pathlib.Path(HERE) / "w.npy", "rb") as file:
            self.w = np.load(file)

    def __call__(self, batch):
        return {"y": batch["id"] * self.w}

class Pooled(Model):
    \"\"\"Reads several files at once.\"\"\"

    def __init__(self):
        with ThreadPoolExecutor() as pool:
            (self.w,) = pool.map(np.load, [os.path.join(HERE, "w.npy")])

async def aside(row):
    w = await asyncio.to_thread(np.load, os.path.join(HERE, "w.npy"))
    return {"y": row["id"] * int(w)}

class Fills(Model):
    \"\"\"Writes beside the answers, in place.\"\"\"

    def __init__(self):
        super().__init__()
        self.side = np.memmap(os.path.join(HERE, "side.bin"), dtype=np.int64, shape=120)

    def __call__(self, batch):
        self.side[batch["id"]] += 1
        self.side.flush()
        return super().__call__(batch)

class Keeps(Model):
    \"\"\"Has a store of its own, which it writes as it is closed.\"\"\"

    def __init__(self):
        super().__init__()
        self.store = os.path.join(HERE, "store.pkl")
        self.runs = pickle.load(open(self.store, "rb")) if os.path.exists(self.store) else 0

    def close(self):
        with open(self.store + ".new.pkl", "wb") as file:
            pickle.dump(self.runs + 1, file)
        os.replace(self.store + ".new.pkl", self.store)
"""


@pytest.mark.long
@pytest.mark.parametrize("what", ["late", "Model", "Keeps", "Fills", "Pooled", "aside"])
@pytest.mark.parametrize("workers", [0, 2])
def test_weights_that_code_opens_by_itself_count(
    what: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a rerun nor an append takes answers of a model that was replaced for its own; what the code writes itself
    is no part of it.
    """
    name = f"opening_{what}_{workers}"
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{name}.py").write_text(OPENING)
    np.save(tmp_path / "w.npy", np.int64(2))
    np.zeros(120, np.int64).tofile(tmp_path / "side.bin")
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"id": range(100)}), tmp_path / "in" / "a.parquet")
    model, out = getattr(importlib.import_module(name), what), str(tmp_path / "out")
    job = gm.Job(str(tmp_path / "in"), model, gm.sink(out, model_version="v"), workers=workers, shard_rows=10)
    assert job.run().rows_ok == 100
    pq.write_table(pa.table({"id": range(100, 120)}), tmp_path / "in" / "b.parquet")
    assert job.run(append=True).rows_ok == 120
    assert job.run().state == "nothing to do"
    assert len(set(gm.read(out).to_table()["v"].to_pylist())) == 1
    np.save(tmp_path / "w.npy", np.int64(3))
    for options in ({}, {"append": True}):
        with pytest.raises(gm.PlanChanged, match=r"w\.npy, which the code loaded as it ran, has changed") as refused:
            job.run(**options)
        assert "store.pkl" not in str(refused.value) and "side.bin" not in str(refused.value)
    if what == "late" and workers == 0:
        importlib.import_module(name).weights.cache_clear()
    assert job.run(restart=True).rows_ok == 120
    assert sorted(gm.read(out).to_table()["y"].to_pylist()) == [3 * n for n in range(120)]


NEWEST = """
import functools, glob, gzip, os, pickle
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))

def newest(read, kind):
    with read(sorted(glob.glob(os.path.join(HERE, "models", "*" + kind)))[-1], "rb") as file:
        return pickle.load(file)

class Model:
    def __init__(self):
        self.w = newest(open, ".sav")

    def __call__(self, batch):
        return {"y": batch["id"] * self.w}

class Mapped(Model):
    def __init__(self):
        path = sorted(glob.glob(os.path.join(HERE, "models", "*.bin")))[-1]
        self.w = np.memmap(path, dtype=np.int64, shape=1)[0]

class Packed(Model):
    def __init__(self):
        self.w = newest(gzip.open, ".pkl.gz")

def of_rows(batch):
    return {"y": [i * pickle.load(open(os.path.join(HERE, "rows", f"{i}.pkl"), "rb")) for i in batch["id"]]}

@functools.cache
def of_group(g):
    return pickle.load(open(os.path.join(HERE, "rows", f"{g}.pkl"), "rb"))

def grouped(batch):
    return {"y": [i * of_group(i // 30) for i in batch["id"]]}
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("what", ["Model", "Mapped", "Packed", "of_rows", "grouped"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_newest_weights_of_a_folder(
    what: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another day beside the ones before are another model, which an append and a resumed run refuse; what
    rows name, each another file or groups of them, is not.
    """
    name = f"newest_{what}_{workers}"
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{name}.py").write_text(NEWEST)
    for folder in ("in", "models", "rows"):
        (tmp_path / folder).mkdir()
    for i in range(120):
        (tmp_path / "rows" / f"{i}.pkl").write_bytes(pickle.dumps(2) + b" " * i)

    def put(day: str, weight: int) -> None:
        (tmp_path / "models" / f"{day}.sav").write_bytes(pickle.dumps(weight))
        (tmp_path / "models" / f"{day}.pkl.gz").write_bytes(gzip.compress(pickle.dumps(weight)))
        np.int64(weight).tofile(tmp_path / "models" / f"{day}.bin")

    put("2026-01-01", 2)
    pq.write_table(pa.table({"id": range(100)}), tmp_path / "in" / "a.parquet")
    module = importlib.import_module(name)
    out = str(tmp_path / "out")
    job = gm.Job(str(tmp_path / "in"), getattr(module, what), out, workers=workers, shard_rows=50)
    assert job.run().rows_ok == 100
    put("2026-01-02", 3)
    pq.write_table(pa.table({"id": range(100, 120)}), tmp_path / "in" / "b.parquet")
    if what in ("of_rows", "grouped"):
        assert job.run(append=True).rows_ok == 120
        return
    with pytest.raises(gm.PlanChanged, match=r"2026-01-02\..* in the place of .*2026-01-01\."):
        job.run(append=True)
    assert gm.read(out).to_table().num_rows == 100
    assert job.run(restart=True).rows_ok == 120
    assert sorted(gm.read(out).to_table()["y"].to_pylist()) == [3 * n for n in range(120)]


STAGED = """
import os, pathlib, shutil
import numpy as np

HERE = pathlib.Path(__file__).parent

class Staged:
    def __init__(self):
        staged = HERE / "scratch.npy"
        if not staged.exists():
            shutil.copy(HERE / "base.npy", staged)
        self.w = np.load(staged)[0]

    def __call__(self, batch):
        return {"y": batch["id"] * self.w}

class Kept(Staged):
    def __init__(self):
        if (HERE / "kept.npy").exists():
            self.w = np.load(HERE / "kept.npy")[0]
        else:
            self.w = np.load(HERE / "base.npy")[0]
            np.save(HERE / "kept.npy", np.array([self.w]))

class Again(Staged):
    def __init__(self):
        self.w = np.load(HERE / "base.npy")[0] * self.other()

    def other(self):
        return np.load(HERE / "other.npy")[0]

    def __call__(self, batch):
        if batch["id"].max() >= 100:
            self.other()
        return super().__call__(batch)
"""


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("what", ["Staged", "Kept", "Again"])
def test_a_model_is_made_of_the_same_in_other_ways(
    what: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another night opens the cache and not what it was made of, or, where it was cleaned, the reverse; rows ask
    for a file that the model was made of.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"staged_{what}_{workers}"
    (tmp_path / f"{name}.py").write_text(STAGED)
    np.save(tmp_path / "base.npy", np.array([2]))
    np.save(tmp_path / "other.npy", np.array([1]))
    inputs = tmp_path / "in"
    inputs.mkdir()
    model = getattr(importlib.import_module(name), what)
    job = gm.Job(str(inputs), model, str(tmp_path / "out"), workers=workers, shard_rows=50)
    for night in range(4):
        pq.write_table(pa.table({"id": range(night * 100, night * 100 + 100)}), inputs / f"{night}.parquet")
        assert job.run(append=night > 0).rows_ok == 100 + 100 * night
        if night == 1:
            for cache in ("scratch.npy", "kept.npy"):
                (tmp_path / cache).unlink(missing_ok=True)


STEPPED = """
import pathlib
import numpy as np

HERE = pathlib.Path(__file__).parent

class Step:
    def __init__(self):
        self.v = np.load(HERE / "step.npy")[0]

    def __call__(self, batch):
        return {"id": batch["id"], "x": batch["id"] + self.v}

class Model:
    def __init__(self):
        self.w = np.load(HERE / "model.npy")[0]

    def __call__(self, batch):
        return {"y": batch["x"] * self.w}
"""


@pytest.mark.long
def test_weights_of_steps_wherever_these_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step opens is the same in the worker and in processes below it, which is no other job."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "steps_that_open.py").write_text(STEPPED)
    np.save(tmp_path / "step.npy", np.array([1]))
    np.save(tmp_path / "model.npy", np.array([2]))
    inputs = tmp_path / "in"
    inputs.mkdir()
    module = importlib.import_module("steps_that_open")
    for night, (workers, beside) in enumerate([(1, 0), (1, 1), (0, 0), (1, 1), (1, 0)]):
        pq.write_table(pa.table({"id": range(night * 100, night * 100 + 100)}), inputs / f"{night}.parquet")
        sink = gm.sink(str(tmp_path / "out"), keep=["id"])
        steps = [gm.step(module.Step)]
        job = gm.Job(str(inputs), module.Model, sink, steps=steps, workers=workers, steps_workers=beside, shard_rows=50)
        assert job.run(append=night > 0).rows_ok == 100 + 100 * night
    rows = gm.read(str(tmp_path / "out")).to_table().to_pylist()
    assert all(row["y"] == 2 * (row["id"] + 1) for row in rows)


OPTIONS = """
import argparse, sys
from dataclasses import dataclass
import gristmill as gm

parser = argparse.ArgumentParser()
parser.add_argument("--factor", type=float, default=2)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--append", action="store_true")
args = parser.parse_args()

@dataclass
class Settings:
    factor: float
    workers: int
    append: bool

    def also(self):
        return self.factor

settings = Settings(**vars(args))
plain = vars(args)
F = lambda a: a.factor

def scored(batch):
    return {"y": batch["id"] * FACTOR}

def inside():
    args = parser.parse_args()
    def scored(batch):
        return {"y": [one * args.factor for one in batch["id"]]}
    return scored

if __name__ == "__main__":
    job = gm.Job("in", SCORED, gm.sink("out", keep=["id"]), workers=args.workers)
    try:
        print("rows", job.run(append=args.append).rows_ok)
    except gm.PlanChanged as e:
        print("refused", e)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("factor", "whole"),
    [("args.factor", False), ('plain["factor"]', False), ('plain.get("factor", 1)', False), ("settings.factor", False),
     ("inside()", False), ("settings.also()", True), ("F(args)", True), ('plain.get("fac" + str("tor"))', True),
     ('plain.get("factor".lower())', True), ("""plain.get(f"fac{'tor'!s}", 1)""", True)],
)  # fmt: skip
def test_options_of_a_script(factor: str, whole: bool, tmp_path: Path) -> None:
    """Of a record of options count those that the functions ask for: neither --append nor --workers is another job. A
    record that goes elsewhere counts whole.
    """
    text = OPTIONS.replace("SCORED", factor if factor == "inside()" else "scored")
    text = text.replace("FACTOR", "1" if factor == "inside()" else factor)
    (tmp_path / "job.py").write_text(text)
    (tmp_path / "in").mkdir()

    def run(night: int, *arguments: str) -> str:
        pq.write_table(pa.table({"id": range(night * 100, night * 100 + 100)}), tmp_path / "in" / f"{night}.parquet")
        line = [sys.executable, "job.py", *arguments]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True).stdout

    assert run(0) == "rows 100\n"
    said = run(1, "--append", "--workers", "1")
    assert said.startswith("refused" if whole else "rows 200"), said
    assert factor != "F(args)" or "scored.args.append changed" in said
    said = run(2, "--append", "--factor", "3")
    assert said.startswith("refused") and (".factor changed" in said or whole), said


NEWEST_BUT_SEVEN = """
import glob, os, pickle

HERE = os.path.dirname(os.path.abspath(__file__))

class Model:
    def __init__(self):
        self.w = pickle.load(open(sorted(glob.glob(os.path.join(HERE, "models", "*")))[-1], "rb"))

    def __call__(self, batch):
        if self.w == 2 and 7 in batch["id"]:
            raise ValueError("seven")
        return {"y": batch["id"] * self.w}
"""


@pytest.mark.long
def test_newer_weights_for_the_dead_rows_and_those_to_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are accepted for the dead rows, however few, an append with them is no other job."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "but_seven.py").write_text(NEWEST_BUT_SEVEN)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "1.pkl").write_bytes(pickle.dumps(2))
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"id": range(200)}), tmp_path / "in" / "a.parquet")
    model = importlib.import_module("but_seven").Model
    job = gm.Job(str(tmp_path / "in"), model, str(tmp_path / "out"), workers=1, shard_rows=200)
    assert job.run().rows_dead == 1
    (tmp_path / "models" / "2.pkl").write_bytes(pickle.dumps(3))
    pq.write_table(pa.table({"id": range(200, 400)}), tmp_path / "in" / "b.parquet")
    with pytest.raises(gm.PlanChanged, match=r"2\.pkl in the place of .*1\.pkl"):
        job.run(append=True)
    assert gm.retry_dead(job, accept_code_change=True).rows_dead == 0
    assert job.run(append=True).rows_ok == 400
    (tmp_path / "models" / "3.pkl").write_bytes(pickle.dumps(4))
    pq.write_table(pa.table({"id": range(400, 600)}), tmp_path / "in" / "c.parquet")
    with pytest.raises(gm.PlanChanged, match=r"3\.pkl in the place of .*2\.pkl"):
        job.run(append=True)


SEVEN = """
import numpy as np

class Model:
    def __init__(self):
        self.w = np.load({path!r})

    def __call__(self, batch):
        if self.w == 2 and 7 in batch["id"]:
            raise ValueError("seven")
        return {{"y": batch["id"] * self.w}}
"""


def test_dead_rows_may_be_scored_by_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way out that the refusal names: afterwards the job is that of the new weights."""
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "w.npy"
    (tmp_path / "seven.py").write_text(SEVEN.format(path=str(path)))
    np.save(path, np.int64(2))
    pq.write_table(pa.table({"id": range(100)}), tmp_path / "in.parquet")
    model = importlib.import_module("seven").Model
    job = gm.Job(str(tmp_path / "in.parquet"), model, str(tmp_path / "out"), workers=1, shard_rows=10)
    assert job.run().rows_dead == 1
    np.save(path, np.int64(3))
    with pytest.raises(gm.PlanChanged, match="retry-dead --accept-code-change"):
        gm.retry_dead(job)
    assert gm.retry_dead(job, accept_code_change=True).rows_dead == 0
    assert job.run().state == gm.retry_dead(job).state == "nothing to do"
    assert sorted(gm.read(str(tmp_path / "out")).to_table()["y"].to_pylist())[:9] == [0, 2, 4, 6, 8, 10, 12, 16, 18]
    np.save(path, np.int64(2))
    with pytest.raises(gm.PlanChanged, match=r"w\.npy, which the code loaded"):
        job.run()


SWAPPING = """
import os, time
import numpy as np

class Model:
    def __init__(self):
        self.w = np.load({path!r})

    def __call__(self, batch):
        if 4000 in batch["id"] and self.w == 2:
            np.save({path!r} + ".new.npy", np.int64(3))
            os.system("mv " + {path!r} + ".new.npy " + {path!r})  # as another program would
            os._exit(9)
        return {{"y": batch["id"] * self.w}}
"""


def test_weights_that_are_replaced_during_a_run_are_exit_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that comes for one that died does not go on with another model."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "swapping.py").write_text(SWAPPING.format(path=str(tmp_path / "w.npy")))
    np.save(tmp_path / "w.npy", np.int64(2))
    pq.write_table(pa.table({"id": range(5000)}), tmp_path / "in.parquet")
    model = importlib.import_module("swapping").Model
    job = gm.Job(str(tmp_path / "in.parquet"), model, str(tmp_path / "out"), workers=1, shard_rows=500, batch_rows=500)
    with pytest.raises(gm.PlanChanged, match=r"w\.npy, which the code loads as it runs, was changed"):
        job.run()
