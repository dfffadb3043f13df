"""Models by their names in a registry: models.yaml, and MLflow's where it is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import skops.io
from sklearn.linear_model import LinearRegression

import gristmill as gm
import kit
from gristmill.cli.app import main
from gristmill.commit.generation import generations, read_plan
from gristmill.commit.publication import published
from gristmill.errors import BadModel, GristmillWarning, PlanChanged
from gristmill.fingerprint.diskcache import file_digest
from gristmill.models import modelsfile, registrations

ROWS = pa.table({"id": [1, 2, 3], "x": [1.0, 2.0, 3.0]})


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder of its own, with two versions of a model: one triples, one takes four times."""
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    for slope in (3, 4):
        skops.io.dump(LinearRegression(fit_intercept=False).fit([[1.0], [2.0]], [slope, 2 * slope]), named(slope))
    return tmp_path


def named(version):
    return f"models/slope-{version}.skops"


def approve(*arguments, code=0):
    assert main(["approve", *arguments]) == code


def scored(model, sink="out", **options):
    job = gm.Job(ROWS, model, gm.sink(sink, keep=["id"], **options), workers=0)
    report = job.run()
    return report, np.round(gm.read(sink).to_table()["prediction"].to_numpy(), 6).tolist()


def skops_model(name):
    return gm.SklearnModel(name, features=("x",))


def test_an_approved_version_scores_and_is_told(capsys):
    """`registry:NAME@STAGE` scores with the approved files; column, report and result say which, and by whom."""
    approve("slope", "3", "--for", "batch", "--path", named(3), "--by", "anna")
    assert f"slope/3 is approved for batch by anna: {named(3)}" in capsys.readouterr().out
    report, values = scored(skops_model("registry:slope@batch"), model_version="version")
    assert values == [3.0, 6.0, 9.0]
    digest = file_digest(Path(named(3)))
    assert set(gm.read("out").to_table()["version"].to_pylist()) == {f"slope/3 sha256:{digest}"}
    told = published(os.path.abspath("out")).body.model.registered
    assert (told.name, told.version, told.digest, told.stage) == ("slope", "3", digest, "batch")
    assert told.approved_by == "anna" and told.approved_at.startswith("20")
    assert "slope/3, approved for batch by anna" in str(report)
    (generation,) = generations(os.path.abspath("out"))
    assert read_plan(generation).about.model.registered == told


def test_an_approval_moves_its_stage(capsys):
    """Approved for a stage is one version: the next takes it, and a result of the one before is refused (exit 4)."""
    approve("slope", "3", "--for", "batch", "--path", named(3))
    scored(skops_model("registry:slope@batch"))
    approve("slope", "4", "--for", "batch", "--path", named(4))
    assert "instead of 3" in capsys.readouterr().out
    with pytest.raises(PlanChanged, match="slope-4"):
        scored(skops_model("registry:slope@batch"))
    assert scored(skops_model("registry:slope@batch"), "other")[1] == [4.0, 8.0, 12.0]
    assert scored(skops_model("registry:slope/3"), "third")[1] == [3.0, 6.0, 9.0]


def test_models_of_one_name_in_two_registries_have_paces_of_their_own(tmp_path, monkeypatch):
    """How long a run takes is told by those of the model of this folder's models.yaml; a new version is as fast."""
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    for folder, versions in (("a", "34"), ("b", "3")):
        Path(folder).mkdir()
        shutil.copytree("models", f"{folder}/models")
        monkeypatch.chdir(folder)
        for version in versions:
            approve("slope", version, "--for", "batch", "--path", named(version))
            scored(skops_model("registry:slope@batch"), f"out{version}")
        monkeypatch.chdir(tmp_path)
    assert len(list((tmp_path / "cache" / "paces").iterdir())) == 2


