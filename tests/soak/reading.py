"""A reader in a process of its own: reads a sink again and again, and writes down what it saw, a line a read."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from soak.witness import Broken


class Reader:
    """Reads until it is stopped; every read must be of a result that was to be published, none older than before."""

    def __init__(self, sink: str, seen: Path) -> None:
        self._seen = seen
        self._process = subprocess.Popen([sys.executable, "-m", "soak.reading", sink, str(seen)], stdin=subprocess.PIPE)

    def stop(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def check(self, history: list[str]) -> int:
        """How many reads there were. `history`: digests of the results in their order, "" for none yet."""
        lines = self._seen.read_text().splitlines() if self._seen.exists() else []
        at = 0
        for line in lines:
            try:
                at = history.index(line, at)
            except ValueError:
                known = "an older result again" if line in history else "no result that was published"
                raise Broken(f"a reader met {line[:500]}: {known} ({at} of {len(history)})") from None
        return len(lines)


def main(sink: str, seen: str) -> None:
    """Until standard input closes."""
    import select

    import gristmill as gm
    from soak.witness import by_read, digest, without_ids

    with open(seen, "a", buffering=1) as out:
        while not select.select([sys.stdin], [], [], 0.02)[0] and os.getppid() != 1:
            try:
                out.write(digest(without_ids(by_read(sink))) + "\n")
            except gm.BadSource as e:
                out.write("\n" if "no result" in str(e) else f"{type(e).__name__}: {e}".replace("\n", " ") + "\n")
                time.sleep(0.1)
            except Exception as e:
                out.write(f"{type(e).__name__}: {e}".replace("\n", " ")[:1000] + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
