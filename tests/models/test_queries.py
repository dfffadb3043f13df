"""A model of a job, loaded in this process for queries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gristmill as gm

TEXTS = ["a heist that goes wrong", "good", "", "a long walk home in the rain, and then nothing " * 9]


@pytest.mark.long
def test_queries_have_the_vectors_of_the_job(minilm_onnx: Path, tmp_path: Path) -> None:
    """One text is one vector; the order is that of the texts; nothing is an empty array; a number is no text."""
    job = gm.embed(TEXTS, model=str(minilm_onnx), workers=0)
    wanted = np.array(job["embedding"].to_pylist(), dtype=np.float32)
    with gm.TextEmbedder(str(minilm_onnx), text="text").open() as encoder:
        found = encoder.encode(TEXTS)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        np.testing.assert_allclose(encoder.encode(TEXTS[0]), wanted[0], atol=1e-5)
        np.testing.assert_allclose(encoder.encode(TEXTS * 20), np.tile(wanted, (20, 1)), atol=1e-5)
        assert encoder.encode([]).shape == (0, 384)
        with pytest.raises(TypeError, match="3 is not text"):
            encoder.encode(["a", 3])  # type: ignore[list-item]
        with pytest.raises(TypeError, match="None is not text"):
            encoder.encode([None, ""])  # type: ignore[list-item]
    with pytest.raises(gm.BadModel, match="no such"):
        gm.TextEmbedder(str(tmp_path / "none"), text="text").open()
