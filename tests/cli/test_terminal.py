"""What is seen on a (pseudo) terminal 80 and 20 columns wide: the bar, the report, tables, and their ends."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from typing import Any

import pytest

Folder = Any  # conftest.Folder
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Screen:
    """All that a command wrote to its terminal, and how it ended."""

    code: int
    raw: str

    @property
    def frames(self) -> list[str]:
        """Every line that stood on the screen at some time, without colours."""
        return [ESCAPE.sub("", part) for part in re.split(r"\r\n|\r|\n", self.raw)]

    @property
    def left(self) -> list[str]:
        """The lines that stand there in the end, of a terminal that obeys what this program writes."""
        lines, at, column = [""], 0, 0
        for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", self.raw):
            if token == "\n":
                at += 1
                lines += [""] * (at + 1 - len(lines))
            elif token == "\r":
                column = 0
            elif token.startswith("\x1b"):
                if token.endswith("A"):
                    at = max(0, at - int(token[2:-1] or 1))
                elif token == "\x1b[2K":
                    lines[at] = ""
            else:
                lines[at] = lines[at][:column].ljust(column) + token + lines[at][column + len(token) :]
                column += len(token)
        return lines


def on_terminal(folder: Folder, columns: int, *arguments: str, interrupt: str | None = None) -> Screen:
    """Run a command on a pseudo terminal; Ctrl-C is typed once `interrupt` has been shown."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "gristmill", *arguments],
        cwd=folder.path, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**env, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(theirs)
    raw = b""
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    part = os.read(ours, 65536)
                except OSError:  # its last holder has gone
                    break
                if not part:
                    break
                raw += part
            if interrupt is not None and interrupt.encode() in raw:
                process.send_signal(signal.SIGINT)
                interrupt = None
        return Screen(process.wait(10), raw.decode())
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)


SLOW = (
    "apply",
    "rows.parquet",
    "out",
    "--fn",
    "scoring:Slow",
    "--workers",
    "1",
    "--batch-rows",
    "5",
    "--shard-rows",
    "15",
)


def test_the_bar_at_80_columns(folder: Folder) -> None:
    """It grows, says rows, rate and workers, never wraps, and leaves only the report behind."""
    screen = on_terminal(folder, 80, *SLOW, "--arg", "seconds=0.03")
    assert screen.code == 0, screen.raw
    bars = [frame for frame in screen.frames if "/60 rows" in frame]
    assert any("━" in bar and "worker" in bar and "/s" in bar for bar in bars), screen.frames
    assert len(set(bars)) > 3
    assert all(len(frame) <= 80 for frame in screen.frames)
    assert not [line for line in screen.left if "━" in line or "/60 rows" in line], screen.left
    assert screen.left[0].startswith("out: done in") and "gm.read('out')" in "\n".join(screen.left)
    assert "\x1b[?25l" not in screen.raw, "the cursor is never hidden"


@pytest.mark.long
def test_the_bar_at_20_columns(folder: Folder) -> None:
    """The share and the rows; nothing wraps but the commands that are to be copied."""
    screen = on_terminal(folder, 20, *SLOW, "--arg", "seconds=0.03")
    assert screen.code == 0, screen.raw
    bars = [frame for frame in screen.frames if "/60" in frame]
    assert bars and all(re.fullmatch(r"(\w+  )?\d+ %  \d+/60.*", bar) for bar in bars), bars
    assert all(len(frame) <= 20 for frame in screen.frames if not frame.startswith(("read", "dead  ")))
    assert not [line for line in screen.left if "/60" in line]


@pytest.mark.long
def test_prints_go_above_the_bar(folder: Folder) -> None:
    """Whole, and in order, whatever is redrawn between them."""
    for workers in ("1", "0"):
        sink = f"out{workers}"
        arguments = ("apply", "rows.parquet", sink, "--fn", "scoring:chatty", "--workers", workers, "--batch-rows", "6")
        screen = on_terminal(folder, 80, *arguments)
        assert screen.code == 0, screen.raw
        printed = [line.strip() for line in screen.left if line.startswith("batch of")]
        assert len(printed) >= 10 and set(printed) <= {"batch of 6 rows", "batch of 60 rows"}, screen.left


@pytest.mark.long
def test_a_preview_is_a_table(folder: Folder) -> None:
    """Drawn, with the scores; on a narrow terminal with columns left out in the middle."""
    arguments = ("apply", "rows.parquet", "out", "--fn", "scoring:double", "--keep", "id,x,t", "--preview", "3")
    wide = on_terminal(folder, 80, *arguments, "--workers", "0")
    assert wide.code == 0 and any(line.split() == ["id", "x", "t", "score"] for line in wide.left), wide.left
    narrow = on_terminal(folder, 20, *arguments, "--workers", "0")
    assert narrow.code == 0 and any(line.split()[-1:] == ["score"] for line in narrow.left), narrow.left
    assert any("more column" in line for line in narrow.left)
    assert all(len(line) <= 20 for line in narrow.left)


def test_ctrl_c_leaves_a_clean_terminal(folder: Folder) -> None:
    """The bar goes, one message says how to go on, exit 130."""
    screen = on_terminal(folder, 80, *SLOW, "--arg", "seconds=0.2", interrupt="/60 rows")
    assert screen.code == 130, screen.raw
    assert not [line for line in screen.left if "/60 rows" in line], screen.left
    assert any("again" in line for line in screen.left) and not any("Traceback" in line for line in screen.left)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["lines", "json", "off"])
def test_other_progress_on_a_terminal(folder: Folder, kind: str) -> None:
    """What is asked for wins over what the terminal could do."""
    screen = on_terminal(folder, 80, *SLOW, "--arg", "seconds=0.001", "--progress", kind)
    assert screen.code == 0 and "━" not in screen.raw and "\x1b[2K" not in screen.raw


@pytest.mark.long
def test_a_poor_encoding_is_no_error(folder: Folder) -> None:
    """A terminal that knows only ASCII gets question marks."""
    env = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = folder.fresh(*SLOW[:-2], "--preview", "2", "--keep", "größe,id", env=env)
    assert done.code == 2 and "gr??e" in done.err, done.err
    done = folder.fresh(*SLOW[:-2], "--preview", "2", "--keep", "id", "--arg", "seconds=0.001", env=env)
    assert done.code == 0 and done.out.startswith("2 rows"), done.err


@pytest.mark.long
def test_a_dumb_terminal_gets_lines(folder: Folder) -> None:
    """TERM=dumb, as in an editor's shell."""
    done = folder.run(*SLOW, "--arg", "seconds=0.001", env={"TERM": "dumb"})
    assert done.code == 0 and done.err.startswith("planning\n")
