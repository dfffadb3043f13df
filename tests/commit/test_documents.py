"""Documents of a sink come back as they were written; what is damaged, or of a later version, is told as such."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gristmill.cli.lastjob import LastJob
from gristmill.commit.documents import (
    Asked,
    Claim,
    Delivered,
    Live,
    LoadedCode,
    PlanDocument,
    SeenSame,
    Settled,
    Success,
    WrittenPaths,
)
from gristmill.commit.documents import ModelRecord as Model
from gristmill.commit.receipt import Part, Receipt
from gristmill.driver.progressnote import ProgressNote
from gristmill.errors import CorruptStore, NewerFormat
from gristmill.files.document import Document, seal, unseal
from gristmill.files.lease import Holder, told
from gristmill.fingerprint.digests import StoredFingerprint
from gristmill.parallel.detached import About, Ended
from gristmill.shards.counts import Counts
from gristmill.stores.contract import Mark
from gristmill.worker.suspects import Group, SuspectNotes

SAID = StoredFingerprint({"a": '"b"'}, {}, {"model: ü": "d" * 64}, "0" * 64, "", ("text",))
SUCCESS = Success(
    fingerprint=SAID, output_schema="", answers={"y": True}, made={}, sink_format="jsonl", partition_by=("day",),
    model=Model("m", "", "v"), generations=(1, 2), counts=Counts(3, 3, ok=3), counts_list=(3, 3, 0, 0, 0, 0, 0, 3),
    rows_in=3, rows_ok=3, rows_dead=0, rows_filtered=0, shards=1, published="", seconds=1, errors={"E": 1}, skipped=(),
    publication=2, generation=2, files=(Live("a", "b", 1, 2, "c", "rows", 2, 0),),
)  # fmt: skip
DOCUMENTS: list[Document] = [
    Claim(2, "g0002-ab", "append", 1, 1, SAID, "schema"),
    Claim(1, "g0001-ab", "new"),
    SUCCESS,
    replace(SUCCESS, files=None, files_table="t", files_sha256="s", before=0),
    Receipt(0, "n", (1, 2), (Part("w", "p", 1, 2, "s", "rows"),), {"model_seconds": 0.5}, {"E": 2}, ("r",)),
    Settled(2, 2),
    Delivered("duckdb:///s.duckdb#t", "upsert", ("id",), 2, 7, "2026-01-01", 0.5),
    Asked(("duckdb:///s.duckdb#t",)),
    Mark("g0001-ab", 2, "g0002-cd", (1, 2), "append", (), 7, "schema", "2026-01-01"),
    WrittenPaths(("a log",)),
    LoadedCode({"rules:f": "{}"}),
    SeenSame({"a.csv": (1, "stamp", "touched")}),
    Holder(7, "host", "2026-01-01", "kernel", None, "nonce", 3),
    ProgressNote(phase="gate failed", rows_total=None, rows_dead=4, gate="min_ok", at=1.5, pid=7),
    SuspectNotes({"model": (Group((("a.csv", 3, ""), ("a.csv", 9, "0.1")), 1, "SIGSEGV"),)}),
    About("id", "f", 3, False, 1.5),
    Ended("failed", "ValueError: no", 2, 1.5),
]
KINDS = [type(d).__name__ + str(n) for n, d in enumerate(DOCUMENTS)]


def changed(document: Document, **fields: Any) -> bytes:
    """The document with other fields, of a checksum that holds."""
    body = {**json.loads(document.dump()), **fields}
    body.pop("checksum", None)
    return seal(body) if document.SEALED else json.dumps(body).encode()


@pytest.mark.parametrize("document", DOCUMENTS, ids=KINDS)
def test_a_document_comes_back(document: Document) -> None:
    """As it was, of whatever types its fields are, with its format in it; a field that is not known yet is ignored."""
    assert type(document).load(document.dump(), "a/path") == document
    assert json.loads(document.dump())["format"] == document.FORMAT
    assert type(document).load(changed(document, of_later={"x": 1}), "a/path") == document


@pytest.mark.parametrize("document", DOCUMENTS, ids=KINDS)
def test_a_damaged_document_is_told(document: Document) -> None:
    """Cut, of another type as a whole, or with a field that is of another type: CorruptStore, which names the file."""
    data, name = document.dump(), next(iter(vars(document)))
    for damaged in (data[: len(data) // 2], b"", b"[1]", b'"text"', b"\xff\xfe", changed(document, **{name: [{}]})):
        with pytest.raises(CorruptStore, match=r"^a/path: .*--restart"):
            type(document).load(damaged, "a/path")


@pytest.mark.parametrize("document", DOCUMENTS, ids=KINDS)
def test_a_document_of_a_later_format_is_no_damaged_one(document: Document) -> None:
    """Nobody who makes up for a damaged document makes up for it. One that is damaged, too, may be anything."""
    later = changed(document, format=document.FORMAT + 1)
    with pytest.raises(NewerFormat, match=rf"^a/path: this {document.WHAT} has format 2, and .* up to 1: use"):
        type(document).load(later, "a/path")
    assert not issubclass(NewerFormat, CorruptStore)
    if document.SEALED:
        with pytest.raises(CorruptStore, match="checksum does not match"):
            type(document).load(document.dump().replace(b'"format": 1', b'"format": 2'), "a/path")


def test_what_was_written_before_there_were_formats_is_of_the_first() -> None:
    """A receipt without one is read."""
    body = unseal(DOCUMENTS[4].dump(), "")
    del body["format"]
    assert Receipt.load(seal(body), "0000000.json") == DOCUMENTS[4]


def test_a_lease_of_a_later_version_is_somebody_s() -> None:
    """Nothing is concluded about its process, so that only its lock or its beats decide."""
    assert told(changed(DOCUMENTS[9], format=2)) == Holder()
    assert told(b"") == Holder()


def test_the_remembered_job_comes_back() -> None:
    """With the folder that it was started in, whatever that is called; as an earlier version wrote it, too."""
    job = LastJob("source: {uri: a}\n", "/a; started in b")
    assert LastJob.load(job.dump(), "job.yaml") == job
    assert LastJob.load(b"# What last published this sink; started in /a\nx: 1\n", "") == LastJob("x: 1\n", "/a")
    assert LastJob.load(b"source: {uri: a}\n", "job.yaml").folder == ""


def test_every_kind_says_what_it_is() -> None:
    """In the words that a refusal uses of it."""
    assert [d.WHAT for d in DOCUMENTS if d.WHAT == "document"] == []
    assert (PlanDocument.WHAT, Success.WHAT) == ("plan", "publication")
