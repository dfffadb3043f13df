"""Functions of one row, as workers import them."""

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path


class Beside:
    """Counts how many calls go on at once, in all workers: a file a call in `folder` while it lasts."""

    def __init__(self, folder):
        self.folder, self.most = Path(folder), 0

    async def __call__(self, row):
        mine = self.folder / f"on-{row['x']}"
        mine.touch()
        found = len(list(self.folder.glob("on-*")))
        with (self.folder / f"most-{os.getpid()}").open("a") as file:
            file.write(f"{found}\n")
        await asyncio.sleep(0.01)
        mine.unlink()
        return row["x"] * 2

    async def aclose(self):
        await asyncio.sleep(0)
        (self.folder / f"closed-{os.getpid()}").touch()


async def odd(row):
    """Slow for some, wrong for others, and each answer of a form of its own."""
    x = row["x"]
    await asyncio.sleep(0.3 if x % 100 == 3 else 0.001 * (x % 7))
    if x % 50 == 11:
        raise ValueError(f"not {x}")
    if x % 97 == 5:
        raise SystemExit(3)
    if x % 89 == 6:
        raise asyncio.CancelledError
    return {"y": x * 2, "said": f"row {x}"}


def in_threads(row):
    time.sleep(0.002)
    if row["x"] == 13:
        raise KeyboardInterrupt
    return {"y": row["x"] * 2, "thread": threading.current_thread().name}


async def stuck(row):
    if row["x"] == 7:
        await asyncio.sleep(3600)
    return row["x"]


async def fails(row):
    raise ConnectionError("refused")


async def deadly(row):
    await asyncio.sleep(0.001)
    if row["x"] == 301:
        os._exit(9)
    return row["x"] + 1


async def slow(row):
    await asyncio.sleep(30)
    return row["x"]


async def asked(row, file):
    """Notes each row that it is asked for."""
    with open(file, "a") as out:
        out.write(json.dumps(row["x"]) + "\n")
    return {"n": row["x"], "twice": 2 * row["x"]}


async def at_first(row, folder):
    """Answers 900 rows, and the others once there is a file `again`."""
    await asyncio.sleep(0.001)
    calls = Path(folder) / "calls"
    with calls.open("a") as file:
        file.write("x")
    if calls.stat().st_size > 900 and not (Path(folder) / "again").exists():
        raise ConnectionError("refused")
    return row["x"] * 3


class Closing:
    """Ends badly."""

    def __init__(self, how):
        self.how = how

    async def __call__(self, row):
        return row["x"] * 2

    async def aclose(self):
        if self.how == "exits":
            sys.exit(5)
        if self.how == "raises":
            raise OSError("no")
        task = asyncio.create_task(asyncio.sleep(1000))
        task.cancel()
        await task


class BatchClosing:
    """Ends badly, and takes batches."""

    def __call__(self, batch):
        return batch["x"] * 2

    def close(self):
        sys.exit(0)
