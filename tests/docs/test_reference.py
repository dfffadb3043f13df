"""The generated reference leaves nothing out that a user can write."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gristmill as gm
from gristmill.jobfile.sections import json_schema
from snippets import DOCS, ROOT


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """File name to Markdown."""
    spec = importlib.util.spec_from_file_location("generate", DOCS / "reference" / "_generate.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: dict[str, str] = module.pages()
    return made


def test_every_command_with_all_that_its_help_says(pages: dict[str, str]) -> None:
    """Each command that `gristmill --help` lists has a chapter, with the flags of its own help."""
    chapters = dict(re.findall(r"^## gristmill ([\w-]+)\n(.*?)(?=^## |\Z)", pages["cli.md"], re.DOTALL | re.MULTILINE))
    shown = subprocess.run([sys.executable, "-m", "gristmill", "--help"], capture_output=True, text=True, check=True)
    listed = re.findall(r"^  ([a-z-]+) {2,}", shown.stdout.partition("Commands:")[2].partition("\n\n")[0], re.MULTILINE)
    assert len(listed) > 10 and list(chapters) == listed
    for command in ("embed", "dead"):
        line = [sys.executable, "-m", "gristmill", command, "--help"]
        help_text = subprocess.run(line, capture_output=True, text=True, check=True).stdout
        flags = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", help_text, re.MULTILINE))
        assert len(flags) > 3 and {flag for flag in flags if flag not in chapters[command]} == set()


def test_every_key_of_a_job_file(pages: dict[str, str]) -> None:
    """Those of the job and of every section, with what they mean."""
    schema = json_schema()
    sections = [schema, *schema["$defs"].values()]
    keys = {
        (key, field["description"])
        for s in sections
        for key, field in s["properties"].items()
        if "description" in field
    }
    rows = re.findall(r"^\| (?:\[)?`(\w+)`.*\| ([^|]*) \|$", pages["job-file.md"], re.MULTILINE)
    written = {(key, re.sub(r"\\(.)", r"\1", about)) for key, about in rows}
    assert len(keys) > 60 and keys - written == set()


def test_every_option_has_its_flag(pages: dict[str, str]) -> None:
    """Spelled as Python, job files and commands have it; fields without a flag are set."""
    text = pages["options.md"]
    assert "| `where` | `gm.source(…, where=…)` | `source: {where: …}` | `--where` |" in text
    assert "| `types` | `gm.source(…, types=…)` | `source: {types: …}` | `--set source.types=…` |" in text
    assert "| `pooling` | `gm.TextEmbedder(…, pooling=…)` | `model: {pooling: …}` | `--pooling` |" in text


def test_every_public_name(pages: dict[str, str]) -> None:
    """In the API or among the exceptions."""
    for name in gm.__all__:
        if not name.startswith("_"):
            assert f"heading: gm.{name}\n" in pages["python.md"] or f"`{name}`" in pages["errors.md"], name


def test_every_variable_of_the_environment() -> None:
    """Those that the package reads are on the page of installation, but one that only workers are given."""
    used = {n for p in (ROOT / "src").rglob("*.py") for n in re.findall(r"GRISTMILL_[A-Z]+", Path(p).read_text())}
    page = (DOCS / "install.md").read_text()
    assert {name for name in used if f"`{name}`" not in page} == {"GRISTMILL_CORES"}
