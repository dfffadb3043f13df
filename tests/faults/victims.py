"""User code as fault tests hand it to jobs: models that log whom they were called for, and models that do harm."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import itertools
import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np

Batch = dict[str, np.ndarray]


def _log(log: str | None, batch: Batch) -> None:
    if log is not None:
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, (" ".join(str(int(i)) for i in batch["id"]) + "\n").encode())
        os.close(fd)


def _answer(batch: Batch) -> Batch:
    return {"y": batch["x"] * 2.0 + batch["id"]}


def scored(batch: Batch, log: str | None = None, bad: tuple[int, ...] = ()) -> Batch:
    """A row-wise answer; raises for bad rows."""
    _log(log, batch)
    for i in batch["id"].tolist():
        if i in bad:
            raise ValueError(f"row {i} is bad")
    return _answer(batch)


def grouped(batch: Batch, log: str | None = None, bad: tuple[int, ...] = ()) -> Batch:
    """As `scored`, and one of three groups."""
    return {**scored(batch, log, bad), "group": batch["id"] % 3}


def refused(batch: Batch) -> list[Exception]:
    """An error in the place of every answer."""
    return [ValueError("no") for _ in batch["id"]]


def vector(batch: Batch) -> Batch:
    """A vector a row."""
    return {"v": np.stack([batch["x"], batch["id"]], axis=1).astype(np.float32)}


def vectors(batch: Batch, log: str | None = None, bad: tuple[int, ...] = ()) -> Batch:
    """As `scored`, but vectors."""
    scored(batch, log, bad)
    return vector(batch)


def slow(batch: Batch, log: str | None = None, seconds: float = 0.01) -> Batch:
    """The same, taking its time."""
    _log(log, batch)
    time.sleep(seconds)
    return _answer(batch)


def reported(rows: Any, folder: str) -> None:
    """A `reduce`: how many rows there are, and one thing that is different each time."""
    count = sum(batch.num_rows for batch in rows)
    with open(os.path.join(folder, "rows.txt"), "w") as file:
        file.write(f"{count} {os.urandom(8).hex()}")


def segfault() -> None:
    """A real one."""
    ctypes.string_at(0)


def hold_the_gil() -> None:
    """Sleep for an hour without letting any other thread run."""
    ctypes.PyDLL(None).usleep(3600 * 1_000_000)
    while True:
        ctypes.PyDLL(None).usleep(900_000_000)


def close_all() -> None:
    """As code that makes itself a daemon does."""
    os.closerange(3, 256)


def replace_all() -> None:
    """The same, so that writing still succeeds."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3, 64):
        with contextlib.suppress(OSError):
            os.fstat(number)
            os.dup2(nothing, number)


HARM = {
    "close": close_all,
    "replace": replace_all,
    "segfault": segfault,
    "exit": lambda: os._exit(3),
    "sysexit": lambda: sys.exit(4),
    "gil": hold_the_gil,
    "hang": lambda: time.sleep(3600),
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "memory": lambda: _raise(MemoryError("no room")),
}


def _raise(error: BaseException) -> None:
    raise error


def harmful(batch: Batch, bad: dict[str, str], log: str | None = None) -> Batch:
    """Does harm for the rows in `bad` (id -> what)."""
    _log(log, batch)
    for i in batch["id"].tolist():
        if str(i) in bad:
            HARM[bad[str(i)]]()
    return _answer(batch)


def harmful_step(batch: Batch) -> Batch:
    """A step that ends the process at two rows."""
    if {85, 86} & set(batch["id"].tolist()):
        segfault()
    return {"x": batch["x"]}


def deadly_tokeniser(batch: Batch) -> Batch:
    """A step that changes no row, but makes this process's tokeniser end it at texts with "poison" in them."""
    from gristmill.models.text import TextTokens

    tokens = TextTokens.tokens
    if tokens.__module__ != __name__:

        def deadly(self: Any, texts: Any) -> Any:
            if any("poison" in text for text in texts):
                segfault()
            return tokens(self, texts)

        TextTokens.tokens = deadly  # type: ignore[method-assign]
    return {"_row": batch["_row"]}


