"""`python -m soak soak|fuzz|races|readers`: exit 0, or 1 and the seed of what is broken, its folder kept."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from soak.fuzz import Case
from soak.races import races, readers
from soak.siege import Siege, Tally
from soak.witness import Broken


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("what", choices=["soak", "fuzz", "races", "readers"])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long; the last one is finished")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--only", type=int, help="replay this one alone")
    parser.add_argument("--without", default="", help="names of what is left out: jsonl,merge,hang,STOP,two,…")
    parser.add_argument("--times", type=int, help="how many: sieges, cases, driver starts or reads")
    parser.add_argument("--folder", help="where; default in memory")
    a = parser.parse_args(argv)
    # A shell has what it starts in the background ignore interrupts, which runs would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    root = Path(tempfile.mkdtemp(prefix=f"gristmill-{a.what}-", dir=a.folder or _memory()))
    without = tuple(a.without.split(",")) if a.without else ()
    if a.what in ("races", "readers"):
        return {"races": races, "readers": readers}[a.what](a.seed, a.times or 100, root)
    numbers = range(a.only, a.only + 1) if a.only is not None else range(a.times or 10**9)
    todo = {"soak": soak, "fuzz": fuzz}[a.what]
    return todo(a.seed, 1e9 if a.times else a.minutes * 60, numbers, without, root)


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def soak(seed: str, seconds: float, numbers: range, without: tuple[str, ...], root: Path) -> int:
    """Siege after siege until the time is over; a broken one does not stop the others."""
    begun, broken, tally = time.monotonic(), [], Tally()
    for number in numbers:
        if time.monotonic() - begun > seconds:
            break
        folder = root / str(number)
        folder.mkdir()
        siege = Siege(f"{seed}/{number}", folder, without, tally)
        s, at = siege.setting, time.monotonic()
        try:
            siege.run()
            how = "ok"
            shutil.rmtree(folder)
        except Exception as e:
            how = f"BROKEN {e if isinstance(e, Broken) else traceback.format_exc(limit=-3)}"
            broken.append(number)
        tally.counts["sieges"] += 1
        about = f"{s.source} -> {s.sink} {s.model['batch_format']}/{s.model['args']['shape']} {s.engine} {s.running}"
        print(
            f"[{number}] {time.monotonic() - at:.0f} s {about} {' '.join(s.poison[:8])}: {' '.join(siege.story)}: {how}"
        )
        if how != "ok":
            names = ",".join(without)
            extra = f" ARGS=\"--without '{names}'\"" if names else ""
            print(f"    kept: {folder}\n    replay: make soak SEED={seed} ONLY={number}{extra}", flush=True)
        sys.stdout.flush()
    print(f"{time.monotonic() - begun:.0f} s: {tally}")
    print(f"soak: seed {seed}: {len(broken)} of {tally.counts['sieges']} sieges broken {broken or ''}")
    return 1 if broken else 0


def fuzz(seed: str, seconds: float, numbers: range, without: tuple[str, ...], root: Path) -> int:
    """Case after case; one in forty with two workers."""
    begun, broken, done = time.monotonic(), [], Counter[str]()
    for number in numbers:
        if time.monotonic() - begun > seconds:
            break
        folder = root / str(number)
        folder.mkdir()
        case = Case(f"{seed}/{number}", folder, 2 if number % 40 == 39 and "workers" not in without else 0, without)
        try:
            case.run()
            shutil.rmtree(folder)
        except Exception as e:
            broken.append(number)
            text = str(e) if isinstance(e, Broken) else traceback.format_exc(limit=-3)
            print(f"[{number}] {case.story}: BROKEN {text}")
            print(f"    kept: {folder}\n    replay: make fuzz SEED={seed} ONLY={number}", flush=True)
        done["refused: " + case.refused if case.refused else case.kind] += 1
    for what, count in sorted(done.items()):
        print(f"{count:6} {what}")
    took = time.monotonic() - begun
    print(f"fuzz: seed {seed}: {len(broken)} of {done.total()} cases broken in {took:.0f} s {broken or ''}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
