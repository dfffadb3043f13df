"""Kinds that another package registers: jobs on all of them, as docs/extending.md says."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gristmill as gm
from gristmill.cli.app import main
from gristmill.errors import BadJob
from gristmill.job.delivery import STORES
from gristmill.job.options import ENGINES
from gristmill.job.registry import Registry
from gristmill.job.snapshots import SNAPSHOTS
from gristmill.job.specs import MODELS
from gristmill.sinks.formats import SINKS
from gristmill.sources.formats import SOURCES

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
POINTS = re.sub(r"\[project\.entry-points\.\"(.+)\"\]", r"[\1]", BLOCKS[0][1].partition("\n\n")[2])

REGISTRIES: tuple[Registry[Any], ...] = (SOURCES, SINKS, ENGINES, MODELS, STORES, SNAPSHOTS)
Run = Callable[..., subprocess.CompletedProcess[str]]
Cli = Callable[..., str]


def install(folder: Path, version: str = "1.0", points: str = POINTS, package: str = "toy_kinds") -> Path:
    """The toy package in a folder, as pip would leave it there."""
    shutil.copytree(HERE / "toykinds", folder / "toykinds", dirs_exist_ok=True)
    for old in folder.glob(f"{package}-*.dist-info"):
        shutil.rmtree(old)
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    name = package.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(points.replace('"', ""))
    (info / "top_level.txt").write_text("toykinds\n")
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs Python with the toy package installed, in a folder that has its lines; stdin, if any, is a script."""
    monkeypatch.chdir(tmp_path)
    site = install(tmp_path / "site")
    Path("lines").mkdir()
    Path("lines/a.num").write_bytes(b" one \ntwo\n\xff\nfour\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}

    def ran(*arguments: str, code: int = 0, script: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *(arguments or ("-",))]
        done = subprocess.run(command, input=script, capture_output=True, text=True, env=env, timeout=240)
        assert done.returncode == code, done.stderr
        return done

    return ran


@pytest.fixture
def cli(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Commands in this process, which has the toy package, too, until the test is over."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])

    def forget() -> None:
        for registry in REGISTRIES:
            others = [name for name in registry._loaded if name not in registry.ours]
            for name in others:
                del registry._loaded[name]
            vars(registry).pop("registered", None)
        for name in [name for name in sys.modules if name.partition(".")[0] == "toykinds"]:
            del sys.modules[name]

    def ran(*arguments: str, code: int = 0) -> str:
        forget()
        found = main(list(arguments))
        told = capsys.readouterr()
        assert found == code, told.err
        return told.out if code == 0 else told.err

    yield ran
    forget()


def test_the_page_shows_the_package_that_is_tested() -> None:
    """Each module of the toy package stands on the page as it is."""
    shown = {name: text for kind, text in BLOCKS for name in re.findall(r"\A# (toykinds/\w+\.py)\n", text)}
    assert len(shown) == 6
    for name, text in shown.items():
        assert text.partition("\n")[2] == (HERE / name).read_text(encoding="utf-8"), name


def test_each_of_ours_is_held_against_its_contract() -> None:
    """What mypy checks (tests/typing/contracts.py) is all that the registries name."""
    spec = importlib.util.spec_from_file_location("contracts", HERE.parent / "typing" / "contracts.py")
    assert spec is not None and spec.loader is not None
    held = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(held)
    for registry in REGISTRIES:
        named = {registry.get(name) for name in registry.ours}
        lists = (held.SOURCES, held.SINKS, held.ENGINES, held.MODELS, held.STORES, held.SNAPSHOTS)
        assert named in [set(listed) for listed in lists]
    assert {kind.home for kind in held.MODELS} == {module.__name__ for module in held.KINDS}


@pytest.mark.long
def test_a_job_from_python(run: Run) -> None:
    """Scored by workers of their own; done again it is nothing to do, new files are appended, and all is verified."""
    script = (
        BLOCKS[2][1]
        + """
import json, os
gates = gm.Gates(min_ok=0)
job = gm.Job(**{**{n: getattr(job.spec, n) for n in ("source", "model", "sink")}, "engine": "duo", "gates": gates})
told = [job.run().state, job.run().state]
with open("lines/b.num", "w") as file:
    file.write("five")
told.append(job.run(append=True).state)
report = job.run()
rows = report.read().to_table().sort_by("shouted").to_pylist()
dead = report.dead().to_pylist()
print(json.dumps([told, rows, [(d["error"], d["position"]) for d in dead], gm.verify("out").ok, report.engine]))
print(sorted(os.listdir("out")))
"""
    )
    told = run(script=script).stdout.splitlines()
    states, rows, dead, ok, engine = json.loads(told[0])
    assert (states, ok, engine) == (["done", "nothing to do", "done"], True, "duo")
    assert [(row["number"], row["shouted"]) for row in rows] == [
        (1, "FIVE!!"),
        (4, "FOUR!!"),
        (1, "ONE!!"),
        (2, "TWO!!"),
    ]
    assert dead == [["UnicodeDecodeError", 2]]
    assert "part-0000000.g1.feather" in told[1]


def test_a_job_file(cli: Cli, tmp_path: Path) -> None:
    """The page's job file runs from the command line with `--set`, resumes, verifies, merges and is written again."""
    Path("lines/a.num").write_text("one\ntwo\n")
    Path("job.yaml").write_text(BLOCKS[1][1])
    options = ("--set", "model.volume=3", "--set", "engine.most=1")
    cli("run", "job.yaml", *options)
    assert "nothing to do" in cli("run", "job.yaml", *options)
    assert json.loads(cli("verify", "out", "--json"))["ok"]
    assert "model.volume was 3, is 2" in cli("run", "job.yaml", code=4)
    saved = (tmp_path / "out/_gristmill/job.yaml").read_text()
    assert "shout: line" in saved and "volume: 3" in saved and "name: duo" in saved and "most: 1" in saved
    cli("run", "job.yaml", *options, "--set", "sink.uri=one", "--set", "sink.merge=true")
    assert gm.read("one").to_table()["shouted"].to_pylist() == ["ONE!!!", "TWO!!!"]
    model = json.loads(cli("schema"))["$defs"]["Model_shout"]["properties"]
    assert (
        set(model) == {"shout", "volume", "output"} and model["volume"]["description"] == "How many exclamation marks"
    )


def test_a_job_typed_as_a_command(cli: Cli, tmp_path: Path) -> None:
    """Formats and the engine by name, with a function of the user's own."""
    (tmp_path / "toy_score.py").write_text(
        "def score(batch):\n    return {'length': [len(t) for t in batch['line']]}\n"
    )
    Path("data.txt").write_text("one\nthree\n")
    formats = ("--source-format", "numbered", "--format", "feather", "--engine", "duo")
    cli("apply", "data.txt", "out", *formats, "--fn", "toy_score:score")
    assert gm.read("out").to_table()["length"].to_pylist() == [3, 5]
    assert json.loads(cli("verify", "out", "--json"))["ok"]


@pytest.mark.long
def test_a_store(cli: Cli, tmp_path: Path) -> None:
    """Of the package, by its scheme: delivered to, replaced, looked up, verified; what it does not hold is refused."""
    (tmp_path / "toy_score.py").write_text(
        "def score(batch):\n    return {'length': [len(t) for t in batch['line']]}\n"
        "def half(batch):\n    return {'length': [len(t) / 2 for t in batch['line']]}\n"
    )
    Path("data.txt").write_text("one\nthree\n")
    typed = ("apply", "data.txt", "out", "--source-format", "numbered", "--keep", "number")
    store = ("--deliver", "shelf://scores.json?key=number")
    told = cli(*typed, "--fn", "toy_score:half", *store, code=2)
    assert "column 'length' is double: only texts and whole numbers fit" in told
    cli(*typed, "--fn", "toy_score:score", *store)
    assert json.loads(cli("lookup", "shelf://scores.json", "[2]")) == {"number": 2, "length": 5}
    assert "2 rows of generation 2, as delivered" in cli("verify", "out")
    Path("data.txt").write_text("seven..\n")
    cli(*typed, "--fn", "toy_score:score", *store, "--restart")
    assert json.loads(cli("lookup", "shelf://scores.json", "[1]"))["length"] == 7
    assert sorted(p.name for p in Path().glob("*scores.json*")) == ["scores.json"]
    Path("toy_again.py").write_text("def again(batch):\n    return {'twice': [n * 2 for n in batch['length']]}\n")
    cli("apply", "shelf://scores.json", "again", "--fn", "toy_again:again", "--keep", "number")
    assert gm.read("again").to_table().to_pylist() == [{"number": 1, "twice": 14}]
    assert "there is no file" in cli("apply", "shelf://none.json", "none", "--fn", "toy_again:again", code=2)
    assert "mode is 'append': it must be one of replace" in cli("deliver", "out", "shelf://x?mode=append", code=2)


@pytest.mark.long
def test_another_version_is_another_job(run: Run, cli: Cli, tmp_path: Path) -> None:
    """What the package answers may have changed with it: the version counts, and so does its code."""
    Path("lines/a.num").write_text("one\n")
    Path("job.yaml").write_text(BLOCKS[1][1])
    cli("run", "job.yaml")
    install(tmp_path / "site", "1.1")
    assert "code: version of toy-kinds was 1.0, is 1.1" in cli("run", "job.yaml", code=4)
    install(tmp_path / "site", "1.0")
    model = tmp_path / "site/toykinds/model.py"
    model.write_text(model.read_text().replace('"!" *', '"?" *'))
    assert "toykinds.model" in run("-m", "gristmill", "run", "job.yaml", code=4).stderr


WRONG = [
    (
        {"model": {"shoot": "line"}},
        "embed, classify, onnx, torchscript, sklearn, prompt, score, requests, call, shout: did you mean",
    ),
    ({"model": {"shout": "line", "volum": 2}}, "model has no key 'volum': did you mean 'volume'?"),
    ({"model": {"shout": "line", "volume": "loud"}}, "model.volume: 'loud' does not fit: give a whole number"),
    ({"model": {"shout": "text"}}, "shout text: there is no column 'text': the source has number, line"),
    ({"source": {"uri": "lines/*.num", "format": "numbred"}}, "binary, kafka, numbered; did you mean 'numbered'?"),
    ({"source": {"uri": "lines/*.num", "options": {"skip": 1}}}, "numbered source has no option 'skip'"),
    ({"source": "lines/a.nom"}, "did you mean .num?"),
    (
        {"sink": {"uri": "o", "format": "fether"}},
        "sink format 'fether': it must be one of parquet, jsonl, npy, openai-batch, feather; did",
    ),
    ({"engine": "dou"}, "engine 'dou': it must be one of local, ray, spark, duo; did you mean 'duo'?"),
    ({"engine": {"name": "duo", "mots": 1}}, "engine has no key 'mots': did you mean 'most'?"),
    ({"engine": {"name": "duo", "most": 0}}, "engine option most is 0: give at least 1"),
]


def test_wrong_names_are_told_with_the_right_ones(run: Run) -> None:
    """What other packages register is listed and suggested, and its options are checked, before anything runs."""
    Path("lines/a.nom").write_text("one\n")
    job = {"source": "lines/*.num", "model": {"shout": "line"}, "sink": "out"}
    for n, (change, _) in enumerate(WRONG):
        Path(f"{n}.yaml").write_text(json.dumps({**job, **change}))
    script = """
import sys, gristmill as gm
for n in range(int(sys.argv[1])):
    try:
        gm.load_job(f"{n}.yaml").run()
    except gm.BadJob as e:
        print(e)
    else:
        print("it ran")
"""
    Path("wrong.py").write_text(script)
    told = run("wrong.py", str(len(WRONG))).stdout
    for _, wanted in WRONG:
        assert wanted in told, told


def test_a_spec_that_nobody_registers(run: Run, tmp_path: Path) -> None:
    """Of a package that is on the path and not installed the error says what is missing."""
    install(tmp_path / "site", points="")
    script = "import gristmill as gm\nfrom toykinds.model import Shout\ngm.Job('lines', Shout('line'))"
    assert "toykinds.model.Shout is not a registered model kind" in run(script=script, code=1).stderr


def test_nobody_takes_a_name_of_ours(cli: Cli, tmp_path: Path) -> None:
    """The package that tries is named as soon as others' formats are looked for; jobs with ours alone go on."""
    install(tmp_path / "site", points='[gristmill.sinks]\nparquet = "toykinds.sink:Feather"\n')
    Path("rows.jsonl").write_text('{"x": 1}\n')
    Path("toy_one.py").write_text("def one(batch):\n    return {'y': batch['x']}\n")
    cli("apply", "rows.jsonl", "out", "--fn", "toy_one:one")
    wrong = cli("apply", "rows.jsonl", "new", "--fn", "toy_one:one", "--format", "feather", code=2)
    assert "package toy-kinds 1.0 registers sink format 'parquet', which is gristmill's own" in wrong


def test_packages_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be imported, one that lacks what is asked of it, one under another name, two of one name."""

    def point(name: str, value: str, package: str) -> importlib.metadata.EntryPoint:
        made = importlib.metadata.EntryPoint(name, value, "group")
        vars(made)["dist"] = SimpleNamespace(name=package, version="1")
        return made

    there = [point("gone", "nowhere:It", "a"), point("bare", "json:dumps", "b"), point("other", "csv:Dialect", "c")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: there)
    registry: Registry[Any] = Registry("format", "group", {"ours": "json:loads"}, needs=("name", "read"))
    assert registry.get("ours") is json.loads
    with pytest.raises(BadJob, match=r"format 'gone' of package a 1 \(nowhere:It\) cannot be imported: ModuleNotFound"):
        registry.get("gone")
    with pytest.raises(BadJob, match=r"format 'bare' of package b 1 .* has no name, read"):
        registry.get("bare")
    there.append(point("gone", "elsewhere:It", "d"))
    registry = Registry("format", "group", {}, needs=())
    with pytest.raises(BadJob, match="package d 1 registers format 'gone', which is also registered by package a 1"):
        registry.get("anything")


def test_who_needs_none_does_not_look(run: Run) -> None:
    """Neither the import nor a job on kinds of ours asks for entry points."""
    Path("rows.jsonl").write_text('{"x": 1}\n')
    script = """
import importlib.metadata as metadata
asked, before = [], metadata.entry_points
def entry_points(**given):
    asked.append(given)
    return before(**given)
metadata.entry_points = entry_points
import gristmill as gm
report = gm.apply("rows.jsonl", "out", fn=lambda b: {"y": b["x"]})
report = gm.Job("rows.jsonl", lambda b: {"y": b["x"]}, gm.sink("o", format="jsonl"), workers=1).run()
report.read(), gm.verify("o"), str(report)
print([a for a in asked if str(a.get("group")).startswith("gristmill")])
"""
    assert run(script=script).stdout.splitlines()[-1] == "[]"
