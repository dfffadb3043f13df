"""A run does not read its own answers, whatever leads from the source to the sink."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import gristmill as gm
from gristmill.driver.apart import Apart
from gristmill.sinks.formats import sink_format

FOUND = "is found in the source as "


def number(batch: dict[str, Any]) -> dict[str, Any]:
    """One more."""
    return {"n": batch["k"] + 1}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two rows, beside which sinks are made."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"k": k}) + "\n" for k in (1, 2)))
    return folder


def job(source: str, sink: str, **options: Any) -> gm.Job:
    """Rows of the same columns as the source's, so that nothing else refuses them."""
    form = {} if sink.endswith(".jsonl") else {"format": "jsonl"}
    return gm.Job(gm.source(source), number, gm.sink(sink, keep=["k"], **form, **options), workers=0)


@pytest.mark.parametrize(
    ("link", "to", "source", "sink"),
    [
        ("latest", "../out", "data", "out"),
        ("latest", "../out", "data/**/*.jsonl", "out"),
        ("latest", "../out", "data/*/*.jsonl", "out"),
        ("latest", "../out", "data/*", "out"),
        ("2026", "..", "data/20*/out/*", "out"),
        ("results", "../results", "data", "results/scored.jsonl"),
        ("results", "../results", "data/*", "results/deep/er"),
        ("latest.jsonl", "../scored.jsonl", "data", "scored.jsonl"),
        ("latest.jsonl", "../scored.jsonl", "data/*.jsonl", "scored.jsonl"),
        ("parts", "../.scored.jsonl.gristmill", "data", "scored.jsonl"),
        ("dead", "../out/_dead", "data", "out"),
        ("deep/latest", "../../out", "data", "out"),
    ],
)
@pytest.mark.parametrize("there", [True, False])
def test_a_link_in_the_source_that_leads_to_the_sink_is_refused(
    data: Path, link: str, to: str, source: str, sink: str, there: bool
) -> None:
    """The first night, whether the sink is there or not: each later one would score its own answers again."""
    path = data / link
    path.parent.mkdir(exist_ok=True)
    if there and not sink.endswith(".jsonl"):
        Path(sink).mkdir(parents=True)
    elif there:
        Path(sink).parent.mkdir(exist_ok=True)
    os.symlink(to, path)
    with pytest.raises(gm.BadJob, match=f"{FOUND}{path}, a link to"):
        job(source, sink).run()


def test_a_link_made_after_the_first_night_is_refused(data: Path) -> None:
    """The sink has a result by then, which stays as it is; without the link the next night goes on."""
    assert job("data", "out").run().rows_ok == 2
    os.symlink("../out", data / "latest")
    (data / "b.jsonl").write_text('{"k": 3}\n')
    with pytest.raises(gm.BadJob, match=FOUND):
        job("data", "out").run(append=True)
    (data / "latest").unlink()
    job("data", "out").run(append=True)
    assert sorted(gm.read("out").to_table()["k"].to_pylist()) == [1, 2, 3]


@pytest.mark.parametrize(
    ("link", "to", "source", "sink"),
    [
        ("_latest", "../out", "data", "out"),
        (".latest", "../out", "data/**/*.jsonl", "out"),
        ("latest", "../out", "data/*.jsonl", "out"),
        ("latest", "../other", "data", "out"),
        ("above", "../data", "data", "data/_out"),
    ],
)
def test_a_link_that_is_not_read_or_leads_elsewhere_is_no_matter(
    data: Path, link: str, to: str, source: str, sink: str
) -> None:
    """Hidden, not matched, to another folder, or above a sink whose own name hides it."""
    for folder in ("out", "other"):
        (data.parent / folder).mkdir()
    (data.parent / "other" / "b.jsonl").write_text('{"k": 3}\n')
    os.symlink(to, data / link)
    rows = 3 if "other" in to else 2
    assert job(source, sink).run().rows_ok == rows
    assert job(source, sink).run(append=True).state == "nothing to do"


def test_a_folder_under_a_second_name_is_known_by_what_identifies_it(data: Path) -> None:
    """As a bind mount is: no link, and its real path is its own."""
    (data.parent / "results" / "out").mkdir(parents=True)
    for name, to in (("latest", "results/out"), ("above", "results")):
        os.symlink(f"../{to}", data / name)  # whose `stat` is that of where it leads
    apart = Apart(gm.source("data"), gm.sink("results/out"), sink_format("parquet"))
    for name in ("latest", "above"):
        with pytest.raises(gm.BadJob, match=f"{data / name}, a folder that is also "):
            apart.met(str(data / name), link=False)
    apart.met(str(data), link=False)
