"""A run does not read its own answers, whatever leads from the source to the sink."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import gristmill as gm
from gristmill.driver import unwritten
from gristmill.driver.apart import Apart, _part
from gristmill.files.disk import LOCAL
from gristmill.result.published import Published
from gristmill.sinks.formats import sink_format
from gristmill.sources import patterns
from gristmill.sources.listing import LocalListing
from gristmill.sources.paths import Mount

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
    ("source", "sink"),
    [
        ("s3://key:secret@box/d?endpoint_override=h:1", "s3://box/d/out"),
        ("S3://box/d", "s3://box/d/out"),
        ("s3a://box/d/*/*", "s3://box/d/out"),
        ("gcs://box/d/**", "gs://box/d/out"),
        ("abfs://box@account.dfs.core.windows.net/d", "abfss://box@account/d/out"),
        ("az://box/d", "abfss://box@account.dfs.core.windows.net/d/out"),
    ],
)
def test_a_sink_in_its_source_in_a_store_is_refused(source: str, sink: str) -> None:
    """However the two addresses are written."""
    with pytest.raises(gm.BadJob, match="is inside source"):
        Apart(gm.Job(source, number, gm.sink(sink, format="jsonl")).spec, sink_format("jsonl")).check()
    Apart(
        gm.Job(source, number, gm.sink(sink.replace("/d/", "/e/"), format="jsonl")).spec, sink_format("jsonl")
    ).check()


@pytest.mark.parametrize(
    ("source", "sink", "endpoint"),
    [
        ("abfss://box@raw.dfs.core.windows.net/d", "abfss://box@curated.dfs.core.windows.net/d/out", None),
        ("s3://box/d?endpoint_override=one:9000", "s3://box/d/out", "http://two:9000"),
    ],
)
def test_a_sink_in_another_account_or_store_is_beside_its_source(source: str, sink: str, endpoint: str | None) -> None:
    """Whose container has the same name, where both say which one they are in."""
    storage = {} if endpoint is None else {"endpoint_url": endpoint}
    made = gm.Job(source, number, gm.sink(sink, format="jsonl", storage=storage))
    Apart(made.spec, sink_format("jsonl")).check()


@pytest.mark.parametrize(
    ("source", "sink"),
    [
        ("one:9000", "two:9000"),
        ("localhost:9000", "127.0.0.1:9001"),
        ("localhost", "127.0.0.2"),
        ("localhost:9000/a", "127.0.0.1:9000/b"),
        ("no-such-host.invalid:9000", "127.0.0.1:9000"),
        ("[1", "127.0.0.1"),
    ],
)
def test_endpoints_of_two_stores_are_told_apart(source: str, sink: str) -> None:
    """By host, port and path; where it cannot be known now, what is found in the source tells."""
    _endpoints(source, sink).check()


@pytest.mark.parametrize(
    ("source", "sink"),
    [
        ("localhost:9000", "127.0.0.1:9000"),
        ("127.0.0.1:9000", "http://LOCALHOST:9000/"),
        ("127.0.0.1", "http://localhost:80"),
        ("[::1]:443", "https://[::1]"),
    ],
)
def test_two_spellings_of_one_endpoint_are_one_store(source: str, sink: str) -> None:
    """The sink is in its source however they are written."""
    with pytest.raises(gm.BadJob, match="is inside source"):
        _endpoints(source, sink).check()


def _endpoints(source: str, sink: str) -> Apart:
    """A sink in its source by name, whose endpoints are written so."""
    made = gm.Job(
        gm.source("s3://box/d", storage={"endpoint_override": source}),
        number,
        gm.sink("s3://box/d/out", format="jsonl", storage={"endpoint_url": sink}),
    )
    return Apart(made.spec, sink_format("jsonl"))


INSIDE = [
    ("data/*/k=2026-*/*.jsonl", "data/out", {"partition_by": ["k"]}),
    ("data/*/k=[0-9]*", "data/out", {"partition_by": ["k"]}),
    ("data/out/k=1", "data/out", {"partition_by": ["k"]}),
    ("data/*/*2026*", "data/out", {"partition_by": ["k"]}),
    ("data/*/k=a.b", "data/out", {"partition_by": ["k"]}),
    ("data/**/k=1/**/*.jsonl", "data/out", {"partition_by": ["j", "k"]}),
    ("data/*/j=*/k=?/part-*", "data/out", {"partition_by": ["j", "k"]}),
    ("data/*/*-0000042.g*.jsonl", "data/out", {}),
    ("data/*/part-???????.g[2-9].jsonl", "data/out", {}),
    ("data/*/part-0000001.g12.jsonl.zst", "data/out", {}),
    ("data/*/[!a]*.g7*", "data/out", {}),
    ("data/*/merged-*1.g3.jsonl", "data/out", {"files": 2}),
    ("data/*/_dead/*7.g2.jsonl", "data/out", {}),
]


@pytest.mark.parametrize(("source", "sink", "options"), INSIDE)
def test_a_pattern_that_would_match_any_name_the_sink_gives_is_refused(
    data: Path, source: str, sink: str, options: dict[str, Any]
) -> None:
    """Values of folders, numbers of parts and of runs: on the first night, when none of them is there."""
    (data / "out" / "k=1").mkdir(parents=True)
    (data / "raw" / "k=2026-01-01").mkdir(parents=True)
    with pytest.raises(gm.BadJob, match="sink data/out is inside source"):
        job(source, sink, **options).run()


@pytest.mark.parametrize(
    ("source", "sink", "options"),
    [
        ("data/*/k=2026-*/events-*.jsonl", "data/out", {"partition_by": ["k"]}),
        ("data/*/k=2026-*/*.csv", "data/out", {"partition_by": ["k"]}),
        ("data/*/day=2026-*/*.jsonl", "data/out", {"partition_by": ["k"]}),
        ("data/[!o]*/k=*/*.jsonl", "data/out", {"partition_by": ["k"]}),
        ("data/*/k=*/*.jsonl", "data/_out", {"partition_by": ["k"]}),
        ("data/*/k=*/*.jsonl", "data/out", {}),
        ("data/*/*.jsonl", "data/out", {"partition_by": ["k"]}),
        ("data/*/*[.]jsonl", "data/out", {"partition_by": ["k"]}),
        ("data/*/k=*/*/*.jsonl", "data/out", {"partition_by": ["k"]}),
        ("data/*/part-*-c000.jsonl", "data/out", {}),
        ("data/*/part-?????.g1.jsonl", "data/out", {}),
        ("data/*/part-*.g[a-z]*.jsonl", "data/out", {}),
    ],
)
def test_a_pattern_that_matches_no_name_the_sink_gives_is_beside_it(
    data: Path, source: str, sink: str, options: dict[str, Any]
) -> None:
    """As Spark names its parts, with other endings, folders or columns."""
    Apart(job(source, sink, **options).spec, sink_format("jsonl")).check()


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_name_of_a_sink_is_missed(drawn: st.DataObject) -> None:
    """Whatever matches a name that a sink may give is known before it gives that: patterns made of one such name."""
    value, part, run = drawn.draw(
        st.tuples(st.text("k1x=", min_size=1), st.integers(0, 20_000_000), st.integers(1, 99))
    )
    path = f"s3://box/out/k={value}/part-{part:07d}.g{run}.jsonl"
    wild = st.sampled_from(["*", "?", "[!z]", "[!0-9]", "[0-9k-p]", ""])
    parts = []
    for name in path.split("/")[3:]:
        at = drawn.draw(st.integers(0, len(name)))
        cut = name[:at] + drawn.draw(wild) + name[at + drawn.draw(st.integers(0, 3)) :]
        parts.append(drawn.draw(st.sampled_from([name, cut, cut, "*", "**"])))
    uri = "/".join(["s3://box", *parts[: drawn.draw(st.integers(1, 3))]])
    below = [(*unwritten.text("k="), *unwritten.ANYTHING), _part("part-", 7, ".jsonl")]
    event(f"read: {(read := patterns.reads(uri, path))}")
    assert unwritten.read(uri, "s3://box/out", below) or not (read or uri == path)


def test_a_sink_that_is_found_in_its_source_is_refused_and_a_copy_is_not(data: Path) -> None:
    """A copy stays as it is when the sink is written, though its generations have the same names."""
    for _ in range(2):
        job("data", "out").run(append=True)
        shutil.copytree("out", data / "copy", dirs_exist_ok=True)
    apart = Apart(job("data", "out").spec, sink_format("jsonl"))
    own, copy, other = (_published(path) for path in ("out", "data/copy", "data"))
    assert own is not None and copy is not None and other is None and copy.is_at(os.path.abspath("out"), LOCAL)
    apart.found([copy])
    with pytest.raises(
        gm.BadJob, match=f"sink out is found in the source as {os.path.abspath('out')}, so that its own"
    ):
        apart.found([copy, own])
    assert sorted(gm.read("out").to_table()["k"].to_pylist()) == [1, 1, 2, 2]


def _published(path: str) -> Published | None:
    return Published.at(Mount("", LocalListing()), LOCAL, os.path.join(os.path.abspath(path), ""))


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
    apart = Apart(gm.Job("data", number, "results/out").spec, sink_format("parquet"))
    for name in ("latest", "above"):
        with pytest.raises(gm.BadJob, match=f"{data / name}, a folder that is also "):
            apart.met(str(data / name), link=False)
    apart.met(str(data), link=False)


STORES = {
    "delta": "delta://{}", "lance": "lance://{}", "lance table": "lance://{}#rows", "sqlite": "sqlite://{}#rows",
    "duckdb": "duckdb://{}#rows", "lmdb": "lmdb://{}", "iceberg": "iceberg://ours/n.rows",
}  # fmt: skip


def delivered(name: str, path: str) -> gm.Delivery:
    """A delivery to a store at a path; a warehouse of Iceberg there, which has a namespace."""
    options: dict[str, Any] = {}
    if name == "iceberg":
        options = {"type": "sql", "uri": "sqlite:///catalog.db", "warehouse": f"file://{os.path.abspath(path)}"}
        catalog = pytest.importorskip("pyiceberg.catalog").load_catalog("ours", **options)
        catalog.create_namespace_if_not_exists("n")
    return gm.to(STORES[name].format(os.path.abspath(path)), key=["k"], options=options)


@pytest.mark.parametrize("place", ["data/store", "data/deep/store", "link/store"])
@pytest.mark.parametrize("name", STORES)
def test_a_delivery_in_the_source_is_refused(data: Path, name: str, place: str) -> None:
    """Before anything is made, whatever leads there, by a folder and by a pattern."""
    (data / "deep").mkdir()
    os.symlink("data", "link")
    given = delivered(name, place)
    before = sorted(map(str, data.rglob("*")))
    for source in ("data", "link/**/*"):
        spec = gm.Job(gm.source(source), number, gm.sink("out", keep=["k"]), deliver=[given], workers=0)
        with pytest.raises(
            gm.BadJob, match=f"delivery {name.split(maxsplit=1)[0]}:.* is inside source {re.escape(source)}"
        ):
            spec.run()
    assert sorted(map(str, data.rglob("*"))) == before and not os.path.exists("out")


def test_a_link_that_leads_to_a_delivery_is_refused(data: Path) -> None:
    """To a table, into it, and above it; one beside the source is no matter."""
    (data.parent / "tables").mkdir()
    given = gm.Job(
        gm.source("data"), number, gm.sink("out", keep=["k"]), deliver=[delivered("delta", "tables/rows")], workers=0
    )
    for to in ("../tables", "../tables/rows", "../tables/rows/part-1.parquet"):
        os.symlink(to, data / "link")
        with pytest.raises(gm.BadJob, match=f"delivery delta:.* {FOUND}"):
            given.run()
        (data / "link").unlink()
    for _ in range(2):
        assert given.run().rows_ok == 2


@pytest.mark.parametrize("options", [{"log": "{}"}, {"lineage": "{}"}, {"metrics": "{}.prom"}, {"log": "file://{}"}])
@pytest.mark.parametrize("where", ["data/x.jsonl", "to/x.jsonl"])
def test_other_files_in_the_source_are_refused(data: Path, options: dict[str, str], where: str) -> None:
    """A log, lineage or metrics; beside the source they are no matter."""
    os.symlink("data", "to")
    for path, refused in ((where, True), ("x.jsonl", False)):
        given: Any = {name: text.format(os.path.abspath(path)) for name, text in options.items()}
        made = gm.Job(gm.source("data"), number, gm.sink("out", keep=["k"]), workers=0, **given)
        if refused:
            with pytest.raises(gm.BadJob, match=f"{next(iter(options))} .* is inside source data"):
                made.run()
            assert os.listdir("data") == ["a.jsonl"]
        else:
            assert made.run().rows_ok == 2


def test_a_file_that_is_named_and_written_is_refused(data: Path) -> None:
    """The log as the source itself."""
    made = gm.Job(gm.source("data/a.jsonl"), number, gm.sink("out", keep=["k"]), workers=0, log="data/../data/a.jsonl")
    with pytest.raises(gm.BadJob, match=r"log .* is inside source data/a\.jsonl"):
        made.run()


@pytest.mark.parametrize(
    ("inside", "kind"),
    [("_delta_log/0.json", "Delta"), ("_versions/1.manifest", "Lance"), ("metadata/0.metadata.json", "Iceberg")],
)
@pytest.mark.parametrize("source", ["data", "data/**/*.jsonl", "data/*/*.jsonl"])
def test_a_table_of_a_lake_in_the_source_is_refused(data: Path, inside: str, kind: str, source: str) -> None:
    """Its files are not all its rows; unless the source says how files are read, or a pattern leaves it out."""
    for name in (inside, "b.jsonl"):
        (data / "table" / name).parent.mkdir(exist_ok=True, parents=True)
        (data / "table" / name).write_text('{"k": 3}\n')
    with pytest.raises(gm.BadSource, match=rf"data/table: is an? {kind} table in source .*name the table"):
        job(source, "out").run()
    said = gm.source("data/*/b.jsonl", format="jsonl")
    assert gm.Job(said, number, gm.sink("out", keep=["k"]), workers=0).run().rows_ok == 1
    assert job("data/*.jsonl", "other").run().rows_ok == 2
    shutil.rmtree(data / "table")
    (data / "metadata").mkdir()
    (data / "metadata" / "c.jsonl").write_text('{"k": 4}\n')
    assert job("data", "third").run().rows_ok == 3
