"""The ledger of a generation says in columns what its receipts say one by one, however it came to be read."""

from __future__ import annotations

import dataclasses
import errno
import functools
import operator
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.commit import ledger, readers
from gristmill.commit import receipt as receipts
from gristmill.commit.documents import Live
from gristmill.commit.generation import Generation
from gristmill.commit.ledger import Ledger, Listing
from gristmill.commit.receipt import Part, Receipt
from gristmill.errors import NewerFormat
from gristmill.files.disk import LOCAL
from gristmill.files.document import Document
from gristmill.profiles.profile import ColumnProfile, Profile, summed
from gristmill.shards.counts import Counts
from gristmill.shards.counts import summed as added

NAMES = st.sampled_from(["KeyError", 'say "no": never', "é\n ü", "\\", "input:a\\b"])
PROFILES = st.one_of(
    st.none(),
    st.builds(lambda n: Profile(n, {"id": 0, "x": n}), st.integers(0, 9)),
    st.builds(
        lambda n: Profile(n, {"id": 0}, {"id": ColumnProfile(n, 0, "whole", counts={"1": n})}), st.integers(1, 9)
    ),
)
PARTS = st.lists(st.sampled_from(["rows", "dead", "ids"]), max_size=3, unique=True)


@st.composite
def stored(draw: st.DrawFn) -> dict[str, bytes]:
    """Files of a folder of receipts by name: some torn, some superseded, some of other things."""
    found: dict[str, bytes] = {"notes.txt": b"of somebody else's"}
    profiled = draw(st.booleans())
    for shard in draw(st.lists(st.integers(0, 30), max_size=20, unique=True)):
        for version in range(draw(st.integers(0, 2)) + 1):
            parts = tuple(
                Part(f"work/{shard}.{role}.tmp", f"part-{shard:07d}.g1.{role}", shard, 9 * shard, "0a" * 32, role)
                for role in draw(PARTS)
            )
            made = Receipt(
                shard,
                draw(st.sampled_from(["one", "ünö", 'a": b'])),
                tuple(draw(st.lists(st.integers(0, 1 << 40), min_size=8, max_size=8))),
                parts,
                draw(st.dictionaries(NAMES, st.integers(0, 99).map(float), max_size=2)),
                draw(st.dictionaries(NAMES, st.integers(1, 99), max_size=2)),
                profile=draw(PROFILES.filter(bool)) if profiled else draw(PROFILES),
            )
            whole = made.dump()
            torn = draw(st.sampled_from(["whole", "whole", "cut", "changed"]))
            data = {"whole": whole, "cut": whole[:-30], "changed": whole.replace(b"work/", b"wort/") + b" "}[torn]
            found[receipts.name(shard, version)] = data
        if draw(st.booleans()) and draw(st.booleans()):
            found.pop(receipts.name(shard), None)
    return found


def agree(found: Ledger, expected: Mapping[int, Receipt]) -> None:
    """A ledger says what these receipts say."""
    some = list(expected.values())
    assert list(found) == list(expected) and len(found) == len(expected)
    assert dict(found) == dict(expected)
    assert found.counts == sum((Counts(*r.counts) for r in some), Counts())
    assert dict(found.sums.errors) == added(r.errors for r in some)
    figures = added({n: v for n, v in r.figures.items() if not n.startswith("input:")} for r in some)
    assert dict(found.sums.figures) == figures
    assert found.sums.profile == summed(r.profile for r in some)
    assert list(found.checksums()) == [(r.shard, r.checksum) for r in some]
    parts = [(p, r.shard) for r in some for p in r.parts]
    live = [Live(p.publish, p.work, p.rows, p.bytes, p.sha256, p.role, 1, shard) for p, shard in parts]
    assert list(found.parts) == live
    assert list(found.parts.of("rows", "ids")) == [f for f in live if f.role in ("rows", "ids")]
    for r in some:
        assert found.said_of(r.shard) == (Counts(*r.counts), dict(r.errors))
        assert found[r.shard] == r
    listed = receipts.listed(found.generation.receipts)
    assert found.torn == [n for n in listed if n not in expected]
    assert found.missing(32).tolist() == [n for n in range(32) if n not in expected]