def harmful_row(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The same for one row at a time."""
    if row["id"] in (85, 86):
        os._exit(5)
    return [{"x": row["x"]}]


def twice(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row as two."""
    return [{"x": row["x"]}, {"x": -row["x"]}]


def once(batch: Batch, marker: str, at: int, what: str, log: str | None = None) -> Batch:
    """Does harm at row `at`, once: the file `marker` tells that it has."""
    _log(log, batch)
    if at in batch["id"].tolist() and not os.path.exists(marker):
        open(marker, "w").close()
        HARM[what]()
    return _answer(batch)


class Tee:
    """A stream in two places, without a descriptor, as programs that log everything have it."""

    def __init__(self, *to: Any) -> None:
        self.to = to

    def write(self, text: str) -> None:
        for stream in self.to:
            stream.write(text)

    def flush(self) -> None:
        for stream in self.to:
            stream.flush()


def _printed_elsewhere(how: str) -> None:
    if how == "none":
        sys.stdout = sys.stderr = None  # type: ignore[assignment]
    elif how == "closed":
        sys.stdout.close()
        sys.stderr.close()
    elif how == "text":
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
    elif how == "tee":
        sys.stdout, sys.stderr = Tee(sys.__stdout__, io.StringIO()), Tee(sys.__stderr__, io.StringIO())  # type: ignore[assignment]
        print("it is heard")
    elif how == "timer":
        faulthandler.cancel_dump_traceback_later()
    elif how == "descriptors":
        os.close(2)
        os.closerange(300, 1000)


class Unheard:
    """Takes the streams or the timer of its process away, in every batch; `once` as the function of that name."""

    def __init__(self, how: str, once: dict[str, Any]) -> None:
        self.how, self.once = how, once

    def __call__(self, batch: Batch) -> Batch:
        _printed_elsewhere(self.how)
        time.sleep(0.3)  # so that the watch is set again after the next batch
        return once(batch, **self.once)

    def close(self) -> None:
        raise RuntimeError("it cannot be closed")


def silenced(batch: Batch, how: str) -> Batch:
    """A step that keeps its process from printing: while it works, or for ever."""
    if how == "redirected":
        with contextlib.redirect_stderr(io.StringIO()):
            time.sleep(0.3)
    else:
        _printed_elsewhere(how)
    return {"x": batch["x"]}


def fails_from(batch: Batch, marker: str) -> Batch:
    """Works until the file `marker` is there, then fails for every row."""
    if os.path.exists(marker):
        raise RuntimeError("the licence has expired")
    return _answer(batch)


def always_fails(batch: Batch, log: str | None = None) -> Batch:
    """A model that is broken."""
    _log(log, batch)
    raise RuntimeError("no weights in here")


def odd(batch: Batch) -> Batch:
    """A step that lets even ids through."""
    return {"_row": batch["_row"][batch["id"] % 10 != 7]}


class Loaded:
    """A model that says when it is loaded."""

    def __init__(self, marker: str) -> None:
        open(marker, "w").close()

    def __call__(self, batch: Batch) -> Batch:
        return _answer(batch)


_calls = [0]  # of this process
_leaked: list[bytes] = []


def breaks(batch: Batch, marker: str, after: int) -> Batch:
    """Works for `after` calls of any process, then fails for ever, in every process."""
    _calls[0] += 1
    if _calls[0] > after:
        open(marker, "w").close()
    return fails_from(batch, marker)


def cuda_out_of_memory(batch: Batch, most: int, log: str) -> Batch:
    """A model whose GPU holds `most` rows: torch's own exception for more. Logs the size of each call."""
    import torch

    with open(log, "a") as file:
        file.write(f"{len(batch['id'])}\n")
    if len(batch["id"]) > most:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return _answer(batch)


def leaks(batch: Batch, log: str, size: int) -> Batch:
    """Keeps `size` bytes a call, and says in which process."""
    _leaked.append(b"x" * size)
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\n")
    return _answer(batch)


def unpicklable(batch: Batch, bad: list[int]) -> Batch:
    """Raises what neither pickle nor str can take."""

    class Odd(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(a, b)
            self.held = (x for x in ())

        def __reduce__(self) -> Any:
            raise TypeError("not me")

        def __str__(self) -> str:
            raise ValueError("no words")

    if set(bad) & set(batch["id"].tolist()):
        raise Odd(1, 2)
    return _answer(batch)


def floods(batch: Batch, size: int) -> Batch:
    """Prints a lot, on both streams, through Python and past it."""
    print("o" * size)
    sys.stderr.write("e" * size + "\n")
    os.write(1, b"w" * size + b"\n")
    return _answer(batch)


def big(batch: Batch, width: int) -> Batch:
    """An answer that does not compress."""
    rng = np.random.default_rng(int(batch["id"][0]))
    return {"y": rng.random((len(batch["id"]), width))}


def fails_big(batch: Batch, bad: int) -> Batch:
    """Rows under `bad` die, with their large payload in the letter."""
    if (batch["id"] < bad).any():
        raise ValueError("too big to fail")
    return {"y": batch["id"] * 1.0}


def touches(batch: Batch, path: str, at: int, marker: str) -> Batch:
    """Changes a source file while it is being read, once."""
    if at in batch["id"].tolist() and not os.path.exists(marker):
        open(marker, "w").close()
        os.utime(path, ns=(1_500_000_000_000_000_000, 1_500_000_000_000_000_000))
    return _answer(batch)


def rewrites(batch: Batch, folder: str, name: str, by: str, at: int, marker: str) -> Batch:
    """Puts the content of `by` into a source file while it is being read, once, under the time that it had."""
    path = os.path.join(folder, name)
    if at in batch["id"].tolist() and not os.path.exists(marker):
        open(marker, "w").close()
        stat = os.stat(path)
        with open(by, "rb") as other, open(path, "r+b") as file:
            file.write(other.read())
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return _answer(batch)


def wrong(batch: Batch, how: str) -> Any:
    """Breaks the contract of a row for each row."""
    rows = len(batch["id"])
    y = batch["x"]
    return {
        "few": {"y": y[:-1]},
        "many": {"y": np.append(y, 0.0)},
        "none": None,
        "generator": (v for v in y),
        "nan": {"y": np.where(batch["id"] == 5, np.nan, y)},
        "dtype": {"y": y if rows and batch["id"][0] < 100 else np.array(["text"] * rows)},
        "width": {"y": np.zeros((rows, 3 if rows and batch["id"][0] < 100 else 4))},
    }[how]


def lengths(batch: Batch) -> Batch:
    """How long a text is; None and its kin are told apart."""
    return {"n": np.array([-1 if t is None else len(t) for t in batch["text"]], dtype=np.int64)}


def table(rows: int, start: int = 0) -> Any:
    """`rows` rows of id and x."""
    import pyarrow as pa

    ids = np.arange(start, start + rows)
    return pa.table({"id": ids, "x": np.sqrt(ids.astype(np.float64))})


def write_input(folder: str, rows: int, files: int = 2) -> str:
    """`rows` rows as several Parquet files."""
    import pyarrow.parquet as pq

    os.makedirs(folder, exist_ok=True)
    bounds = [rows * i // files for i in range(files + 1)]
    for n, (a, b) in enumerate(itertools.pairwise(bounds)):
        pq.write_table(table(b - a, a), os.path.join(folder, f"{n}.parquet"))
    return folder


def tagged(batch: Batch, log: str) -> Batch:
    """A step that passes rows on, and notes the process that it ran in."""
    with open(log, "a") as file:
        file.write(f"{os.getpid()} {os.getppid()}\n")
    time.sleep(0.02)
    return {"x": batch["x"] + 1.0}


def tagged_model(batch: Batch, log: str) -> Batch:
    """A row-wise answer, and a note of its process."""
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\n")
    return _answer(batch)


def broken_step(batch: Batch) -> Batch:
    """A step that returns too few rows."""
    return {"x": batch["x"][1:]}


def hanging_step(batch: Batch, marker: str) -> Batch:
    """A step that once does not return, and lets no other thread run."""
    if not os.path.exists(marker):
        open(marker, "w").close()
        hold_the_gil()
    return {"x": batch["x"]}


def _killed_at(stage: str, ids: Any, bad: str) -> None:
    """The file "bad" in a folder says at which ids a stage ends its process; slow where it says "slow"."""
    with open(os.path.join(bad, "bad")) as file:
        told = json.load(file)
    if set(told.get(stage, ())) & {int(i) for i in ids}:
        segfault()
    if stage == "model" and set(told.get("raising", ())) & {int(i) for i in ids}:
        raise ValueError("not this one")
    if stage == "model" and set(told.get("slow_rows", ())) & {int(i) for i in ids}:
        time.sleep(5.0)
    if stage != "flat_map":  # which is called for each row
        time.sleep(told.get("slow", 0.0))


def deadly_filter(batch: Batch, bad: str) -> np.ndarray:
    """A filter that lets all rows through, or dies."""
    _killed_at("filter", batch["id"], bad)
    return batch["id"] >= 0


def deadly_map(batch: Batch, bad: str) -> Batch:
    """A step that dies of some rows."""
    _killed_at("map", batch["id"], bad)
    return {"x": batch["x"]}


def deadly_flat_map(row: dict[str, Any], bad: str) -> list[dict[str, Any]]:
    """Two rows of each, or an end. Their `twin` is twice the id, plus 1 for the second."""
    _killed_at("flat_map", [row["id"]], bad)
    return [{"twin": 2 * row["id"]}, {"twin": 2 * row["id"] + 1}]


def deadly_derived(batch: Batch, bad: str) -> Batch:
    """A step on derived rows that dies of some of them."""
    _killed_at("derived", batch["twin"], bad)
    return {"x": batch["x"]}


def deadly_model(batch: Batch, bad: str) -> Batch:
    """A model that dies of some rows."""
    _killed_at("model", batch["twin"], bad)
    return _answer(batch)


def deadly_post(batch: Batch, bad: str) -> Batch:
    """A step after the model that dies of some rows."""
    _killed_at("post", batch["twin"], bad)
    return {"z": batch["y"]}


def hangs_apart(batch: Batch, marker: str) -> Batch:
    """A step that does not return where it runs in a process of its own, and lets no other thread run there."""
    if "worker.stepprocesses" in " ".join(sys.orig_argv):
        open(marker, "w").close()
        hold_the_gil()
    return {"x": batch["x"]}


def signalled(batch: Batch) -> Batch:
    """A model that gets its process a signal at row 150, and takes its time afterwards."""
    if 150 in batch["id"].tolist():
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        time.sleep(0.3)
    return _answer(batch)


def signalling(staged: Any) -> None:
    """An audit that does so."""
    os.kill(os.getpid(), int(os.environ["SIGNAL"]))


def content(staged: Any) -> None:
    """An audit that has nothing to say."""
