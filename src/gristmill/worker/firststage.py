"""The first stage by itself, for engines that place it separately: read, run steps, tokenise. Its output travels as
opaque portions, one per window, to the worker that predicts and commits.
"""

from __future__ import annotations

import itertools
import pickle
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from gristmill.models.contract import Model
from gristmill.process.messages import Alive, Emit, Item, Portion
from gristmill.values import dataclass
from gristmill.worker.heap import use_jemalloc
from gristmill.worker.notes import note_loaded, warn_of_values
from gristmill.worker.outcome import classified, scrubbed
from gristmill.worker.prepare import Prepare, Window
from gristmill.worker.recipe import Recipe
from gristmill.worker.watch import Watch

if TYPE_CHECKING:
    from gristmill.worker.stages import ShardStages


@dataclass(frozen=True)
class PrepareStages:
    """What an engine ships to the workers of the first stage."""

    whole: ShardStages

    def environment(self, index: int) -> Mapping[str, str]:
        """Thread counts as for other workers; no GPU."""
        return replace(self.whole, gpus=("",)).environment(index)

    def open(self, name: str, emit: Emit) -> PrepareWorker:
        """Build the steps and, for text, the tokenizer; no weights."""
        use_jemalloc()
        worker = PrepareWorker(self.whole.recipe, name)
        warn_of_values(self.whole.recipe, name, emit)
        return worker


class _AsRead:
    """Replaces a model whose first stage needs the model itself: rows stay as they are."""

    def prepare(self, rows: pa.Table) -> Any:
        return None


class PrepareWorker:
    """Makes windows of shards, in order: one Portion each, then a last one, with any failure that ended them."""

    def __init__(self, recipe: Recipe, name: str) -> None:
        from gristmill.fingerprint import pins
        from gristmill.fingerprint.loadedmodules import Loaded
        from gristmill.models.kinds import check_planned, open_preparer

        self._watch = Watch(recipe.running.batch_timeout)
        self._watch.load()
        self._planned = pins.Planned(recipe.pins, recipe.named)
        self._planned.watch(check_planned(recipe.model))
        self._loaded = Loaded(recipe.pins, recipe.named)
        self._name = name
        self._recipe = recipe
        preparer = open_preparer(recipe.model, recipe.place) or _AsRead()
        self._loaded.built("preparing")
        self._prepare = Prepare(recipe, preparer)  # type: ignore[arg-type]
        self._planned.look()
        self._watch.rest()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Finish the current window, then leave."""
        self._stopping.set()

    def silence(self) -> float:
        self._watch.enforce()
        return self._watch.limit

    def work(self, items: Iterator[Item], emit: Emit) -> None:
        """Each item's windows, as fast as they are taken."""
        self._watch.say = lambda limit: emit(Alive(self._name, limit))
        for item in items:
            number = 0
            try:
                for window in self._watch.over(self._prepare.windows(item.value)):
                    self._watch.rest()  # passing on the portion may have to wait
                    emit(Portion(self._name, item.key, number, packed(window)))
                    number += 1
                    if self._stopping.is_set():
                        return
                self._planned.look()
                note_loaded(self._loaded, self._recipe, item.value)
                emit(Portion(self._name, item.key, number, last=True))
            except BaseException as e:  # crosses to the item's outcome, where the driver decides
                failure = scrubbed(classified(e), self._recipe.secrets)
                emit(Portion(self._name, item.key, number, failure=failure, last=True))
            self._watch.rest()


ALIGNED = 64  # bytes, as for Arrow's buffers


def packed(window: Window, prepared: bool = True) -> bytes:
    """A window as bytes: its rows as Arrow IPC (a pickle of a slice would hold the whole it was cut from), the rest as
    a pickle, and the pickle's arrays, each so that it can be used in place. If not as `prepared`, `unpacked` prepares
    it again.
    """
    arrays: list[pickle.PickleBuffer] = []
    apart: dict[str, Any] = {"rows": None} if prepared else {"rows": None, "prepared": None}
    told = pickle.dumps(replace(window, **apart), protocol=5, buffer_callback=arrays.append)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, window.rows.schema) as stream:
        stream.write_table(window.rows)
    parts = [memoryview(p) for p in (sink.getvalue(), told, *(a.raw() for a in arrays))]
    head = struct.pack(f"<{1 + len(parts)}Q", len(parts), *(p.nbytes for p in parts))
    out = bytearray()
    for part in (memoryview(head), *parts):
        out += part
        out += bytes(-len(out) % ALIGNED)
    return bytes(out)


def unpacked(data: bytes | memoryview, model: Model) -> Window:
    """The window again, backed by the memory of `data`, and prepared for the model if that was left to this stage."""
    view = memoryview(data)
    (count,) = struct.unpack_from("<Q", view)
    sizes = struct.unpack_from(f"<{count}Q", view, 8)
    steps = [-(-size // ALIGNED) * ALIGNED for size in (8 + 8 * count, *sizes)]
    table, told, *arrays = [
        view[start : start + size] for start, size in zip(itertools.accumulate(steps), sizes, strict=False)
    ]
    rows = pa.ipc.open_stream(pa.py_buffer(table)).read_all()
    window: Window = pickle.loads(told, buffers=arrays)
    return replace(window, rows=rows, prepared=window.prepared or model.prepare(rows))