@pytest.mark.long
def test_commands_and_job_files_take_names(capsys):
    """`--model registry:…` of a command, a job file, and a file of models that is named in it."""
    approve("slope", "3", "--for", "batch", "--path", named(3))
    Path("rows.csv").write_text("id,x\n1,1.0\n")
    assert main(["predict", "rows.csv", "typed", "--model", "registry:slope@batch", "--features", "x",
                 "--save", "job.yaml"]) == 0  # fmt: skip
    assert "registry:slope@batch" in Path("job.yaml").read_text()
    Path("below").mkdir()
    job = Path("job.yaml").read_text().replace("registry:slope", "registry:models.yaml#slope").replace("typed", "again")
    Path("job.yaml").write_text(job)
    assert main(["run", "job.yaml"]) == 0
    assert (
        gm.read("again").to_table()["prediction"].to_pylist() == gm.read("typed").to_table()["prediction"].to_pylist()
    )
    assert main(["plan", "job.yaml"]) == 0
    assert "slope/3, approved for batch" in capsys.readouterr().out


def test_text_models_and_arguments_take_names(here):
    """A folder of a text model, its queries, and an argument of a function, from a folder below that of models.yaml."""
    shutil.copytree(kit.minilm(), "models/minilm")
    approve("minilm", "1", "--for", "batch", "--path", "models/minilm")
    approve("slope", "3", "--for", "batch", "--path", named(3))
    (here / "below").mkdir()
    os.chdir("below")
    model = gm.TextEmbedder("registry:minilm@batch", "text")
    found = gm.embed(["a film"], model="registry:minilm@batch", workers=0)
    with model.open() as queries:
        assert np.allclose(queries.encode("a film"), found["embedding"].to_numpy()[0], atol=1e-5)

    def size(batch, file):
        return {"size": [os.path.getsize(file)] * len(batch["id"])}

    table = gm.apply(ROWS, fn=size, args={"file": "registry:slope@batch"}, workers=0)
    assert set(table["size"].to_pylist()) == {os.path.getsize(here / named(3))}


class Factor:
    """Multiplies by the number in a file, or in a file of a folder, once it may load."""

    def __init__(self, weights, beside="", wait=""):
        while wait and not os.path.exists(wait):
            Path(f"{wait}.loading").touch()
            time.sleep(0.01)
        file = weights if os.path.isfile(weights) else os.path.join(weights, "factor.txt")
        self.factor = float(Path(file).read_text())

    def __call__(self, batch):
        return {"y": batch["x"] * self.factor}


def factor_job(rows=ROWS, update=None, workers=0, **arguments):
    model = gm.model(Factor, weights="registry:factor@batch", takes={"x": "float64"}, **arguments)
    pq.write_table(rows, "rows.parquet")
    sink = gm.sink("out", keep=["id"], model_version="version")
    return gm.Job("rows.parquet", model, sink, update=update, workers=workers)


def put_factor(path, factor, version=None):
    file = Path(path) if path == "weights" else Path(path, "factor.txt")
    file.parent.mkdir(exist_ok=True)
    file.write_text(str(factor))
    if version is not None:
        approve("factor", version, "--for", "batch", "--path", path)


@pytest.mark.parametrize("path", ["weights", "folder"])
def test_an_argument_is_compared_whatever_its_files_are_called(path):
    """A model retrained in place and approved anew is another one: refused without update, all scored with it."""
    put_factor(path, 2, "1")
    factor_job(update={"key": ["id"]}).run()
    put_factor(path, 3, "2")
    with pytest.raises(PlanChanged, match="files of argument weights changed"):
        factor_job().run()
    report = factor_job(ROWS.set_column(1, "x", pa.array([1.0, 2.0, 9.0])), update={"key": ["id"]}).run()
    assert report.updated == {"kept": 0, "scored": 3, "gone": 0}
    held = gm.read("out").to_table().to_pylist()
    assert [row["y"] for row in held] == [3.0, 6.0, 27.0]
    assert all(row["version"].startswith("factor/2 sha256:") for row in held)


@pytest.mark.parametrize("path", ["weights", "folder", "link"])
def test_an_argument_that_is_swapped_as_a_worker_loads_it_is_refused(path):
    """What is loaded is what was approved: a file, a folder or a link that is another one by then stops the run."""
    put_factor("folder" if path == "link" else path, 2)
    if path == "link":
        os.symlink("folder", "link")
    approve("factor", "1", "--for", "batch", "--path", path)

    def swap():
        while not os.path.exists("go.loading"):
            time.sleep(0.01)
        if path == "link":
            put_factor("other", 3)
            os.symlink("other", "new")
            os.replace("new", "link")
        else:
            put_factor(path, 3)
        Path("go").touch()

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        with pytest.raises(PlanChanged, match="changed after the run was planned"):
            factor_job(wait="go").run()
    finally:
        Path("go.loading").touch()
        swapping.join()


