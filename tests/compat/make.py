"""Makes the sinks and kept results of one version, from the jobs, code and data that are in its folder:

    python tests/compat/make.py tests/compat/0.1.0

By hand, once for a version that writes a new format, into a folder of its own with a copy of the last one's jobs. What
is committed is never made again: later versions must read it as it is. Linux only: jobs name their source by
/proc/self/cwd, so that its path is the same wherever the folder is copied to.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PLACE = Path("/tmp/gristmill-compat")  # whatever stands in texts of failures is of here, and of nobody's home
WORK, SOURCE = PLACE / "work", PLACE / "src"
MADE = ("sinks", "checkpoint", "detached")


def gristmill(*args: str, before: str = "pass") -> None:
    """One command, after some Python."""
    done = subprocess.run(command(*args, before=before), cwd=WORK, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"{args}: {done.returncode}\n{done.stdout}\n{done.stderr}"


def command(*args: str, before: str = "pass") -> list[str]:
    code = f"import sys; {before}; from gristmill.cli.app import main; sys.exit(main({list(args)!r}))"
    return [sys.executable, "-c", code]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "GRISTMILL_CACHE": str(PLACE / "cache")}


def killed(*args: str, when: Callable[[], bool]) -> None:
    """A command that is killed, with its workers, as soon as something holds."""
    run = subprocess.Popen(command(*args), cwd=WORK, env=environment(), start_new_session=True)
    until = time.monotonic() + 60
    while not when():
        assert run.poll() is None and time.monotonic() < until, f"{args} came to its end"
        time.sleep(0.005)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def there(pattern: str) -> list[Path]:
    """Files below the sinks."""
    return list((WORK / "sinks").glob(pattern))


def sinks() -> None:
    """One for each job."""
    for name in ("parquet", "jsonl", "npy", "partitioned"):
        gristmill("run", f"{name}.yaml")
    (WORK / "in" / "0.jsonl").touch()
    gristmill("run", "parquet.yaml")  # finds a file touched, and notes that it is the same

    _, *days = sorted((WORK / "in-daily").iterdir())
    for day in days:
        day.rename(WORK / day.name)
    gristmill("run", "appended.yaml")
    for day in days:
        (WORK / day.name).rename(day)
        many = "import gristmill.commit.publication as p; p.INLINE_FILES = 1"  # the list of files in a table of its own
        gristmill("run", "appended.yaml", "--append", before=many)

    # Row 100 is suspected, and not alone yet.
    suspected = "unfinished/_gristmill/g0001-*/suspects/???????.json"
    killed("run", "unfinished.yaml", when=lambda: bool(there(suspected)))

    late = WORK / "in-growing" / "1.jsonl"
    late.rename(WORK / late.name)
    gristmill("run", "given-up.yaml")
    (WORK / late.name).rename(late)
    committed = "given-up/_gristmill/g0002-*/receipts/*.json"
    killed("run", "given-up.yaml", "--append", when=lambda: len(there(committed)) >= 2)
    gristmill("retry-dead", "given-up.yaml")  # gives the append up; the rows are dead again


def maps() -> None:
    """A checkpoint of a map, and a detached one."""
    told = {"cwd": WORK, "env": environment(), "check": True}
    subprocess.run([sys.executable, "maps.py", "checkpoint", "checkpoint"], **told)
    id = subprocess.run([sys.executable, "maps.py", "detached"], capture_output=True, text=True, **told).stdout.strip()
    folder = PLACE / "cache" / "detached" / id
    while not (folder / "state.json").exists():
        time.sleep(0.05)
    time.sleep(0.5)  # until the driver has closed its results
    (WORK / "detached").mkdir()
    for name in ("about.json", "state.json", "results.sqlite"):
        shutil.copy(folder / name, WORK / "detached")


def neutral() -> None:
    """Without what is of this machine: who held a lock, and where jobs were started."""
    for lock in there("*/_gristmill/lock"):
        lock.unlink()
    for job in there("*/_gristmill/job.yaml"):
        job.write_text(job.read_text().replace(f"started in {WORK}", "started in /proc/self/cwd"))


def make(folder: Path) -> None:
    """All of it, beside the jobs in `folder`."""
    shutil.rmtree(PLACE, ignore_errors=True)
    shutil.copytree(folder, WORK, ignore=shutil.ignore_patterns(*MADE))
    SOURCE.symlink_to(Path(__file__).resolve().parents[2] / "src")
    sinks()
    maps()
    neutral()
    for name in MADE:
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(WORK / name, folder / name)
    shutil.rmtree(PLACE)


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve())
