"""The examples of the original library's README, read from its installed package, run with another import line."""

from __future__ import annotations

import ast
import asyncio
import importlib.metadata
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.timeout(300)


def examples() -> list[str]:
    """The README's code blocks; of the one that is a diff, the lines with what it adds."""
    try:
        readme = importlib.metadata.metadata("batched").get_payload()  # type: ignore[attr-defined]
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the original library is not installed: pip install --no-deps batched")
    blocks = re.findall(r"^```(python|diff)\n(.*?)^```", readme, flags=re.DOTALL | re.MULTILINE)
    return [_dedent(code) if kind == "diff" else code for kind, code in blocks]


def _dedent(diff: str) -> str:
    # In the diff, added lines begin with "+", others with a blank; all are indented by two more.
    return "\n".join(line[1:].removeprefix("  ") if line[:1] in "+ " else line for line in diff.split("\n"))


def run(code: str, **given: Any) -> dict[str, Any]:
    """Run an example in which only the import was changed, with the names that it takes from elsewhere."""
    code = re.sub(r"^import batched$", "import gristmill.batched as batched", code, flags=re.MULTILINE)
    code = re.sub(r"^from batched import", "from gristmill.batched import", code, flags=re.MULTILINE)
    compiled = compile(code, "README", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    scope = {"__name__": "readme", **given}

    async def main() -> None:
        outcome = eval(compiled, scope)
        if inspect.isawaitable(outcome):
            await outcome

    asyncio.run(main())
    return scope


def example(has: str) -> str:
    (found,) = [code for code in examples() if has in code]
    return found


def test_all_examples_are_here() -> None:
    """Six blocks that do something; a new one in a later version would show up."""
    assert len(examples()) == 6


@pytest.mark.long
@pytest.mark.real_model
def test_sentence_embedder(minilm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The basic example with a real model, found under the name that it asks for: a thousand sentences, both ways."""
    transformers = pytest.importorskip("sentence_transformers")
    (tmp_path / "mixedbread-ai").mkdir()
    (tmp_path / "mixedbread-ai" / "mxbai-embed-large-v1").symlink_to(minilm)
    monkeypatch.chdir(tmp_path)
    scope = run(example("SentenceEmbedder"))
    alone = transformers.SentenceTransformer("mixedbread-ai/mxbai-embed-large-v1").encode(scope["single_sent"])
    np.testing.assert_allclose(scope["embedding"], alone, atol=1e-5)
    np.testing.assert_allclose(scope["awaited_embedding"], alone, atol=1e-5)
    assert len(scope["batch_embeddings"]) == len(scope["awaited_batch_embeddings"]) == 1000
    np.testing.assert_allclose(scope["batch_embeddings"], scope["awaited_batch_embeddings"], atol=1e-5)
    assert scope["stats"].total_processed == 2002
    assert scope["stats"].total_batches < 80


def test_options() -> None:
    """The example that only shows options."""
    import gristmill.batched

    scope = run(example("custom_batch_function"), batched=gristmill.batched)
    assert scope["custom_batch_function"]._shared.settings.rules.batch_size == 64


def test_functions_on_items(capsys: pytest.CaptureFixture[str]) -> None:
    """For threads and `acall`."""
    scope = run(example('return [f"{item * 2}"'))
    assert scope["my_function"]([2, 3]) == ["4", "6"]
    assert "total_processed=8" in capsys.readouterr().out


def test_coroutines_on_items(capsys: pytest.CaptureFixture[str]) -> None:
    """For asyncio."""
    scope = run(example("@aio.dynamically(batch_size=64, timeout_ms=20.0"))
    assert asyncio.run(scope["my_function"]([2, 3])) == [4, 6]
    assert "total_processed=4" in capsys.readouterr().out


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors padded into a model, with `pad_token`; the asyncio one returns two outputs."""
    torch = pytest.importorskip("torch")
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def model(input_ids: Any, attention_mask: Any) -> Any:
        return (input_ids * attention_mask).float().cumsum(1)

    async def later(input_ids: Any, attention_mask: Any) -> Any:
        return model(input_ids, attention_mask)

    threads = run(example("\n@inference.dynamically"), model=model, data=data)
    assert torch.equal(threads["my_inference_function"](data), model(**data))
    assert "total_processed=4" in capsys.readouterr().out
    loops = run(example("@aio.inference.dynamically(pad"), model1=later, model2=later, data=data)
    first, second = asyncio.run(loops["my_inference_function"](data))
    assert torch.equal(first, model(**data)) and torch.equal(second, model(**data))
