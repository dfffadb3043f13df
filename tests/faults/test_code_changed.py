"""A user's module that changes while a run goes on: no worker computes with another one than was planned."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.models import pins
from gristmill.models.code import digests
from gristmill.plan.specs import Call

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
    with pytest.raises(gm.BadJob, match="start again"):
        gm.Job(str(tmp_path / "in.parquet"), gm.model("acme_rates.score:score"), str(tmp_path / "out")).run()
    assert installed(code).run().state == "nothing to do"
