"""The index of answers that may be kept: found by digest, whatever the number of pieces that it is sorted in."""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from gristmill.arrow.hashing import DIGEST
from gristmill.commit import fates, keptindex
from gristmill.commit.fates import DEAD, EXPANDED, Fates
from gristmill.commit.generation import Generation
from gristmill.commit.keptindex import Kept, Shelf
from gristmill.commit.receipt import Receipt, measure
from gristmill.errors import CorruptStore
from gristmill.files.disk import LOCAL


def shelf(root: Path, number: int, digests: np.ndarray, state: np.ndarray, rows: np.ndarray) -> Shelf:
    generation = Generation(str(root), 1, "g0001-a", "new")
    key, made = np.arange(len(digests), dtype=np.uint64), np.ones(len(digests), np.int32)
    told = Fates(digests, key, state.astype(np.int8), made, rows.astype(np.int32))
    copies = pa.array([f"{n}" for n in range(int(rows.sum()))], pa.string())
    file = fates.write(LOCAL, generation.folder, number, secrets.token_hex(3), told, copies)
    receipt = Receipt(number, "nonce", (0,) * 8, (), fates=measure(LOCAL, file, str(root)))
    return Shelf(generation, receipt, None, False)


@pytest.mark.parametrize("piece", [1 << 20, 100])
def test_found_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Each live row with the first row that it wrote; dead ones and others are not found."""
    monkeypatch.setattr(keptindex, "PIECE", piece)
    rng = np.random.default_rng(0)
    digests = np.frombuffer(rng.bytes(16 * 3000), DIGEST).copy()
    digests["hi"][5], digests["hi"][2500] = digests["hi"][6], digests["hi"][6]  # the other half tells them apart
    rows, state = rng.integers(0, 4, 3000), np.where(np.arange(3000) % 7 == 0, DEAD, EXPANDED)
    parts = [slice(0, 1000), slice(1000, 1001), slice(1001, 3000), slice(3000, 3000)]
    shelves = [shelf(tmp_path, n, digests[p], state[p], rows[p]) for n, p in enumerate(parts)]
    folder = str(tmp_path / "_gristmill" / "g0002-b")
    LOCAL.make_folder(folder)
    tables = keptindex.build(LOCAL, folder, shelves)
    index = Kept(folder, str(tmp_path), tables, LOCAL).open()
    assert (np.diff(index.hi.astype(np.float64)) >= 0).all()
    strange = np.frombuffer(rng.bytes(160), DIGEST)
    found = index.find(np.concatenate([digests, strange]))
    assert (found[3000:] == -1).all() and (found[:3000][state == DEAD] == -1).all()
    for n in np.flatnonzero(state != DEAD).tolist():
        part = next(i for i, p in enumerate(parts) if p.start <= n < p.stop)
        entry = index.entries[found[n]]
        first = parts[part].start
        assert (entry["part"], entry["source"], entry["rows"]) == (part, n - first, rows[n])
        assert entry["row"] == rows[first:n].sum()


def test_damage_is_seen(tmp_path: Path) -> None:
    """An index that is not what the plan says is not looked into; damaged fates are as good as none."""
    digests = np.frombuffer(np.random.default_rng(0).bytes(160), DIGEST)
    ones = np.ones(10, int)
    whole, torn = (shelf(tmp_path, n, digests, ones, ones) for n in (0, 1))
    assert torn.receipt.fates is not None
    path = tmp_path / torn.receipt.fates.work
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert fates.read(torn.generation, torn.receipt) is None
    tables = keptindex.build(LOCAL, str(tmp_path), [whole, torn])
    kept = Kept(str(tmp_path), str(tmp_path), tables, LOCAL)
    assert len(kept.open().hi) == 10
    for name in tables:
        file = tmp_path / tables[name].path
        data = file.read_bytes()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CorruptStore, match="not what the plan says"):
            kept.open()
        file.write_bytes(data)
    nothing = keptindex.build(LOCAL, str(tmp_path), [torn])
    assert len(Kept(str(tmp_path), str(tmp_path), nothing, LOCAL).open().find(digests)) == 10
