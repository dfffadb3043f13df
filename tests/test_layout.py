"""Imports go one way: a test of the source tree, lazy imports included."""

from __future__ import annotations

import ast
import functools
import graphlib
import inspect
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "gristmill"

# Each line may import only itself and those above it. Names are folders or single modules of the package.
ORDER = [
    {"errors", "values"},
    {"job"},
    {"process"},
    {"shards"},
    {"jobfile"},
    {"arrow"},
    {"profiles"},
    {"files"},
    {"fingerprint"},
    {"sinks"},
    {"sources"},
    {"models"},
    {"commit"},
    {"result"},
    {"stores"},
    {"snapshots"},
    {"worker"},
    {"engines"},
    {"observe"},
    {"driver"},
    {"tuning"},
    {"comparison"},
    {"proof"},
    {"schedule"},
    {"pages"},
    {"parallel"},
    {"dynamic"},
    {"inference"},
    {"api", "spark"},
    {"aio"},
    {"batched"},
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
    names = {module if module != "gristmill" else f"gristmill.{name}" for module, name in _imports(path)}
    return {n.split(".")[1] for n in names if n.startswith("gristmill.")}


@functools.cache
def _imports(path: Path) -> set[tuple[str, str]]:
    """Module and name of each import of this package in a file."""
    found = set()
    left: list[ast.AST] = [ast.parse(path.read_text())]
    while left:  # statements alone, as there are no imports in expressions
        node = left.pop()
        if isinstance(node, ast.Import):
            found |= {(a.name, "") for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {(node.module, a.name) for a in node.names}
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            within = (getattr(node, name, ()) for name in ("body", "orelse", "handlers", "finalbody", "cases"))
            left += (statement for part in within if isinstance(part, list) for statement in part)
    return {(module, name) for module, name in found if module.split(".")[0] == "gristmill"}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    """A module imports only its own layer and those above it in the list."""
    mine = layer(path)
    assert mine in RANK, f"{mine} has no place in the layout: give it one here and in docs/architecture.md"
    wrong = [name for name in imported(path) if name in RANK and name != mine and RANK[name] >= RANK[mine]]
    assert not wrong, f"{path.relative_to(SOURCE)} imports {wrong}, which stand below it"


@pytest.mark.parametrize("path", [p for p in modules() if layer(p) == "engines"], ids=lambda p: p.name)
def test_engines_know_nothing_of_rows(path: Path) -> None:
    """An engine moves items and never looks inside one: it knows processes, what they say, and its own options."""
    assert imported(path) <= {"errors", "values", "job", "process", "engines"}


def test_no_function_shares_its_name_with_a_module() -> None:
    """An import of the module would put it in the function's place: `gm.run` has to be the function, for ever."""
    import gristmill

    places = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in modules()}
    functions = {name for name in gristmill.__all__ if not inspect.ismodule(getattr(gristmill, name))}
    assert not places & functions


def test_no_circle_of_files() -> None:
    """No file imports itself by way of others, imports inside functions counted."""
    names = {
        ".".join(p.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): p for p in modules()
    }
    graph = {
        name: {found for found in _files(path) if found in names and found != name} for name, path in names.items()
    }
    order = graphlib.TopologicalSorter(graph)
    order.prepare()  # raises CycleError, which names the files


def _files(path: Path) -> set[str]:
    """Modules of this package that a file imports anywhere, type-checking blocks left out."""
    return {f"{module}.{name}" for module, name in _imports(path)} | {module for module, _ in _imports(path)}


def test_time_is_told_by_the_monotonic_clock_alone() -> None:
    """Wall-clock time stands in labels, progress lines and beside files' times: what decides uses time.monotonic."""
    import gristmill

    allowed = {
        "runlog.py": 1,
        "views.py": 1,
        "detached.py": 2,
        "heartbeat.py": 1,
        "startup.py": 2,
        "notices.py": 2,
        "history.py": 1,
        "contract.py": 1,
    }
    source = Path(gristmill.__file__).parent
    for path in source.rglob("*.py"):
        if path.parent.name in ("observe", "cli", "sources", "sinks", "models", "fingerprint", "dynamic"):
            continue
        count = path.read_text().count("time.time()")
        assert count <= allowed.get(path.name, 0), path


def test_frozen_dataclasses_are_quick_to_import() -> None:
    """Modules take `dataclass` from gristmill.values: what is compiled for each class was half the time of a start."""
    theirs = re.compile(r"^from dataclasses import .*\bdataclass\b|^ *@dataclasses\.dataclass", re.MULTILINE)
    assert [p for p in SOURCE.rglob("*.py") if theirs.search(p.read_text())] == []


def test_no_pool_that_ends_with_the_main_thread() -> None:
    """Threads for a job are those of process/pool.py: Python's take no work once the main thread has ended."""
    found = [str(p.relative_to(SOURCE)) for p in SOURCE.rglob("*.py") if "ThreadPoolExecutor" in p.read_text()]
    assert found == ["batched/utils.py"]  # a cache that the program's own event loop waits for


def test_what_was_meant_ends_a_message() -> None:
    """What there is comes first: `no model 'slop': it has slope; did you mean 'slope'?`. A question in the middle of a
    sentence reads as two messages.
    """
    wrong = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.JoinedStr):
                continue
            for part, after in zip(node.values, node.values[1:], strict=False):
                asks = isinstance(part, ast.FormattedValue) and "did_you_mean(" in ast.unparse(part.value)
                if asks and (not isinstance(after, ast.Constant) or re.match(r"\s*[:;,.\w]", str(after.value))):
                    wrong.append(f"{path.name}:{node.lineno}")
    assert wrong == []
