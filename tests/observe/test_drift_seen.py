"""Drift as a person sees it: the alert, the figures beside those of earlier nights, and the shares of values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from gristmill.driver.history import facts
from gristmill.files.disk import LOCAL
from gristmill.observe.page import page
from listeners import listening
from nights import run, well

pytest.importorskip("datasketches", reason="install gristmill[drift]")
GATES = {"drift": {"score": {"psi": 0.25}}}


def night(folder: Path, shift: float) -> str:
    """A thousand numbers."""
    numbers = np.random.default_rng(7).normal(shift, 1.0, 1000)
    pq.write_table(pa.table({"x": numbers}), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def test_nights_that_drift(tmp_path: Path) -> None:
    """One that is refused is an alert of its own kind, told once; the report has its figures and the shares of both
    sides, and once it is accepted the figures of all nights.
    """
    sink = tmp_path / "out"
    with listening() as heard:
        options = {"gates": GATES, "restart": True, "alerts": heard.url}
        for shift in (0.0, 0.02, 0.0):
            run(night(tmp_path, shift), sink, well, **options)
        assert heard.kinds() == []
        for _ in range(2):
            with pytest.raises(gm.GateFailed):
                run(night(tmp_path, 2.0), sink, well, **options)
        assert heard.kinds() == ["drift"] and "score" in heard.bodies[0]["text"]
        held = facts(str(sink), LOCAL)
        (plot,) = held.drift
        assert (plot.column, plot.figures[0].verdict) == ("score", "failed")
        assert len(plot.bins) == len(plot.before) == len(plot.now) > 5 and plot.before != plot.now
        run(night(tmp_path, 2.0), sink, well, gates=GATES, accept=True, alerts=heard.url)
        run(night(tmp_path, 2.0), sink, well, **options)
        assert heard.kinds() == ["drift", "recovered"]
    found = facts(str(sink), LOCAL)
    (plot,) = found.drift
    # the second of three nights was the first to be compared; the one that was refused was then accepted
    assert [verdict for *_, verdict in plot.past] == ["held", "held", "failed", "held"]
    assert len({generation for generation, *_ in plot.past}) == 4
    assert len(plot.bins) == len(plot.before) == len(plot.now) > 5
    assert sum(plot.before) == pytest.approx(1, abs=0.02) and sum(plot.now) == pytest.approx(1, abs=0.02)
    text = page(found)
    assert "psi" in text and 'class="before"' in text and 'class="failed"' in text and 'class="held"' in text