def test_all_arguments_of_a_registry_are_recorded():
    """Report, result, proof and the column name each of them, and none is said to be left uncompared."""
    put_factor("folder", 2, "1")
    Path("words").mkdir()
    Path("words/list").write_text("a b")
    approve("words", "7", "--for", "batch", "--path", "words")
    report = factor_job(beside="registry:words@batch").run()
    assert not [note for note in report.notes if "not detected" in note]
    told = published(os.path.abspath("out")).body.model
    assert [one.label for one in told.named] == ["factor/1", "words/7"]
    (version,) = set(gm.read("out").to_table()["version"].to_pylist())
    assert version.startswith("factor/1 sha256:") and " words/7 sha256:" in version
    assert "words/7, approved for batch" in str(report)
    assert "words/7, approved for batch" in str(gm.prove("out", 2, key="id"))
    Path("words/list").write_text("a b c")
    approve("words", "8", "--for", "batch", "--path", "words")
    with pytest.raises(PlanChanged, match="files of argument beside changed"):
        factor_job(beside="registry:words@batch").run()


def test_files_that_are_not_those_approved_are_refused(capsys):
    """Exit 2 and one line, when planning, when approving and in the list; nothing is run or written."""
    approve("slope", "3", "--for", "batch", "--path", named(3))
    before = Path("models.yaml").read_text()
    shutil.copy(named(4), named(3))
    Path("rows.csv").write_text("x\n1.0\n")
    capsys.readouterr()
    assert main(["predict", "rows.csv", "out", "--model", "registry:slope@batch"]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("gristmill: models.yaml:") and "was recorded with sha256" in err
    assert not os.path.exists("out")
    approve("slope", "3", "--for", "live", code=2)
    assert "put the recorded files back" in capsys.readouterr().err
    assert Path("models.yaml").read_text() == before
    assert main(["models"]) == 2
    assert "changed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("registry:slop@batch", "no model 'slop': it has slope; did you mean 'slope'?"),
        ("registry:slope@bach", "approves one; did you mean 'batch'?"),
        ("registry:slope/33", "no version '33' of slope: it has 3; did you mean '3'?"),
        ("registry:slope", "which version"),
        ("registry:nowhere.yaml#slope@batch", "nowhere.yaml: cannot be read"),
    ],
)
def test_unknown_names_are_told_with_the_nearest(name, told):
    """The model, version or stage that is not there, and the nearest that is."""
    approve("slope", "3", "--for", "batch", "--path", named(3))
    with pytest.raises(BadModel, match=told) as e:
        scored(skops_model(name))
    assert "\n" not in str(e.value) and e.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("slope:\n  '3': {path: a\n", r"models.yaml:\d+:\d+: "),
        ("slope: [1]\n", "models.yaml:1: slope is .* mapping of versions"),
        ("slope:\n  3: {path: a}\n", "models.yaml:2: the key 3 is a number"),
        (
            "slope:\n  '3': {pth: a}\n",
            "models.yaml:2: slope/3 has no key 'pth': its keys are path, sha256, approved, about; did you mean 'path'?",
        ),
        ("slope:\n  '3': {sha256: a}\n", "slope/3 has no path"),
        ("slope:\n  '3': {path: a, sha256: abc}\n", "64 hex digits"),
        ("slope:\n  '3': {path: a, approved: {batch: {by: x}}}\n", "has no sha256"),
        (
            f"slope:\n  '3': {{path: a, sha256: {'a' * 64}, approved: {{batch: {{}}}}}}\n"
            f"  '4': {{path: b, sha256: {'b' * 64}, approved: {{batch: {{}}}}}}\n",
            "slope/4 and slope/3 are both approved for batch",
        ),
    ],
)
def test_a_file_that_is_none_is_told_with_its_line(text, told, capsys):
    """What is wrong, where, and in one line: for jobs, and for those who approve."""
    Path("models.yaml").write_text(text)
    with pytest.raises(BadModel, match=told) as e:
        scored(skops_model("registry:slope@batch"))
    assert "\n" not in str(e.value)
    approve("slope", "5", "--for", "batch", "--path", named(3), code=2)
    assert Path("models.yaml").read_text() == text


