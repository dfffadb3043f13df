"""Source and sink the wrong way round: told as that, as the other way out would overwrite a source."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    """A function of the rows."""
    return {"y": batch["x"] * 2}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file and a folder with rows, and a result, which its records tell from other folders."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"x": [1, 2]}), "in.parquet")
    pq.write_table(pa.table({"x": [1, 2]}), "data/in.parquet")
    gm.apply("in.parquet", "out/", fn=doubled, workers=0)
    gm.apply("in.parquet", "one.parquet", fn=doubled, workers=0)
    return tmp_path


SWAPPED = [
    ("new/", "data/", "source new/ is not there, and sink data/ has files of others in it: are they swapped?"),
    ("new/", "in.parquet", "source new/ is not there, and sink in.parquet is a file that is there"),
    ("out/", "data", "source out/ is a result of gristmill, and sink data has"),
    ("one.parquet", "data", "source one.parquet is a result of gristmill, and sink data has"),
    (["new/", "out"], "data/*.parquet", "not there and source out is a result of gristmill, and sink .* matches files"),
]


@pytest.mark.parametrize("verb", ["run", "preview", "plan"])
@pytest.mark.parametrize(("source", "sink", "told"), SWAPPED)
def test_the_wrong_way_round(source: Any, sink: str, told: str, verb: str, folder: Path) -> None:
    """Both are named, whatever is asked for; nothing is written."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(gm.BadJob, match=told):
        getattr(gm.Job(source, doubled, sink, workers=0), verb)()
    assert sorted(folder.rglob("*")) == before


def test_what_is_no_swap(folder: Path) -> None:
    """A source that is no sink, over files of others, or a sink that somebody has changed, is told as before."""
    with pytest.raises(gm.BadJob, match="holds 1 files that gristmill did not write") as told:
        gm.apply("in.parquet", "data/", fn=doubled)
    assert "swapped" not in str(told.value)
    shutil.copy("in.parquet", "one.parquet")
    with pytest.raises(gm.BadJob, match="was changed since") as told:
        gm.apply("gone.parquet", "one.parquet", fn=doubled)
    assert "swapped" not in str(told.value)
    with pytest.raises(gm.BadSource, match="no such file or folder"):
        gm.apply("gone.parquet", "out/", fn=doubled)
    assert gm.apply("out/", "second/", fn=lambda batch: batch, workers=0).rows_ok == 2


@pytest.mark.parametrize("verb", ["preview", "plan"])
def test_looking_refuses_what_a_run_refuses(verb: str, folder: Path) -> None:
    """A sink with files of others is no place to write to, and neither to look forward to."""
    with pytest.raises(gm.BadJob, match="did not write"):
        getattr(gm.Job("in.parquet", doubled, "data/", workers=0), verb)()
    assert getattr(gm.Job("in.parquet", doubled, gm.sink("data/", overwrite=True), workers=0), verb)()


@pytest.mark.parametrize("sink", ["scores[2]/", "what?/", "one[2].parquet"])
def test_a_name_that_is_a_pattern_too(sink: str, folder: Path) -> None:
    """A chain writes there each night, whatever else comes to be there that it matches."""
    gm.apply("in.parquet", "first/", fn=doubled, workers=0)
    gm.apply("first/", sink, fn=lambda batch: batch, workers=0)
    for other in ("scores2", "whats"):
        Path(other).mkdir()
    Path("one2.parquet").write_bytes(b"")
    assert gm.apply("first/", sink, fn=lambda batch: batch, workers=0).state == "nothing to do"