@given(files=stored(), first=st.sets(st.integers(0, 30)), block=st.integers(1, 7))
@settings(deadline=None, max_examples=50)
def test_a_ledger_is_what_its_receipts_are(files: dict[str, bytes], first: set[int], block: int) -> None:
    """Whatever is in the folder, read at once or in two steps, in blocks of any size."""
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patched:
        patched.setattr(ledger, "BLOCK", block)
        patched.setattr(readers, "MANY", 1 << 30)
        generation = Generation(root, 1, "g", "new")
        folder = Path(generation.receipts)
        folder.mkdir(parents=True)
        agree(Ledger.of(generation), {})
        early = {name: data for name, data in files.items() if name[:7].isdigit() and int(name[:7]) in first}
        for name, data in early.items():
            (folder / name).write_bytes(data)
        known = Ledger.of(generation)
        agree(known, receipts.standing(generation.receipts))
        for name, data in files.items():
            (folder / name).write_bytes(data)
        agree(Ledger.of(generation), receipts.standing(generation.receipts))
        agree(Ledger.of(generation, known), receipts.standing(generation.receipts))


@given(
    st.sets(st.from_regex(r"\A[0-9٣a-z]{6,9}(\.[0-9]{1,2})?\.(json|jsom|tmp)\Z"), max_size=8),
    st.sets(st.integers(0, 99)),
)
@settings(deadline=None, max_examples=50)
def test_names_are_read_as_receipts_one_by_one(odd: set[str], shards: set[int]) -> None:
    """Of all names in a folder those of receipts count, however they look: as `receipts.listed` has them."""
    with tempfile.TemporaryDirectory() as root:
        for name in odd | {receipts.name(n) for n in shards} | {receipts.name(7, 1), receipts.name(12345678)}:
            Path(root, name).touch()
        found = Listing.of(root, LOCAL)
        named = {n: [receipts.name(n, v) for v in found.of_shard(n)] for n in found.shards.tolist()}
        expected = {n: [Path(p).name for p in paths] for n, paths in receipts.listed(root).items()}
        ours = {receipts.name(n, v) for n in expected for v in range(100)}  # others, as 00000007.json, nobody writes
        kept = {n: [name for name in names if name in ours] for n, names in expected.items()}
        assert named == {n: names for n, names in kept.items() if names}


def generation_of(folder: Path, count: int) -> Generation:
    """A generation with so many receipts, each of a file of a byte."""
    generation = Generation(str(folder), 1, "g", "new")
    Path(generation.receipts).mkdir(parents=True)
    Path(generation.work).mkdir()
    for n in range(count):
        part = Part(f"_gristmill/g/work/{n}.tmp", f"part-{n:07d}.g1.parquet", 1, 1, "00" * 32, "rows")
        made = Receipt(n, "nonce", (1, 1, 0, 0, 1, 0, 0, 1), (part,), {"seconds": 1.0}, profile=Profile(1, {"x": 0}))
        Path(generation.receipts, receipts.name(n)).write_bytes(made.dump())
        Path(folder, part.work).write_bytes(b"x")
    return generation


