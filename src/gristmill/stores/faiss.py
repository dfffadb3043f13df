"""Index files of FAISS: HNSW graphs, or the vectors as they are, of which every one is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np

from gristmill.process.extras import require
from gristmill.stores.contract import Metric, StoreKind
from gristmill.stores.indexfile import IndexFile
from gristmill.stores.indexread import Engine
from gristmill.stores.vectors import Indexed

CONNECTIVITY, EXPANSION_ADD, EXPANSION = 16, 128, 128  # as an index of USearch has them


class Graphs:
    """Indices of FAISS. By cosine, its inner product of vectors that are made 1 long."""

    name: ClassVar[str] = "faiss"
    kinds: ClassVar[tuple[str, ...]] = ("hnsw", "flat")
    options: ClassVar[tuple[str, ...]] = ("metric", "connectivity", "expansion_add", "expansion_search")

    def require(self, shown: str) -> Any:
        return require("faiss", "faiss", shown)

    def build(self, path: str, about: Indexed, count: int, vectors: Iterable[np.ndarray]) -> None:
        faiss = self.require("faiss")
        metric = faiss.METRIC_L2 if about.metric == "l2" else faiss.METRIC_INNER_PRODUCT
        if about.options["kind"] == "flat":
            index = faiss.IndexFlat(about.width, metric)
        else:
            index = faiss.IndexHNSWFlat(about.width, int(about.options.get("connectivity", CONNECTIVITY)), metric)
            index.hnsw.efConstruction = int(about.options.get("expansion_add", EXPANSION_ADD))
        for matrix in vectors:
            index.add(_as_searched(matrix, about.metric))
        faiss.write_index(index, path)

    def open(self, path: str, about: Indexed) -> Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]:
        faiss = self.require("faiss")
        index = faiss.read_index(path, getattr(faiss, "IO_FLAG_MMAP_IFC", 0))
        expansion = int(about.options.get("expansion_search", EXPANSION))

        def search(vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
            if about.options["kind"] == "hnsw":
                index.hnsw.efSearch = max(expansion, 2 * k)
            found, labels = index.search(_as_searched(vectors, about.metric), k)
            return labels, _distances(found.astype(np.float64), about.metric)

        return search


def _as_searched(vectors: np.ndarray, metric: Metric) -> np.ndarray:
    if metric != "cosine":
        return np.ascontiguousarray(vectors, np.float32)
    wide = vectors.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    return np.ascontiguousarray(wide / np.where(lengths == 0, 1, lengths), np.float32)


def _distances(found: np.ndarray, metric: Metric) -> np.ndarray:
    """The library's l2 is squared, and what is nearer has the larger product."""
    if metric == "l2":
        return np.asarray(np.sqrt(np.maximum(found, 0)))
    return 1 - found if metric == "cosine" else -found


class Faiss(IndexFile):
    """`faiss:///FILE`, or `faiss://FILE` for a path relative to the current folder."""

    name: ClassVar[str] = "faiss"
    engine: ClassVar[Engine] = Graphs()


_: type[StoreKind] = Faiss  # for mypy
