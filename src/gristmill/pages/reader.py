"""The process that looks into sinks for the pages: `python -m gristmill.pages.reader`. It is asked by lines of JSON on
its standard input, answers each by one on its standard output, and ends when nobody has asked for a while.

It is a process of its own so that `gristmill up` stays small, and so that a store that hangs, or a sink that is large,
holds up nothing but its own page.
"""

from __future__ import annotations

import json
import os
import select
import signal
from datetime import datetime
from typing import TYPE_CHECKING, Any

from gristmill.pages.asking import LINGERS_S, PATIENCE_S

if TYPE_CHECKING:
    from gristmill.job.job import JobSpec
    from gristmill.job.secret import Secret


def main() -> None:
    """Answer until nobody asks any more."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    os.nice(10)  # runs come first
    while select.select([0], [], [], LINGERS_S)[0] and (line := _line()):
        signal.alarm(round(PATIENCE_S) + 5)  # whoever asked has given up by then
        out.write(json.dumps(_answered(json.loads(line)), default=str).encode() + b"\n")
        out.flush()
        signal.alarm(0)


def _line() -> bytes:
    """A line of the standard input, which has one at a time: nothing is buffered of which `select` would not know."""
    found = b""
    while not found.endswith(b"\n"):
        got = os.read(0, 65536)
        if not got:
            return b""
        found += got
    return found


def _answered(asked: dict[str, Any]) -> dict[str, Any]:
    from gristmill.errors import GristmillError
    from gristmill.job.secret import scrub, secrets_in
    from gristmill.jobfile.jobfile import read_job_file

    hidden: list[Secret] = []
    try:
        spec = read_job_file(asked["job"], environ=os.environ, tick=datetime.fromisoformat(asked["tick"]))
        hidden = list(secrets_in(spec))
        return {"found": _found(spec, asked)}
    except Exception as e:  # whatever a store's library raises is about this sink alone
        text = str(e) if isinstance(e, GristmillError) else f"{type(e).__name__}: {e}"
        return {"wrong": scrub(text, hidden)}


def _found(spec: JobSpec, asked: dict[str, Any]) -> Any:
    from gristmill.driver.history import facts
    from gristmill.driver.opening import sink_place
    from gristmill.driver.views import status
    from gristmill.errors import BadJob
    from gristmill.files.contract import Files
    from gristmill.job.uris import is_local
    from gristmill.observe.page import page

    if spec.sink is None:
        raise BadJob(f"{asked['job']}: the job has no sink")
    root: str
    files: Files
    root, files = sink_place(spec.sink)
    if is_local(root) and not os.path.exists(root):
        raise BadJob(f"{spec.sink.uri}: nothing is there yet")
    if asked["what"] == "now":
        return status(root, files)
    found = facts(root, files)
    if asked["what"] == "report":
        return page(found, above=[(text, to) for text, to in asked["above"]])
    return found.as_dict()


if __name__ == "__main__":
    main()