def test_processes_beside_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by two processes, block by block in order; one that dies leaves its receipts to this process."""
    generation = generation_of(tmp_path, 100)
    monkeypatch.setattr(ledger, "BLOCK", 9)
    monkeypatch.setattr(readers, "cores", lambda: 2)
    expected, started = receipts.standing(generation.receipts), []
    send = readers._send
    monkeypatch.setattr(readers, "_send", lambda reader, work: (started.append(reader), send(reader, work)))
    agree_all = functools.partial(operator.eq, dict(expected))
    found = Ledger.of(generation)
    assert agree_all(dict(found)) and len(started) == 2 and all(r.returncode is not None for r in started)
    assert [f.shard for f in found.parts] == list(range(100)) and found.counts.ok == 100
    monkeypatch.setattr(readers, "_SERVE", "raise SystemExit(3)")
    assert agree_all(dict(Ledger.of(generation)))


def test_what_a_sitecustomize_prints_is_no_receipt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes beside print at their start what a machine's set-up likes, and deliver all the same."""
    generation = generation_of(tmp_path / "sink", 40)
    (tmp_path / "sitecustomize.py").write_text("print('INFO site: proxy configured', flush=True)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(ledger, "BLOCK", 9)
    monkeypatch.setattr(readers, "cores", lambda: 2)
    expected, read, here = dict(receipts.standing(generation.receipts)), readers.read, []
    monkeypatch.setattr(readers, "read", lambda *given: (here.append(given), read(*given))[1])
    assert dict(Ledger.of(generation)) == expected and not here


@pytest.mark.parametrize("sent", [b"INFO site: proxy configured\n", b"\x80\x05\x8c\xff", b"cno_such_module\nname\n."])
def test_whatever_a_process_beside_sends_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Bytes that are no receipts may raise anything when they are loaded."""
    generation = generation_of(tmp_path, 40)
    monkeypatch.setattr(ledger, "BLOCK", 9)
    monkeypatch.setattr(readers, "cores", lambda: 2)
    monkeypatch.setattr(readers, "_SERVE", f"import os; os.write({{out}}, {sent!r})")
    assert dict(Ledger.of(generation)) == dict(receipts.standing(generation.receipts))


def test_where_no_process_is_to_be_had_this_one_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user or a container may be at its limit of processes; no descriptor stays open."""
    generation = generation_of(tmp_path, 40)
    monkeypatch.setattr(ledger, "BLOCK", 9)
    monkeypatch.setattr(readers, "cores", lambda: 2)
    start, started = subprocess.Popen, []

    def limited(*given: Any, **options: Any) -> Any:
        if started:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(start(*given, **options))
        return started[0]

    monkeypatch.setattr(readers.subprocess, "Popen", limited)
    before = len(os.listdir("/dev/fd"))
    assert dict(Ledger.of(generation)) == dict(receipts.standing(generation.receipts))
    assert started[0].returncode is not None and len(os.listdir("/dev/fd")) == before


def test_a_later_format_is_refused_by_whoever_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receipt of a later version, met by a process beside, is the same error as met here."""
    generation = generation_of(tmp_path, 30)
    path = Path(generation.receipts, receipts.name(17))
    made = Receipt.load_from(str(path))
    monkeypatch.setattr(Receipt, "FORMAT", 9)
    path.write_bytes(Document.dump(made))
    monkeypatch.undo()
    monkeypatch.setattr(ledger, "BLOCK", 4)
    monkeypatch.setattr(readers, "cores", lambda: 2)
    with pytest.raises(NewerFormat, match="format 9"):
        Ledger.of(generation)


def test_files_that_were_cut_or_removed_are_told(tmp_path: Path) -> None:
    """As they are from the receipts themselves: by size, without opening one."""
    generation = generation_of(tmp_path, 20)
    (tmp_path / "_gristmill/g/work/3.tmp").unlink()
    (tmp_path / "_gristmill/g/work/5.tmp").write_bytes(b"")
    found = receipts.standing(generation.receipts)
    assert Ledger.of(generation).cut() == [
        r.shard for r in receipts.cut(generation.files, generation.work, found.values())
    ]
    assert Ledger.of(generation).cut() == [3, 5]


def test_a_receipt_that_is_no_longer_there_is_not_kept(tmp_path: Path) -> None:
    """What was known of it is not taken for what stands: all is read again."""
    generation = generation_of(tmp_path, 6)
    known = Ledger.of(generation)
    Path(generation.receipts, receipts.name(2)).unlink()
    found = Ledger.of(generation, known)
    assert 2 not in found and found.counts.ok == 5 and dataclasses.astuple(found.counts)[0] == 5
