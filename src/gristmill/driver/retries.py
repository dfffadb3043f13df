"""Whether a shard is tried again after it failed, or after a worker died with it: how often, who is to blame, and the
error that a run ends with when it is not. Pure decisions, as in shardfeed, which asks.
"""

from __future__ import annotations

import errno
import signal as signals
from collections.abc import Callable

from gristmill.errors import (
    BadJob,
    BadModel,
    BadOutput,
    GristmillError,
    MissingExtra,
    PlanChanged,
    RunFailed,
    SourceChanged,
)
from gristmill.process.failure import LATE, ended
from gristmill.process.messages import CLOSED, Death, Failure, FailureKind
from gristmill.values import dataclass

TRIES = 3  # attempts at a shard whose failure may be transient (a disk that hiccups)
DEATHS = 64  # workers that one shard may cost before the run stops: enough to isolate several rows in it
KILLS = 20  # kills from outside that one shard may see
CUTS = 3  # workers of one shard that may lose their pipes: what would note the row to blame is lost with these

_TRANSIENT: tuple[FailureKind, ...] = ("io", "other")
_OUTSIDE = {int(getattr(signals, n)) for n in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP") if hasattr(signals, n)}
_BY_KIND: dict[FailureKind, type[GristmillError]] = {
    "output": BadOutput, "undeclared": BadOutput, "source": SourceChanged, "load": BadModel,
}  # fmt: skip
_BY_CLASS = {kind.__name__: kind for kind in (MissingExtra, BadJob, PlanChanged)}


@dataclass
class Attempts:
    """The attempts at one shard, or at the first rows: which one comes next, how the earlier ones ended, and how the
    next one is made: `careful` looks for the row that kills its worker, whose attempt `blame` names and which died so
    (`how`); `proven` says that the model is known to work, so that rows on which it fails are to blame.
    """

    number: int = 0
    errors: int = 0
    deaths: int = 0
    kills: int = 0
    cuts: int = 0
    careful: bool = False
    blame: str = ""
    how: str = ""
    proven: bool = False

    def first_rows_failed(self, error: Failure) -> bool:
        """Count a failure of the first rows. Returns whether they are tried again."""
        return error.kind in _TRANSIENT and self._once_more()

    def failed(self, error: Failure) -> bool:
        """Count a failure of a shard that no single row is to blame for. Returns whether it is tried again."""
        if error.kind not in (*_TRANSIENT, "sick", "model", "memory") or not self._once_more():
            return False
        self.proven = self.proven and error.kind != "sick"
        return True

    def died(self, death: Death, blamed: str) -> bool:
        """Count the death of a worker, for which rows are to blame if `blamed` names an attempt; "" if none are.
        Returns whether it is tried again.
        """
        self.careful = self.careful or bool(blamed)
        self.blame, self.how = blamed, how(death) if blamed else ""
        self.deaths += bool(blamed)
        self.kills += not blamed
        self.cuts += death.exit_code == CLOSED
        return self.deaths < DEATHS and self.kills < KILLS and self.cuts < CUTS

    def _once_more(self) -> bool:
        if self.errors + 1 >= TRIES:
            return False
        self.errors += 1
        return True


def rows_to_blame(death: Death, out_of_memory: Callable[[Death], bool]) -> bool:
    """Whether the rows may be to blame for a death: a kill from outside, with no evidence that memory ran out, is not
    their fault, and neither is a machine that was lost.
    """
    if death.lost:
        return False
    return death.signal not in _OUTSIDE or (death.signal == 9 and out_of_memory(death))


_FULL = tuple(f"[Errno {number}]" for number in (errno.ENOSPC, errno.EDQUOT))


def error_of(failure: Failure, where: str, sink: str) -> GristmillError:
    """What a run into this sink ends with after a failure that is not tried again."""
    if failure.kind == "space" and failure.message.startswith(_FULL):  # where in the code is of no use to anybody
        return RunFailed(
            f"{where}: {failure.message}: what was committed stays: free space on the disk of the sink ({sink}), or of "
            "the folder for temporary files (TMPDIR), and run again"
        )
    if failure.ours:
        return _BY_CLASS.get(failure.ours, _BY_KIND.get(failure.kind, RunFailed))(failure.message)
    text = f"{where}: {failure.type}: {failure.message}\n{failure.traceback}".rstrip()
    return (RunFailed if failure.kind == "load" else _BY_KIND.get(failure.kind, RunFailed))(text)


def how(death: Death) -> str:
    """How a worker died, in words."""
    return ended(death, LATE)
