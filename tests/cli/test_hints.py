"""Ways out that errors name, as the command that failed takes them."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.cli.app import main
from gristmill.cli.flags import ways
from gristmill.cli.job import run
from gristmill.cli.sink import retry_dead
from gristmill.errors import nearest


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """A result in the folder that commands are started in."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"id": [1, 2]}), "rows.parquet")
    gm.apply("rows.parquet", "out", fn=lambda batch: {"y": batch["id"]}, keep=["id"], workers=0)
    capsys.readouterr()
    return "out"


def test_the_flag_of_a_delivery(out: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`deliver` has a --key of its own; it is no option of the sink there."""
    assert main(["deliver", out, "sqlite://s.sqlite#t", "--mode", "upsert"]) == 2
    said = capsys.readouterr().err
    assert "(for this command: key= is --key)" in said, said
    assert main(["deliver", out, "sqlite://s.sqlite#t", "--mode", "upsert", "--key", "id"]) == 0
    assert main(["deliver", out, "sqlite://s.sqlite#t", "--set", "sink.key=id"]) == 2
    assert "--set only applies to a job" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("nope", None),
        ("en", None),
        ("ley", "key"),
        ("nn", "n"),
        ("langg", "lang"),
        ("Lnag", "lang"),
        ("kye", "key"),
        ("dist", None),
    ],
)
def test_only_a_near_name_is_suggested(name: str, near: str | None) -> None:
    """A typing error, not another word that shares some letters."""
    assert nearest(name, ["np", "n", "lang", "key", "distance"]) == near


def test_the_last_of_several_sources_is_misspelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is near it is named, as for any other."""
    monkeypatch.chdir(tmp_path)
    for name in ("january.parquet", "february.parquet"):
        pq.write_table(pa.table({"id": [1, 2]}), name)
    for names in (["january.parquet", "febuary.parquet"], ["febuary.parquet", "january.parquet"]):
        assert main(["apply", *names, "out", "--fn", "code.py:f"]) == 2
        said = capsys.readouterr().err
        assert "febuary.parquet: no such file or folder; " in said and "has 'february.parquet'" in said, said


def test_one_of_several_names_was_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value too many of --keep is taken for the sink, and the sink for a source: that is told with a few columns."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({f"c{n}": [1, 2] for n in range(8)}), "rows.parquet")
    pq.write_table(pa.table({"y": [1, 2]}), "out.parquet")
    Path("scores.py").write_text("def f(batch):\n    return {'y': batch['c0']}\n")
    assert main(["apply", "rows.parquet", "out.parquet", "--fn", "scores.py:f", "--keep", "c1", "c2"]) == 2
    said = capsys.readouterr().err
    assert said.count("is missing in") == 3 and "and 6 more columns" in said, said
    assert "all but the last are sources, and the last, c2, is the sink" in said and "(--keep a,b)" in said, said


@pytest.mark.parametrize(
    ("names", "what"), [(["rows.parquet", ""], "sink"), (["", "out"], "source"), ([" "] * 2, "source")]
)
def test_an_empty_name(
    names: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variable that is not set is no name of the current folder; of a sink that is read, neither."""
    monkeypatch.chdir(tmp_path)
    assert main(["apply", *names, "--fn", "code.py:f"]) == 2
    assert f"the {what} is '" in (said := capsys.readouterr().err) and "a variable that is not set" in said
    assert main(["status", ""]) == 2
    assert "the sink is ''" in capsys.readouterr().err
    with pytest.raises(gm.BadJob, match="the sink is ''"):
        gm.read("")
    assert not os.listdir()


def test_several_types_in_one_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flag is repeated; commas are for names."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"text": ["a"]}), "rows.parquet")
    flags = ["--prompt", "{{ text }}", "--model", "m", "--returns", "film=string,n=int64"]
    assert main(["prompt", "rows.parquet", "out", *flags]) == 2
    assert "'string,n=int64': no such type; each NAME=TYPE is an option of its own: repeat the flag" in (
        capsys.readouterr().err
    )


def test_a_prompt_that_is_the_name_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the @ all rows would be asked its name."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"text": ["a"]}), "rows.parquet")
    Path("short.txt").write_text("In five words: {{ text }}")
    flags = ["--model", "m", "--base-url", "http://127.0.0.1:9/v1"]
    assert main(["prompt", "rows.parquet", "out", "--prompt", "short.txt", *flags]) == 2
    assert "prompt 'short.txt' names no column, and a file has that name: write @short.txt" in capsys.readouterr().err


def test_a_way_out_beside_its_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a message says both as a flag and in Python is told once, if the command has the flag."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"id": [1, 2], "x": [1.0, None]}), "rows.parquet")
    Path("rated.py").write_text("def f(batch):\n    return {'y': batch['x']}\n")
    Path("job.yaml").write_text(
        "source: rows.parquet\nmodel: {call: 'rated.py:f', takes: {x: float64 not null}}\nsink: out\n"
        "gates: {min_ok: 1}\n"
    )
    assert main(["run", "job.yaml"]) == 3
    told = capsys.readouterr().err
    assert "(--min-ok 0.5, gates={'min_ok': 0.5})" in told and "for this command" not in told, told
    typed = "column 'x' is int64 (types={'x': 'string'}, --set source.types.x=string, reads any)"
    assert ways(typed, run.params) == ""
    without = "\n(for this command: gates= is --set gates.min_ok=…)"
    assert ways("lower the gate (--min-ok 0.5, gates={'min_ok': 0.5})", retry_dead.params) == without


def test_what_a_delivery_shows_of_itself(
    out: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a run: GRISTMILL_PROGRESS silences it, and a word that is none of its values is refused."""
    monkeypatch.setenv("GRISTMILL_PROGRESS", "quiet")
    assert main(["deliver", out, "sqlite://s.sqlite#t"]) == 2
    assert "'quiet' is not one of" in capsys.readouterr().err and not Path("s.sqlite").exists()
    monkeypatch.setenv("GRISTMILL_PROGRESS", "off")
    assert main(["deliver", out, "sqlite://s.sqlite#t"]) == 0
    assert capsys.readouterr().err == ""


def test_a_type_that_was_written_as_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NAME:TYPE is no module; how it is written is told with its own words."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"text": ["a"]}), "rows.parquet")
    flags = ["--prompt", "{{ text }}", "--model", "m", "--base-url", "http://127.0.0.1:9/v1", "--returns"]
    assert main(["prompt", "rows.parquet", "out", *flags, "stars:int64"]) == 2
    assert capsys.readouterr().err.strip().endswith("or check the name, or give NAME=TYPE, as in stars=int64")
    assert main(["prompt", "rows.parquet", "out", *flags, "stars:Review"]) == 2
    assert capsys.readouterr().err.strip().endswith("or check the name")


def test_a_sink_named_as_a_numpy_file() -> None:
    """It would be a folder of Parquet files."""
    with pytest.raises(gm.BadJob, match=r"sink vec/ with --format npy"):
        gm.sink("vec.npy")
    assert gm.sink("vec.npy", format="npy").format == "npy"


def test_the_option_of_a_delivery_in_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`run` and `apply` have a --key and an --evolve, too, which are not the delivery's."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"id": [1, 2]}), "rows.parquet")
    Path("code.py").write_text("def f(batch):\n    return {'y': batch['id']}\n")
    job = "source: rows.parquet\nmodel: {call: 'code.py:f'}\nsink: {uri: out, keep: [id]}\n"
    Path("job.yaml").write_text(job + "deliver: [{to: 'sqlite://s.sqlite#t', mode: upsert}]\n")
    assert main(["run", "job.yaml"]) == 2
    said = capsys.readouterr().err
    assert "key= is of the delivery: {to: …, key: …} in a job file, or ?key=… in its address" in said, said
    assert "--key" not in said
    assert main(["apply", "rows.parquet", "out", "--fn", "code.py:f", "--deliver", "lmdb://s.lmdb"]) == 2
    assert "or ?key=… in its address" in capsys.readouterr().err


def test_what_the_help_looks_up_is_what_the_help_delivers() -> None:
    """By the key of the delivery: each store of lookup's examples is one of deliver's, with a --key."""
    from gristmill.cli.deliver import DELIVER, LOOKUP

    def stores(examples: str) -> dict[str, str]:
        lines = [line.split() for line in examples.splitlines() if line.startswith("gristmill")]
        return {word: " ".join(line) for line in lines for word in line if "://" in word}

    delivered = stores(DELIVER)
    looked = stores(LOOKUP)
    assert looked and all("--key" in delivered[store] for store in looked), looked


def test_the_help_of_plan_says_what_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    """A model of the kinds that are loaded to be described is named; of others none is loaded."""
    from gristmill.job.specs import MODELS
    from gristmill.models.kinds import loads_to_describe

    assert [kind for kind in MODELS.ours if loads_to_describe(MODELS.get(kind))] == ["sklearn"]
    assert main(["plan", "--help"]) == 0
    assert "no model is loaded, save those of scikit-learn" in " ".join(capsys.readouterr().out.split())


def test_a_file_that_is_a_store_is_named_by_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`lookup scores.lmdb` would take it for a sink."""
    monkeypatch.chdir(tmp_path)
    for name, told in (("s.lmdb", "lmdb://s.lmdb\n"), ("s.sqlite", "sqlite://s.sqlite#TABLE")):
        Path(name).touch()
        assert main(["lookup", name, "3"]) == 2
        assert f"{name}: a store is named by its address: {told}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["apply", "rows.parquet", "out", "--fn", "m:f", "--keep", "id", "x"], "and the last, x, is the sink"),
        (["up", "job.yaml"], "job.yaml: is a file, and its folder is what is run: gristmill up . (gristmill run job"),
        (["up", ".", "--again", "jb.yaml"], "no job with a schedule in . is called so; did you mean 'job.yaml'?"),
        (["run", "job.yaml", "--set", 'alerts=[{"command":"tee","on":["fail"]}]'], "recovered; did you mean 'failed'?"),
    ],
)
def test_what_was_most_likely_meant(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values of a flag with blanks between, a file for its folder, a mistyped name (one without suffix is a job's)."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"id": [1, 2]}), "rows.parquet")
    Path("job.yaml").write_text("source: rows.parquet\nmodel: {call: 'm:f'}\nsink: out\nschedule: '@daily'\n")
    assert main(arguments) == 2
    assert told in capsys.readouterr().err
    assert main(["up", ".", "--again", "job"]) == 0
