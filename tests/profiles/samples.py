"""Pairs of columns, the same on every machine: what was measured of them once by Evidently stands in test_measures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def pairs(rows: int) -> Mapping[str, tuple[Any, Any]]:
    """Reference and current values by name."""
    r = np.random.RandomState(15)
    labels = np.array(["bad", "fair", "good", "unsure"])
    return {
        "shifted": (r.normal(0, 1, rows), r.normal(0.4, 1.2, rows)),
        "same": (r.gamma(2.0, 3.0, rows), r.gamma(2.0, 3.0, rows + rows // 3)),
        "whole": (r.poisson(40, rows), r.poisson(46, rows)),
        "stars": (r.randint(1, 6, rows), r.randint(1, 8, rows)),
        "label": (labels[r.choice(3, rows, p=[0.2, 0.3, 0.5])], labels[r.choice(4, rows, p=[0.3, 0.3, 0.35, 0.05])]),
        "rare": (labels[r.choice(4, rows, p=[0.3, 0.3, 0.39, 0.01])], labels[r.choice(2, rows, p=[0.5, 0.5])]),
    }


def vectors() -> tuple[np.ndarray, np.ndarray]:
    """Reference and current vectors, float32 [300, 16] and [200, 16]."""
    r = np.random.RandomState(51)
    centre = r.normal(0, 1, 16)
    a, b = (centre + r.normal(0, 0.5, (rows, 16)) for rows in (300, 200))
    return a.astype(np.float32), (b + np.eye(16)[3] * 2).astype(np.float32)
