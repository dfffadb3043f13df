"""How close a model in one form (exported, quantised) is to the same model in another, on rows of the job's own source.

Measured in a process of its own, so that a run's driver loads neither torch nor the model.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.errors import BadModel
from gristmill.job.specs import TextSpec
from gristmill.models.contract import Place
from gristmill.process.spawning import mortal
from gristmill.process.startup import import_path
from gristmill.values import dataclass

# How far exported float32 models may differ from torch to be used unasked (the design's bound for float32).
CLOSE = 1e-5
TOGETHER = 8  # rows in a batch
_MOST_SECONDS = 900.0
_START = "import sys; sys.path[:0] = {path!r}; from {module} import main; main()"


@dataclass(frozen=True)
class Fidelity:
    """Differences over `rows` rows, of values as they are published (vectors, scores), relative to the largest value if
    that is over 1.

    `difference` is the largest one from the reference; `cosine` and `least_cosine` are of vectors or scores;
    `agreement` is the share of rows with the same label (classifiers); `batching` is the largest difference between a
    row scored alone and the same row scored among others.
    """

    rows: int
    difference: float | None
    cosine: float | None
    least_cosine: float | None
    agreement: float | None
    batching: float

    def line(self, of: str) -> str:
        """As a sentence for the report."""
        parts = []
        if self.cosine is not None:
            parts.append(f"cosine to float32 {self.cosine:.5f} on average, {self.least_cosine:.5f} at least")
        if self.agreement is not None:
            parts.append(f"the same label for {self.agreement:.1%} of rows")
        parts.append(f"a row alone and in a batch differ by up to {self.batching:.1e}")
        return f"{of}, on {self.rows} rows of this source: {'; '.join(parts)}"


def measured(spec: TextSpec, reference: TextSpec | None, rows: pa.Table) -> Fidelity:
    """Compare, in a process of its own. Exports and quantises what is not in the cache. Raises BadModel."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return Fidelity(**apart(__name__, pickle.dumps((spec, reference, sink.getvalue())), spec.name))


def apart(module: str, body: bytes, name: str) -> dict[str, Any]:
    """What `main` of a module answers in a process of its own: one line of JSON, the last on its stdout. Raises
    BadModel for an answer with an error, and for none.
    """
    command = [*mortal(), sys.executable, "-c", _START.format(path=import_path(), module=module)]
    try:
        done = subprocess.run(command, check=False, input=body, capture_output=True, timeout=_MOST_SECONDS)
    except subprocess.TimeoutExpired:
        raise BadModel(f"{name}: comparing backends took over {_MOST_SECONDS:.0f} s and was ended") from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout.rpartition(b"\n")[2])
    except ValueError:
        said = done.stderr.decode("utf-8", "replace").strip()[-2000:]
        raise BadModel(f"{name}: comparing backends failed with code {done.returncode}: {said}") from None
    if "error" in answer:
        raise BadModel(answer["error"])
    return answer


def main() -> None:
    """The process of `measured`: reads a request from stdin and writes one line of JSON as the last on stdout."""
    spec, reference, rows = pickle.loads(sys.stdin.buffer.read())
    answer: dict[str, Any]
    try:
        answer = asdict(compare(spec, reference, pa.ipc.open_stream(rows).read_all()))
    except BadModel as e:
        answer = {"error": str(e)}
    sys.stdout.write("\n" + json.dumps(answer))
    sys.stdout.flush()


def compare(spec: TextSpec, reference: TextSpec | None, rows: pa.Table) -> Fidelity:
    """Score the rows with both, in this process."""
    together, alone, labels = _scored(spec, rows, alone=True)
    batching = difference(alone, together)
    if reference is None:
        return Fidelity(len(together), None, None, None, None, batching)
    wanted, _, wanted_labels = _scored(reference, rows, alone=False)
    lengths = np.linalg.norm(together, axis=1) * np.linalg.norm(wanted, axis=1)
    cosine = np.einsum("ij,ij->i", together, wanted) / np.maximum(lengths, 1e-12)
    agreement = None
    if labels is not None and wanted_labels is not None:
        agreement = float(np.mean(labels == wanted_labels))
    return Fidelity(
        len(together), difference(together, wanted), float(cosine.mean()), float(cosine.min()), agreement, batching
    )


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest, relative to the largest value if that is over 1."""
    return float(np.abs(found - wanted).max() / max(1.0, float(np.abs(wanted).max())))


def _scored(spec: TextSpec, rows: pa.Table, alone: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Values float32 [rows, n] in batches of rows of like length, those of each row alone if requested, and the labels
    of a classifier.
    """
    from gristmill.models import kinds

    spec = kinds.transformer(spec).compared(spec)
    model = kinds.open(spec, Place("cpu", spec.dtype, max(1, os.cpu_count() or 1), spec.backend))
    prepared = model.prepare(rows)
    refused = {r.row for r in prepared.refused}
    index = np.array([i for i in range(prepared.rows) if i not in refused], dtype=np.int64)
    if len(index) == 0:
        raise BadModel(f"{spec.name}: none of the {prepared.rows} rows sampled has a text to compare backends with")
    index = index[np.argsort(-np.asarray(prepared.lengths)[index], kind="stable")]
    tables = [model.predict(prepared, index[at : at + TOGETHER]) for at in range(0, len(index), TOGETHER)]
    together = np.concatenate([values(table) for table in tables])
    ones = [values(model.predict(prepared, index[i : i + 1])) for i in range(len(index) if alone else 0)]
    each = np.concatenate(ones) if ones else together
    model.close()
    named = tables[0].num_columns > 1
    labels = np.array([label for table in tables for label in table.column(0).to_pylist()]) if named else None
    return together, each, labels


def values(table: pa.Table) -> np.ndarray:
    """The last column of a model's answers, vectors or all scores, as float32 [rows, n]."""
    column = table.column(table.num_columns - 1).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0)
    return np.asarray(column.flatten().to_numpy(zero_copy_only=False)).reshape(len(column), -1)
