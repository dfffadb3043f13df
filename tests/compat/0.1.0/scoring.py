"""What the kept sinks were scored with. Their plans know this code: a change makes each job another one."""

import os
import pickle
import signal
import time

BAD = 3


def score(rows):
    """Every seventh row fails."""
    doubled = pickle.loads(b"crating\ndoubled\n.")  # known as it is loaded, and noted beside the plan
    return [_failed(row) if row["n"] % 7 == BAD else {"y": doubled(row["n"]), **_said(row)} for row in rows]


def logged(rows, log):
    """The same, writing a file that an argument names."""
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"{len(rows)}\n")
    return score(rows)


def vectors(rows):
    """A vector a row."""
    return [_failed(row) if row["n"] % 7 == BAD else {"v": [row["n"] + 0.5, -1.0, 0.0]} for row in rows]


def deadly(rows):
    """Row 100 ends the process; every call takes its time, so that a run can be killed in the middle."""
    time.sleep(0.05)
    if any(row["n"] == 100 for row in rows):
        os.kill(os.getpid(), signal.SIGSEGV)
    return score(rows)


def slow(rows):
    """As `score`, and stops for long at row 150, which only an append has."""
    if any(row["n"] == 150 for row in rows):
        time.sleep(60)
    return score(rows)


def _failed(row):
    return ValueError(f"{row['n']} cannot be scored")


def _said(row):
    return {"word": row["text"].upper()}
