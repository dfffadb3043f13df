"""The fenced blocks of the documentation, and a reader who types them in, one after the other, in a folder.

What a block is, its first line says: `python` runs, or is written to a file where it has a `title`; so is `yaml`, which
else has to be a job, or a part of one; the commands of `bash` run; `text` is what the block before it printed, `…`
standing for anything. A comment above a block says what else is true of it:

    <!-- exit 4 -->                 its last command ends so
    <!-- not run: the reason -->    it is only read
    <!-- run by tests/FILE.py -->   a test that has what it needs takes it from here, with `block`
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

import gristmill as gm
from gristmill.cli import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md")))

_FENCE = re.compile(
    r'(?:^<!-- (?P<note>[^\n]*) -->\n)?^(?P<fence>```+)(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n'
    r"(?P<text>.*?)^(?P=fence)$",
    re.DOTALL | re.MULTILINE,
)
_JOB = {"source": "source: rows.parquet\n", "model": "model: {call: 'scoring:score'}\n"}  # around a part of a job


@dataclass(frozen=True)
class Block:
    """One fenced block, where it stands, and what is said of it."""

    page: str
    line: int
    language: str
    title: str | None
    text: str
    note: str = ""

    @property
    def reason(self) -> str:
        """Why it is not run here; "" where it is."""
        found = re.match(r"not run: (.+)|run by (\S+)", self.note)
        return (found[1] or found[2]) if found else ""

    @property
    def exit_code(self) -> int:
        """What its last command ends with."""
        found = re.fullmatch(r"exit (\d+)", self.note)
        return int(found[1]) if found else 0

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, m.start("text")), m["language"], m["title"], m["text"], m["note"] or "")
        for m in _FENCE.finditer(text)
    ]


def block(page: str, has: str) -> str:
    """The text of the one block of a page that holds `has`, for tests that have what it needs."""
    (found,) = [b for b in blocks(page) if has in b.text]
    return found.text


@dataclass
class Reader:
    """Types the blocks of a page into one session: names, files and the output before go on from block to block."""

    folder: Path
    capsys: pytest.CaptureFixture[str]
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "page"})
    printed: str = ""

    def read(self, block: Block) -> None:
        """Do what a block says; fails where that is not what happens."""
        if block.reason:
            return
        try:
            getattr(self, f"_{block.language}")(block)
        except BaseException as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(f"{block}\n{block.text}")
            raise

    def _python(self, block: Block) -> None:
        if block.title:
            (self.folder / block.title).write_text(block.text)
            return
        path = self.folder / f"line{block.line}.py"  # in which inspect finds the sources
        path.write_text(block.text)
        self.capsys.readouterr()
        exec(compile(block.text, str(path), "exec", dont_inherit=True), self.names)
        self.printed = "".join(self.capsys.readouterr())

    def _yaml(self, block: Block) -> None:
        path = self.folder / (block.title or f"line{block.line}.yaml")
        path.write_text(block.text)
        given = yaml.safe_load(block.text)
        if not block.title:
            path.write_text(block.text + "".join(text for key, text in _JOB.items() if key not in given))
            gm.load_job(str(path))

    def _bash(self, block: Block) -> None:
        lines = block.text.replace("\\\n", " ").splitlines()
        commands = [words for line in lines if (words := shlex.split(line, comments=True))]
        plain = re.sub(r"""'[^']*'|"[^"$]*"|#.*""", "", block.text)
        if all(words[0] == "gristmill" for words in commands) and not re.search(r"[|<>&;$*]", plain):
            self.capsys.readouterr()
            ended = [self._command(words[1:]) for words in commands]
            self.printed = "".join(self.capsys.readouterr())
        else:
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text],
                env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                timeout=120,
            )  # fmt: skip
            ended, self.printed = [done.returncode], done.stdout
        assert ended == [0] * (len(ended) - 1) + [block.exit_code], f"{block} ended with {ended}:\n{self.printed}"

    def _command(self, words: list[str]) -> int:
        """A command in this process, which imports the page's modules as they are now, as a process of its own does."""
        here = f"{self.folder}{os.sep}"
        mine = [name for name, m in sys.modules.items() if (getattr(m, "__file__", None) or "").startswith(here)]
        imported = {name: sys.modules.pop(name) for name in mine}
        try:
            return main(words)
        finally:
            sys.modules.update(imported)

    def _text(self, block: Block) -> None:
        wanted = [r"\s+".join(map(_pattern, line.split())) for line in block.text.splitlines() if line.strip()]
        assert re.search(r"\s*\n(?:.*\n)*?\s*".join(wanted), self.printed), f"{block}: printed was\n{self.printed}"


def _pattern(word: str) -> str:
    return ".*".join(map(re.escape, word.split("…")))
