"""What a model that answers row by row has answered for a shard that is not committed yet, so that it is not asked for
again: an append-only file an attempt beside the receipts, gone once the shard is committed.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import hashlib
import json
import os
import struct
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from gristmill.commit.allowance import Allowance
from gristmill.commit.inherited import Inherited
from gristmill.commit.once import Once
from gristmill.files.contract import Files
from gristmill.files.disk import LocalFiles, join
from gristmill.job.secret import Secret, scrub
from gristmill.models.batches import noted
from gristmill.process.failure import EarlierFailure
from gristmill.process.messages import Failure
from gristmill.process.ownstderr import say
from gristmill.shards.counts import summed

SOON = 0.5  # seconds after which an answer is in a store; on a disk it is there at once.
# Where code has to be compared first, that takes a part of the time: after each, answers are collected for so many
# times what it took (a millisecond, mostly: less than an answer is in flight), at most for so many seconds.
RESTS, AT_ONCE = 4, 0.1
AGAIN = 0.5  # seconds until what could not be written is written again
PROBE = "probe"  # instead of a shard's number: the first rows, of whichever shards
_HEAD = struct.Struct("<16sII")  # the row's digest, the length of the answer, and the CRC-32 of all three
TRACE = 4_000  # characters of a failed row's traceback that are kept, the last ones
_UNKEPT = bytes(16)  # instead of a row's digest: what an answer has taken that is not kept itself
_NOTE = b"\xff" * 16  # instead of a row's digest: what the model notes of the shard
_FIRST = b"\xfe" * 16  # and the first answer to a row that is asked for once more
_USED, _ONCE = "used", "once"  # of a note: what was taken, and what that was for, which counts once
_KEPT = (str, int, float, bool, type(None))
# What rows are made of (arrow.topython); an extension type of the user's may give anything.
_TOLD = {
    *_KEPT, bytes, decimal.Decimal, datetime.datetime, datetime.date, datetime.time, datetime.timedelta,
}  # fmt: skip


Place = tuple[str, int]  # a row's file and position


class Journal:
    """The answers of one attempt at a shard, in some run, and those of earlier attempts. `folder` is the generation's;
    the first rows, of a probe, are in no shard (None): `holds` says of a place whether this shard has it.

    Rows that failed for themselves are kept, too, without what is in `secrets`, and for attempts of the same run alone:
    what an endpoint refuses today it may take tomorrow.

    `stands` is called after answers came and before they are kept, in any thread: it raises if the code that gave them
    is not as planned, and the answers must not be used by another attempt. On a disk each is kept as it comes, but for
    those that come while code was just compared, which are kept together.

    `before` is what all that was answered in earlier attempts has taken (models.contract.USED), in this run or another;
    the first rows' part is in that of the first shard. `notes` are those that earlier attempts at this shard have made,
    in the order in which each made them.

    `inherits` are shards of earlier generations that were given up: what they were answered is as if an earlier attempt
    at this shard had been, and is gone with its journal. `inherited` are the folders of all generations of which any
    shard inherits something.
    """

    def __init__(
        self,
        folder: str,
        shard: int | None,
        run: str,
        attempt: str,
        files: Files,
        stands: Callable[[], None] | None = None,
        allowance: Allowance | None = None,
        holds: Callable[[Place], bool] | None = None,
        secrets: tuple[Secret, ...] = (),
        once: Callable[[], Once] | None = None,
        inherits: Sequence[Inherited] = (),
        inherited: Sequence[str] = (),
    ) -> None:
        self.allowance = allowance
        self.once = once
        self.before: Mapping[str, float] = {}
        self.notes: list[Any] = []
        self._told: set[str] = set()  # what was noted with what it took, which counts once
        self.name = f"{os.path.basename(folder)}/{self._label(shard)}"
        self._stands = stands
        self._secrets = secrets
        self._files = files
        self._folder = join(folder, "journal")
        self._shard = f"{self._label(shard)}."
        self._path = join(self._folder, f"{self._shard}{run}.{attempt}")
        self._lock = threading.Lock()
        self._storing = threading.Lock()  # held from when answers are taken until they are written
        self._busy = False  # the same, for whoever does not wait
        self._out: Any = None
        self._ended = False
        self.closed = False
        self.trouble: Exception | None = None  # see models.contract.Journal
        self._whole, self._torn = 0, False  # bytes of whole records in the file, and whether there may be others
        self._waiting: list[bytes] = []
        self._segments = 0
        self._timer: threading.Timer | None = None
        self._free = 0.0  # when code may be compared again
        self._earlier: dict[bytes, deque[Any]] = {}
        self._firsts: dict[bytes, deque[tuple[str, Any, dict[str, float]]]] = {}
        ended: Counter[bytes] = Counter()  # rows with an answer, or a failure, after their first answer
        for name in sorted(files.names(self._folder)):
            if name.startswith((self._shard, f"{PROBE}.")) and not name.endswith(".tmp"):
                own, ours = name.startswith(self._shard), name.split(".")[1] == run
                with contextlib.suppress(FileNotFoundError):  # an attempt that was given up has committed after all
                    data = files.read(join(self._folder, name))
                    self._read(data, own or shard == 0, ours, None if own else holds, ended)
        self._generations = (*inherited, folder)
        self._inherited = [path for one in inherits for path in self._of_before(one)]
        for path in self._inherited:
            with contextlib.suppress(FileNotFoundError):  # the same
                self._read(files.read(path), True, False, None, ended)
        for key, firsts in self._firsts.items():
            for _ in range(min(len(firsts), ended[key])):
                firsts.popleft()

    def ready(self) -> None:
        """Called before anything is asked, so that what is paid for can be kept. Raises OSError."""
        if isinstance(self._files, LocalFiles):
            with self._lock:
                self._opened()

    def _of_before(self, one: Inherited) -> list[str]:
        """The journals of a shard of an earlier generation; the first rows' answers are with those of shard 0."""
        folder = join(one.folder, "journal")
        labels = (f"{self._label(one.shard)}.", *([f"{PROBE}."] if one.shard == 0 else []))
        names = sorted(self._files.names(folder))
        return [join(folder, name) for name in names if name.startswith(labels) and not name.endswith(".tmp")]

    @staticmethod
    def _label(shard: int | None) -> str:
        return PROBE if shard is None else f"{shard:07d}"

    def _read(
        self, data: bytes, own: bool, ours: bool, holds: Callable[[Place], bool] | None, ended: Counter[bytes]
    ) -> None:
        taken = [self.before]
        for key, kept in _records(data):
            if key == _NOTE:
                self.notes.append(note := json.loads(kept))
                taken.append(_took_once(note, self._told))
                continue
            if key == _FIRST:
                answer, used, row, request = json.loads(kept)
                self._firsts.setdefault(bytes.fromhex(row), deque()).append((request, answer, used))
                continue
            ended[key] += 1
            answer, used, *more = json.loads(kept)
            place, failed = (*more, None, None)[:2]
            if own and used:
                taken.append(used)
            if key == _UNKEPT or (failed and not ours) or (place and holds and not holds((place[0], place[1]))):
                continue
            found = EarlierFailure(Failure("model", *failed)) if failed else answer
            self._earlier.setdefault(key, deque()).append(found)
        self.before = summed(taken)

    def key(self, row: Any) -> bytes:
        """See models.contract.Journal: 16 bytes; none for a row with a value whose text may be that of another one."""
        if not _told(row):
            return b""
        return hashlib.blake2b(repr(row).encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def earlier(self, key: bytes) -> tuple[bool, Any]:
        """See models.contract.Journal."""
        found = self._earlier.get(key)
        return (True, found.popleft()) if found else (False, None)

    def held(self, key: bytes) -> int:
        """See models.contract.Journal."""
        return len(self._earlier.get(key, ()))

    def everywhere(self) -> list[Any]:
        """See models.contract.Journal."""
        return [note for folder in self._generations for note in notes(folder, self._files)]

    def note(self, told: Mapping[str, Any], used: Mapping[str, float] | None = None, once: str = "") -> None:
        """See models.contract.Journal."""
        noted = {**told, **({_USED: dict(used)} if used else {}), **({_ONCE: once} if once else {})}
        self._noted(_record(_NOTE, json.dumps(noted).encode()))
        with self._lock:
            self.before = summed([self.before, _took_once(noted, self._told)])

    def _noted(self, record: bytes) -> None:
        with self._lock:
            if self._ended:
                raise OSError(f"{self._folder}: the journal of this attempt is closed")
            if isinstance(self._files, LocalFiles):
                self._append(record)
                os.fsync(self._out.fileno())
                return
            self._segments += 1
            segment = self._segments
        self._files.note(f"{self._path}-{segment:06d}", record)

    def put(self, key: bytes, answer: Any, used: Mapping[str, float], place: Place | None = None) -> None:
        """Keep an answer, if it has a key and is of plain values: texts, numbers, lists and dicts of these; and what it
        has taken. What cannot be written is written later: until then there is `trouble`, which is said once. `place`
        is that of a probe's row.
        """
        try:
            if not key or not _plain(answer):
                return self.took(used)
            self._put(key, [answer, dict(used), *([] if place is None else [place])])
        except (ValueError, RecursionError):  # whole numbers of thousands of digits; lists in lists without end
            self.took(used)

    def failed(self, key: bytes, failure: Failure, used: Mapping[str, float], place: Place | None = None) -> None:
        """See models.contract.Journal."""
        if not key:
            return self.took(used)
        told = [scrub(text, self._secrets) for text in (failure.type, failure.message, failure.traceback[-TRACE:])]
        self._put(key, [None, dict(used), place, told])

    def put_first(self, key: bytes, request: bytes, answer: Any, used: Mapping[str, float]) -> None:
        """See models.contract.Journal."""
        if key:
            self._put(_FIRST, [answer, dict(used), key.hex(), request.hex()])

    def first(self, key: bytes, request: bytes) -> tuple[Any, Mapping[str, float]] | None:
        """See models.contract.Journal."""
        firsts = self._firsts.get(key)
        if not firsts or firsts[0][0] != request.hex():
            return None
        _, answer, used = firsts.popleft()
        return answer, used

    def took(self, used: Mapping[str, float]) -> None:
        """Keep what an answer has taken that is not kept itself."""
        if used:
            self._put(_UNKEPT, [None, dict(used)])

    def spent(self, used: Mapping[str, float]) -> None:
        """See models.contract.Journal."""
        with self._lock:
            self.before = summed([self.before, used])
        self.took(used)

    def _put(self, key: bytes, kept: list[Any]) -> None:
        data = json.dumps(kept).encode("utf-8", "surrogatepass")
        record = _record(key, data)
        with self._lock:
            if self._ended:
                return
            if self._stands is None and isinstance(self._files, LocalFiles) and self.trouble is None:
                try:
                    return self._append(record)
                except OSError as e:
                    self._troubled(e)
            self._waiting.append(record)
            if self._timer is not None or self._busy:
                return
            wait = self._wait()
            if wait > 0:
                self._later(wait)
                return
        self._stored()

    def _wait(self) -> float:
        if self.trouble is not None:
            return AGAIN
        return self._free - time.monotonic() if isinstance(self._files, LocalFiles) else SOON

    def _later(self, wait: float) -> None:
        self._timer = threading.Timer(wait, self._stored)
        self._timer.daemon = True
        self._timer.start()

    def _append(self, records: bytes) -> None:
        """Raises OSError; nothing of them is in the file then, once something else is."""
        out = self._opened()
        if self._torn:  # what follows a part of a record could not be read
            out.truncate(self._whole)
        self._torn = True
        _write_all(out, records)
        self._whole, self._torn = self._whole + len(records), False

    def _opened(self) -> Any:
        if self._out is None:
            self._files.make_folder(self._folder)
            self._out = open(self._path, "ab", buffering=0)  # noqa: SIM115 - until the shard is committed
        return self._out

    def close(self) -> None:
        """No more answers come; those that are there are for a later attempt."""
        self._stored()  # and after what a timer's thread has taken
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._ended = self.closed = True
            if self._out is not None and not self._out.closed:
                if self._torn:
                    with contextlib.suppress(OSError):
                        self._out.truncate(self._whole)
                self._out.close()
                if not self._whole:
                    with contextlib.suppress(OSError):  # it is as good as gone: there is no answer in it
                        self._files.remove(self._path)

    def remove(self) -> None:
        """The shard is committed: its answers are in its files."""
        self._removed(self._shard)

    def spoil(self) -> None:
        """No column can be made of the answers."""
        self._removed(self._shard)

    def _removed(self, *of: str) -> None:
        with self._storing:  # or an answer comes to lie there afterwards
            self._end()
        for name in self._files.names(self._folder):
            if name.startswith(of):
                self._files.remove(join(self._folder, name))
        for path in self._inherited:
            self._files.remove(path)

    def _stored(self) -> None:
        with self._storing:
            with self._lock:
                records, self._waiting, self._timer = b"".join(self._waiting), [], None
                self._segments += 1
                segment = self._segments  # another thread may note meanwhile
                self._busy = bool(records) and not self._ended
                if not self._busy:
                    return
            try:
                self._store(records, segment)
            finally:
                with self._lock:
                    self._busy = False
                    if self._waiting and not self._ended:
                        self._later(max(0.0, self._wait()))

    def _store(self, records: bytes, segment: int) -> None:
        begun = time.monotonic()
        try:
            if self._stands is not None:
                self._stands()
                now = time.monotonic()
                self._free = now + min(AT_ONCE, RESTS * (now - begun))
        except Exception:  # the shard's end says so, too, and ends the run
            self._ended = True
            return
        try:
            if isinstance(self._files, LocalFiles):
                with self._lock:
                    if not self._ended:
                        self._append(records)
            elif not self._ended:
                self._files.note(f"{self._path}-{segment:06d}", records)
            self.trouble = None
        except Exception as e:  # whatever a store's library raises: the rows do not depend on it
            with self._lock:
                self._waiting.insert(0, records)
                self._troubled(e)

    def _troubled(self, error: Exception) -> None:
        if self.trouble is None:
            say(f"{self._folder}: answers cannot be kept there ({error}); until they can, a kill loses them")
        self.trouble = error


def _write_all(out: Any, data: bytes) -> None:
    """Write to an unbuffered file, which may take less at a time (a disk that is filling up, a signal)."""
    view = memoryview(data)
    while view:
        view = view[out.write(view) :]


def _record(key: bytes, data: bytes) -> bytes:
    return _HEAD.pack(key, len(data), _checksum(key, data)) + data


def _checksum(key: bytes, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(key + len(data).to_bytes(4, "little")))


def notes(folder: str, files: Files) -> list[Any]:
    """What was noted of all shards that are not committed, by any attempt; `folder` is the generation's."""
    found, folder = [], join(folder, "journal")
    for name in sorted(files.names(folder)):
        with contextlib.suppress(FileNotFoundError):  # committed meanwhile
            records = _records(files.read(join(folder, name)))
            found += [json.loads(kept) for key, kept in records if key == _NOTE]
    return found


def shards(folder: str, files: Files) -> set[int]:
    """The shards of which there are answers, the first rows' with those of shard 0; `folder` is the generation's."""
    labels = {n.partition(".")[0] for n in files.names(join(folder, "journal")) if not n.endswith(".tmp")}
    return {0 if label == PROBE else int(label) for label in labels}


def answered(folder: str, files: Files, committed: Container[int]) -> dict[str, float]:
    """What the answers for shards that are not committed have taken (models.contract.USED), how many are `kept`, how
    many more there are, or will be, in batches that are `batched` at a provider, and how many rows are asked `again`,
    as another run has no use for their answers; `folder` is the generation's. Nothing if there are none.
    """
    taken, folder = [], join(folder, "journal")
    firsts: dict[tuple[str, bytes], list[dict[str, float]]] = {}  # of first answers, by shard and row
    ended: Counter[tuple[str, bytes]] = Counter()
    told: dict[str, set[str]] = {}
    kept: Counter[bytes] = Counter()
    held: Counter[str] = Counter()  # of them, by shard
    told_of: dict[str, list[Any]] = {}  # notes, likewise
    failed: Counter[bytes] = Counter()  # rows of the attempt with most of them: each asks for them again
    for name in sorted(files.names(folder)):
        label = name.partition(".")[0]
        # What the first rows took is in the figures of shard 0.
        if name.endswith(".tmp") or (0 if label == PROBE else int(label)) in committed:
            continue
        with contextlib.suppress(FileNotFoundError):  # committed meanwhile
            own: Counter[bytes] = Counter()
            for key, data in _records(files.read(join(folder, name))):
                if key == _FIRST:  # what it took is told again with the row's last one
                    _, used, row, _ = json.loads(data)
                    firsts.setdefault((label, bytes.fromhex(row)), []).append(used)
                elif key == _NOTE:
                    told_of.setdefault(label, []).append(note := json.loads(data))
                    taken.append(_took_once(note, told.setdefault(label, set())))
                else:
                    _, used, *more = json.loads(data)
                    taken.append(used)
                    ended[label, key] += 1
                    if key != _UNKEPT:
                        for_itself = bool(more[1:] and more[1])
                        (own if for_itself else kept)[key] += 1
                        held[label] += not for_itself
            failed |= own
    for place, some in firsts.items():
        taken += some[ended[place] :]
    found, again = summed(taken), (failed - kept).total()
    more = [_noted_answers(notes, held[label]) for label, notes in told_of.items()]
    counted = {"batched": float(sum(n for _, n in more)), "again": float(again)}
    counted = {"kept": float(kept.total() + sum(n for n, _ in more)), **{name: n for name, n in counted.items() if n}}
    return {**found, **counted} if found or any(counted.values()) else {}


def _noted_answers(notes: Sequence[Any], rows: int) -> tuple[int, int]:
    """How many answers to requests that were made alone are noted of a shard, and how many are in batches, beside those
    that so many of its rows have taken.
    """
    alone = {note["digest"] for note in notes if "reply" in note} - {note["digest"] for note in notes if "void" in note}
    batched = sum(len(batch.digests) for batch in noted(notes) if batch.id and not (batch.over or batch.gone))
    left = max(0, len(alone) + batched - rows)
    return min(left, len(alone)), max(0, left - len(alone))


def _records(data: bytes) -> list[tuple[bytes, bytes]]:
    """The whole records of a file whose writer may have been killed in the middle of the last one, or whose end was
    never written by a machine that lost power: what follows what cannot be read is left.
    """
    found, at = [], 0
    while at + _HEAD.size <= len(data):
        key, length, crc = _HEAD.unpack_from(data, at)
        answer = data[at + _HEAD.size : at + _HEAD.size + length]
        if len(answer) < length or _checksum(key, answer) != crc:
            break
        found.append((key, answer))
        at += _HEAD.size + length
    return found


def _took_once(note: Any, told: set[str]) -> Mapping[str, float]:
    """What a note says was taken; nothing if another one has said so of the same."""
    used, once = note.get(_USED, {}), note.get(_ONCE)
    if once in told:
        return {}
    if once:
        told.add(once)
    return dict(used)


def _told(value: Any) -> bool:
    """Whether a value's text tells it from every other one."""
    kind = type(value)
    if kind is dict:
        return all(_told(key) and _told(item) for key, item in value.items())
    return all(map(_told, value)) if kind in (list, tuple) else kind in _TOLD


def _plain(value: Any) -> bool:
    """Whether JSON gives the same value back."""
    kind = type(value)
    if kind is dict:
        return all(type(key) is str and _plain(item) for key, item in value.items())
    return all(map(_plain, value)) if kind is list else kind in _KEPT