def test_a_name_of_files_is_none_at_an_endpoint():
    """A model behind an address is no file: the name is refused before anything is asked."""
    approve("slope", "3", "--for", "batch", "--path", named(3))
    with pytest.raises(BadModel, match="one at an endpoint"):
        gm.embed(["a"], model="registry:slope@batch", base_url="http://localhost:1/v1", workers=0)


def test_approving_twice_and_together_loses_nothing():
    """The same again changes nothing; many at once are all in the file in the end."""
    approve("slope", "3", "--for", "batch", "--path", named(3))
    before = Path("models.yaml").read_text()
    approve("slope", "3", "--for", "batch")
    assert Path("models.yaml").read_text() == before
    stages = [f"stage-{n}" for n in range(8)]

    def one(stage):
        modelsfile.approve("slope", "4", stage, by="b", at="now", path=named(4))

    threads = [threading.Thread(target=one, args=(stage,)) for stage in stages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {v.version: set(v.approved) for v in modelsfile.read("models.yaml").versions}
    assert found == {"3": {"batch"}, "4": set(stages)}


def test_a_file_that_cannot_be_written_is_told(capsys):
    """A folder in its place, and a folder that is not there: exit 2, one line."""
    for file in ("models", "nowhere/models.yaml"):
        approve("slope", "3", "--for", "batch", "--path", named(3), "--file", file, code=2)
        assert f"{file}: cannot be written" in capsys.readouterr().err


COMMENTED = """\
# Ask Anna before you change this.
slope:
  "3":            # the first one
    path: models/slope-3.skops
  "4":
    path: models/slope-4.skops   # trained in May
other: {'1': {path: x}}
"""


def test_comments_outlive_an_approval(monkeypatch, capsys):
    """What people wrote beside the entries stays; without the package that keeps it, nothing is written."""
    Path("models.yaml").write_text(COMMENTED)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "ruamel.yaml", None)
        approve("slope", "4", "--for", "batch", code=2)
        assert "gristmill[registry]" in capsys.readouterr().err
        assert Path("models.yaml").read_text() == COMMENTED
    pytest.importorskip("ruamel.yaml")
    approve("slope", "4", "--for", "batch")
    approve("slope", "3", "--for", "batch")
    text = Path("models.yaml").read_text()
    for comment in ("# Ask Anna before you change this.", "# the first one", "# trained in May"):
        assert comment in text
    found = {v.label: list(v.approved) for v in modelsfile.read("models.yaml").versions}
    assert found == {"slope/3": ["batch"], "slope/4": [], "other/1": []}


def test_a_path_that_moves_is_warned_of():
    """A link, and a name that says `latest`: the warning names the way out; none of them if the digest is pinned."""
    shutil.copy(named(3), "models/slope-latest.skops")
    os.symlink("slope-4.skops", "models/mine.skops")
    for path, why in (("models/slope-latest.skops", "its path says"), ("models/mine.skops", "is a link to slope-4")):
        with pytest.warns(
            GristmillWarning, match=rf"{path}: .*{why}.*gristmill approve NAME VERSION --for batch"
        ) as told:
            scored(skops_model(path), Path(path).stem)
        assert [one.filename for one in told] == [__file__]  # the line that asked for it
    pinned = gm.SklearnModel("models/mine.skops", features=("x",), sha256=file_digest(Path(named(4))))
    for model in (pinned, skops_model(named(3)), skops_model("models/missing-latest.skops")):
        assert registrations.moving(model) == ()


def test_files_that_change_after_planning_are_not_scored_with(monkeypatch):
    """Each worker compares what it loads: an approved file that is replaced once the run is planned stops it."""
    approve("slope", "3", "--for", "batch", "--path", named(3))
    from gristmill.driver import shipping

    recipe = shipping.recipe

    def late(*arguments):
        made = recipe(*arguments)
        shutil.copy(named(4), named(3))
        return made

    monkeypatch.setattr("gristmill.driver.shipping.recipe", late)
    with pytest.raises(PlanChanged):
        scored(skops_model("registry:slope@batch"))


