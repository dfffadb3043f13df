"""Index files of USearch: HNSW graphs that are searched where they lie on disk, mapped into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np

from gristmill.errors import BadJob
from gristmill.process.extras import require
from gristmill.stores.contract import Metric, StoreKind
from gristmill.stores.indexfile import IndexFile
from gristmill.stores.indexread import Engine
from gristmill.stores.vectors import Indexed

_METRICS: dict[Metric, str] = {"cosine": "cos", "l2": "l2sq", "ip": "ip"}
DTYPES = ("f32", "bf16", "f16", "i8")  # what an index may keep of a vector: less is smaller, and finds a little less
EXPANSION = 128  # candidates that a search looks at: the library's 64 finds 2 in 1,000 less of 5,000 random vectors


class HNSW:
    """Graphs of USearch."""

    name: ClassVar[str] = "usearch"
    kinds: ClassVar[tuple[str, ...]] = ("hnsw",)
    options: ClassVar[tuple[str, ...]] = ("metric", "dtype", "connectivity", "expansion_add", "expansion_search")

    def require(self, shown: str) -> Any:
        return require("usearch.index", "usearch", shown)

    def build(self, path: str, about: Indexed, count: int, vectors: Iterable[np.ndarray]) -> None:
        index = self._made(about)
        done = 0
        for matrix in vectors:
            index.add(np.arange(done, done + len(matrix)), np.ascontiguousarray(matrix, np.float32))
            done += len(matrix)
        index.save(path)

    def open(self, path: str, about: Indexed) -> Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]:
        index = self._made(about)
        index.view(path)
        expansion = int(about.options.get("expansion_search", EXPANSION))

        def search(vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
            index.expansion_search = max(expansion, 2 * k)
            labels, far = np.full((len(vectors), k), -1), np.zeros((len(vectors), k))
            found = index.search(vectors, k)
            for number, one in enumerate([found] if len(vectors) == 1 else found):  # one vector has no list of answers
                labels[number, : len(one)], far[number, : len(one)] = one.keys, one.distances
            return labels, _distances(far, about.metric)

        return search

    def _made(self, about: Indexed) -> Any:
        if (dtype := about.options.get("dtype", "f32")) not in DTYPES:
            raise BadJob(f"index of {about.column!r}: dtype is {dtype!r}: it must be one of {', '.join(DTYPES)}")
        library = self.require("usearch")
        given = {n: int(about.options[n]) for n in ("connectivity", "expansion_add") if n in about.options}
        said = {"metric": _METRICS[about.metric], "dtype": dtype, "enable_key_lookups": False}
        return library.Index(ndim=about.width, **said, **given)


def _distances(found: np.ndarray, metric: Metric) -> np.ndarray:
    """The library's l2 is squared, and its ip 1 - the inner product."""
    if metric == "l2":
        return np.asarray(np.sqrt(np.maximum(found, 0)))
    return found - 1 if metric == "ip" else found


class USearch(IndexFile):
    """`usearch:///FILE`, or `usearch://FILE` for a path relative to the current folder."""

    name: ClassVar[str] = "usearch"
    engine: ClassVar[Engine] = HNSW()


_: type[StoreKind] = USearch  # for mypy
