"""The command line: the only place that reads arguments and the environment."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (contract §1). `arguments` are those of the process unless given."""
    from gristmill.cli.app import main as click_main

    return click_main(list(sys.argv[1:] if arguments is None else arguments))
