"""Imports go one way: a test of the source tree, lazy imports included."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "gristmill"

# Each line may import only itself and those above it. Names are folders or single modules of the package.
ORDER = [
    {"errors"},
    {"plan"},
    {"batching"},
    {"io"},
    {"models"},
    {"commit"},
    {"observe"},
    {"worker"},
    {"engines"},
    {"machine"},
    {"ahead"},
    {"tables"},
    {"gating"},
    {"tally"},
    {"planning"},
    {"backends"},
    {"budgets"},
    {"feeding"},
    {"rereading"},
    {"choosing"},
    {"retrying"},
    {"shipping"},
    {"reporting"},
    {"running"},
    {"viewing"},
    {"tuning"},
    {"parallel"},
    {"parallel_map"},
    {"inference"},
    {"aio"},
    {"api", "batched", "spark", "testing"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
HEAVY = {
    "numpy",
    "pyarrow",
    "torch",
    "transformers",
    "onnxruntime",
    "sklearn",
    "duckdb",
    "pandas",
    "polars",
    "rich",
    "click",
}


def modules() -> list[Path]:
    """Every source file below a layer (the package's own __init__ and __main__ only re-export)."""
    return sorted(p for p in SOURCE.rglob("*.py") if p.parent != SOURCE or not p.name.startswith("__"))


def layer(path: Path) -> str:
    """The layer that a file belongs to."""
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Layers of this package that a file imports anywhere, also inside functions (type-checking blocks left out)."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module] if node.module != "gristmill" else [f"gristmill.{a.name}" for a in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("gristmill.")}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    """A module imports only its own layer and those above it in the list."""
    mine = layer(path)
    assert mine in RANK, f"{mine} has no place in the layout: give it one here and in docs/architecture.md"
    wrong = [name for name in imported(path) if name in RANK and name != mine and RANK[name] >= RANK[mine]]
    assert not wrong, f"{path.relative_to(SOURCE)} imports {wrong}, which stand below it"


@pytest.mark.parametrize("path", [p for p in modules() if layer(p) == "engines"], ids=lambda p: p.name)
def test_engines_know_only_plan_and_errors(path: Path) -> None:
    """An engine knows what an item is worth moving for as little as possible: contracts and errors alone."""
    assert imported(path) <= {"plan", "errors", "engines"}