def test_models_are_listed_as_json(capsys):
    """`gristmill models --json`: a line a version, with approvals and whether the files are as recorded."""
    Path("models.yaml").write_text(COMMENTED.replace("# ", "").replace("Ask Anna before you change this.\n", ""))
    assert main(["models", "--file", "models.yaml", "--json"]) == 2  # the text is no registry any more
    Path("models.yaml").unlink()
    approve("slope", "3", "--for", "batch", "--path", named(3), "--by", "anna")
    capsys.readouterr()
    assert main(["models", "--json"]) == 0
    (line,) = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert line["approved"]["batch"]["by"] == "anna" and line["files"] == "as recorded"


# ---------------------------------------------------------------- MLflow


@pytest.fixture
def tracked(here, monkeypatch):
    """A registry of MLflow in files, with both versions: the first has the alias `batch`, and no approval."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    if not hasattr(mlflow.MlflowClient, "get_model_version_by_alias"):
        pytest.skip("this MLflow has no aliases")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (here / "mlruns").as_uri())
    mlflow.set_tracking_uri((here / "mlruns").as_uri())
    client = mlflow.MlflowClient()
    client.create_registered_model("slope")
    for slope in (3, 4):
        folder = here / f"logged-{slope}"
        folder.mkdir()
        shutil.copy(named(slope), folder / "model.skops")
        (folder / "MLmodel").write_text("flavors: {}\n")
        client.create_model_version("slope", folder.as_uri())
    client.set_registered_model_alias("slope", "batch", "1")
    return client


def test_mlflow_names_are_those_of_approved_versions(tracked, here):
    """An alias alone is no approval: the version's tag is; `gristmill approve models:/…` sets both, and the digest."""
    with pytest.raises(BadModel, match="is not approved; gristmill approve models:/slope 1 --for batch"):
        scored(skops_model("models:/slope@batch"))
    approve("models:/slope", "2", "--for", "batch", "--by", "anna")
    report, values = scored(skops_model("models:/slope@batch"))
    assert values == [4.0, 8.0, 12.0]
    told = report.details["registered"]
    assert (told["name"], told["version"], told["approved_by"]) == ("slope", "2", "anna")
    tags = tracked.get_model_version("slope", "2").tags
    assert tags["approved_for"] == "batch" and len(tags["sha256"]) == 64
    assert scored(skops_model("models:/slope/1#model.skops"), "first")[1] == [3.0, 6.0, 9.0]
    shutil.copy(named(3), here / "logged-4" / "model.skops")
    with pytest.raises(BadModel, match="was recorded with sha256"):
        scored(skops_model("models:/slope@batch"), "other")


def test_mlflow_names_that_are_unknown_are_told(tracked):
    """The nearest model and alias, and the versions that there are."""
    for name, told in (
        ("models:/slop@batch", "did you mean 'slope'"),
        ("models:/slope@bach", "did you mean 'batch'"),
        ("models:/slope/7", "its versions are 1, 2"),
        ("models:/slope/1#modl.skops", "did you mean 'model.skops'"),
    ):
        with pytest.raises(BadModel, match=told):
            scored(skops_model(name))


def test_mlflow_is_asked_for_where_it_is_used(here):
    """Without the package a name of MLflow says how to install it, and nothing else imports it."""
    script = (
        "import sys; sys.modules['mlflow'] = None\n"
        "import gristmill as gm\n"
        "try: gm.embed(['a'], model='models:/a@b', workers=0)\n"
        "except Exception as e: print(type(e).__name__, e)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pip install 'gristmill[mlflow]'" in done.stdout


def test_an_mlflow_that_is_not_there_is_not_a_wrong_model(monkeypatch):
    """Its server may answer later: exit 1, so that a night is tried again; with the words and the way out."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    mlflow.set_tracking_uri("http://127.0.0.1:9")  # what another test has set counts more than the variable
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(gm.RunFailed, match=r"MLflow: API request .* check MLFLOW_TRACKING_URI, or run again") as told:
        scored(skops_model("models:/slope@batch"))
    assert told.value.exit_code == 1
