"""The command line: the only place that reads arguments and the environment."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (contract §1). `arguments` are those of the process unless given."""
    from gristmill.cli.app import main as click_main

    if arguments is not None:
        return click_main(list(arguments))
    code = click_main(sys.argv[1:])
    if "duckdb" not in sys.modules:  # which complains on stderr of all that is not collected
        gc.freeze()  # the interpreter's last collection would look through every module: a twentieth of a second
    return code
