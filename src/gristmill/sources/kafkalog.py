"""The log of a Kafka topic: its partitions, where they begin and end, and the records in a range of offsets.

Ranges of a partition look like files: `kafka://HOST:9092/TOPIC/3/1000-1500` are its offsets from 1,000 to 1,499. What
follows a `?` there says how values are read, and is the same for all ranges of a source.
"""

from __future__ import annotations

import errno
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from gristmill.errors import BadJob, BadSource, RunFailed, SourceChanged, did_you_mean
from gristmill.job.uris import redact
from gristmill.process.blockingcalls import heard
from gristmill.process.extras import require
from gristmill.process.interrupts import ENDING
from gristmill.sources.listing import Entry, Names
from gristmill.sources.openreaders import Waiting
from gristmill.sources.patience import PATIENCE, StoreAway
from gristmill.values import dataclass

__all__ = ["MARKS", "OURS", "Span", "TopicLog", "placed"]

OURS = ("value", "keys", "schema")  # options of an address that say how records are read
MARKS = "gristmill.marks"  # in the storage of ranges: what tells their topic from another of its name
REGISTRY, REGISTRY_USER = "schema.registry.url", "basic.auth.user.info"  # as Confluent's clients name them
ANSWER = 30.0  # seconds for a broker to say what is there, while a run is planned
_END_AGAIN = 5.0  # seconds after which an end before the planned one is believed
_TAIL = 5.0  # seconds to look for records behind the watermark of a partition that is written to all the time
_BEFORE = 16  # offsets before the end in which a last record is looked for: some are markers of transactions
_ONCE = 10_000  # records taken from the client at once
_CLIENT = {
    "group.id": "gristmill",  # no group is joined, but the client wants a name
    "client.id": "gristmill",
    "isolation.level": "read_committed",
    "fetch.wait.max.ms": 100,  # what the end of a partition takes to be told
    "queued.max.messages.kbytes": 32 << 10,
    "fetch.queue.backoff.ms": 10,  # by default a full queue costs a second, also after going elsewhere
    "log_level": 0,  # it would write to stderr; errors come by error_cb
}
_FIXED = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",  # an offset that is gone is an error, never another offset
}
_CONSUMERS: Waiting[_Consumer] = Waiting(4)
T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Span:
    """Offsets [low, high) of a partition. Two marks tell whether they are still those of the same topic: its id
    (`topic`; "" if the broker does not tell), and a record at the end, by its offset and a digest (`last`; "" if there
    is none).
    """

    partition: int
    low: int
    high: int
    topic: str = field(default="", compare=False)
    last: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """As the end of a path."""
        return f"{self.partition}/{self.low}-{self.high}"

    @staticmethod
    def of(name: str) -> Span:
        """The span that a path's end names."""
        partition, _, offsets = name.partition("/")
        low, _, high = offsets.partition("-")
        return Span(int(partition), int(low), int(high))


@dataclass(frozen=True, repr=False)
class TopicLog:
    """A topic as a listing of ranges. `said` are our options in its address, `schema` the text of the Avro schema that
    they name, `client` the properties of the client, with secrets, `marks` those of ranges, by their names. It can be
    pickled, as workers receive it.
    """

    brokers: str
    topic: str
    said: Mapping[str, str] = field(default_factory=dict)
    schema: str = ""
    client: Mapping[str, Any] = field(default_factory=dict)
    marks: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"TopicLog({self.shown})"

    @property
    def shown(self) -> str:
        """The topic's address without secrets."""
        return f"kafka://{self.brokers}/{self.topic}"

    # ------------------------------------------------ as a listing

    def look(self, path: str) -> Entry | None:
        """A range as a file. Nothing is asked of the broker: what a range holds never changes, and one that is gone is
        found when it is read.
        """
        span = Span.of(path)
        shaped = "\0".join([self.schema, *self.marks.get(span.name, ())]).strip("\0")
        stamp = hashlib.sha256(shaped.encode()).hexdigest()[:16] if shaped else "0"
        return Entry(path.rpartition("/")[2], False, span.high - span.low, stamp)

    def entries(self, folder: str, wanted: Names) -> list[Entry]:
        return []

    def tree(self, folder: str, skip: Names) -> Iterator[tuple[str, Entry]]:
        return iter(())

    def open(self, path: str) -> Any:
        raise BadSource(f"{self.shown}/{path}: is a range of records, not a file: format='kafka' reads it")

    # ------------------------------------------------ what is there

    def spans(self) -> list[Span]:
        """All that the topic holds now, by partition, empty partitions too. The end of a partition is where reading
        ends, because some brokers' watermark leaves out what was written last. Raises BadSource, RunFailed.
        """
        with _Asking(self) as consumer:
            partitions = self._partitions(consumer)
            topic = consumer.topic_id()
            marks = {p: consumer.watermarks(p) for p in partitions}
            ends, last = consumer.ends(marks)
            if consumer.topic_id() != topic:
                raise RunFailed(f"{self.shown}: was deleted and made anew while it was looked at: run again")
        return [Span(p, marks[p][0], ends[p], topic, last.get(p, "")) for p in partitions]

    def check(self, span: Span) -> None:
        """Raises SourceChanged if the topic is no longer the one that a range was planned for. What is true afterwards
        was so before: ids are never given twice.
        """
        topic, last = self.marks.get(span.name, (span.topic, span.last))
        if topic or last:
            key = f"{self._key} asked"  # a client apart, as the other goes on where it is
            consumer = _CONSUMERS.take(key, lambda: _Consumer(self))
            try:
                consumer.check(replace(span, topic=topic, last=last))
            except BaseException:
                consumer.close()
                raise
            _CONSUMERS.put(key, consumer)

    def _partitions(self, consumer: _Consumer) -> list[int]:
        found = consumer.topic(self.topic)
        if found is None:
            there = consumer.topics()
            listed = ", ".join(there[:8]) + (", …" if len(there) > 8 else "")
            raise BadSource(
                f"{self.shown}: there is no topic {self.topic!r}: the broker has "
                f"{listed or 'none'}{did_you_mean(self.topic, there)}"
            )
        return found

    # ------------------------------------------------ records

    def records(self, span: Span, most_bytes: int) -> Iterator[list[Any]]:
        """The messages at a range of offsets, in order, in lists of about `most_bytes`. Offsets without one (compacted
        away, or the markers of transactions) are passed over. Raises SourceChanged if the range's first offset is no
        longer kept, or the partition ends before the range does; StoreAway if the broker does not answer.
        """
        if span.low >= span.high:
            return
        consumer = _CONSUMERS.take(self._key, lambda: _Consumer(self))
        try:
            yield from consumer.records(span, most_bytes)
        except GeneratorExit:  # that is enough
            _CONSUMERS.put(self._key, consumer)
            raise
        except BaseException:
            consumer.close()
            raise
        _CONSUMERS.put(self._key, consumer)

    @property
    def _key(self) -> str:
        return repr((self.brokers, self.topic, sorted(self.client.items())))

    def properties(self) -> dict[str, Any]:
        """What the client is made with. Raises BadJob for a property that is ours to set."""
        given = {n: v for n, v in self.client.items() if n not in (REGISTRY, REGISTRY_USER)}
        if fixed := next((n for n in given if n in _FIXED or n == "bootstrap.servers"), None):
            raise BadJob(f"{self.shown}: storage has {fixed!r}, which is ours to set: leave it out")
        return {**_CLIENT, **given, **_FIXED, "bootstrap.servers": self.brokers}

    def words(self, error: Any) -> str:
        """What the client says is wrong, in one line and without secrets."""
        text = redact(" ".join(str(error.str() if hasattr(error, "str") else error).split()))
        hidden = (str(v) for n, v in self.client.items() if n.endswith(("password", "key", "secret", "info", ".pem")))
        for secret in hidden:
            text = text.replace(secret, "***") if secret else text
        return text


class _Consumer:
    """A client that reads partitions at offsets, without a group."""

    def __init__(self, log: TopicLog) -> None:
        self._kafka = require("confluent_kafka", "kafka", log.shown)
        self._log = log
        self._wrong: Any = None  # what the client said last that it cannot do
        self._asking = False  # once a signal has ended the wait, the client is left to the thread that is in it
        self._next = (-1, -1)  # partition and offset of what comes next, beginning with what is left of the last range
        self._left: Sequence[Any] = []
        self._admin: Any = None
        self._properties = {**log.properties(), "error_cb": self._note}
        try:
            self._consumer = self._kafka.Consumer(self._properties)
        except (self._kafka.KafkaException, TypeError, ValueError) as e:
            said = e.args[0] if isinstance(e, self._kafka.KafkaException) else e
            raise BadJob(f"{log.shown}: the Kafka client does not take this (storage): {log.words(said)}") from e

    def _note(self, error: Any) -> None:
        codes = self._kafka.KafkaError
        if error.code() != codes._ALL_BROKERS_DOWN or self._wrong is None:  # which says nothing of the reason
            self._wrong = error

    def close(self) -> None:
        if not self._asking:
            self._consumer.close()

    # ------------------------------------------------ what is there

    def _asked(self, ask: Callable[[], T]) -> T:
        """What a broker answers. Raises BadSource if it refuses, RunFailed if it is away."""
        codes = self._kafka.KafkaError
        try:
            self._asking = True
            answer = heard(ask)
            self._asking = False
            return answer
        except self._kafka.KafkaException as e:
            self._asking = False
            self._consumer.poll(0)  # only then the client says why, by error_cb
            error = e.args[0]
            said = self._wrong or error
            refused = (codes._AUTHENTICATION, codes._SSL, codes.SASL_AUTHENTICATION_FAILED)
            denied = (codes.TOPIC_AUTHORIZATION_FAILED, codes.GROUP_AUTHORIZATION_FAILED)
            where, words = self._log.shown, self._log.words(said)
            if said.code() in refused:
                raise BadSource(f"{where}: the broker does not let us in: {words}: see storage") from e
            if error.code() in denied:
                raise BadSource(f"{where}: the broker does not allow it: {self._log.words(error)}") from e
            raise RunFailed(f"{where}: cannot be reached: {words}: run again when the broker answers") from e

    def topic(self, name: str) -> list[int] | None:
        """The topic's partitions; None if there is no such topic."""
        found = self._asked(lambda: self._consumer.list_topics(name, timeout=ANSWER)).topics.get(name)
        codes = self._kafka.KafkaError
        if found is None or (found.error is not None and found.error.code() in (codes.UNKNOWN_TOPIC_OR_PART,
                                                                                codes._UNKNOWN_TOPIC)):  # fmt: skip
            return None
        if found.error is not None:
            raise BadSource(f"{self._log.shown}: {self._log.words(found.error)}")
        return sorted(found.partitions)

    def topic_id(self) -> str:
        """The id that tells the topic from another of its name; "" if the broker does not tell."""
        from confluent_kafka.admin import AdminClient

        codes, name = self._kafka.KafkaError, self._log.topic
        there = self._asked(lambda: self._consumer.list_topics(name, timeout=ANSWER))
        if there.controller_id not in there.brokers:
            return ""  # the client would wait for it

        def ask() -> Any:
            self._admin = self._admin or AdminClient(self._properties)
            about = self._admin.describe_topics(self._kafka.TopicCollection([name]), request_timeout=ANSWER)
            return about[name].result().topic_id

        try:
            found = self._asked(ask)
        except (RunFailed, BadSource) as e:
            if isinstance(e.__cause__, self._kafka.KafkaException):
                why = e.__cause__.args[0].code()
                if why == codes.UNKNOWN_TOPIC_OR_PART:
                    raise _made_anew(self._log.shown, "it is not there any more") from e
                if why in (codes._UNSUPPORTED_FEATURE, codes.UNSUPPORTED_VERSION):
                    return ""
            raise
        zero = found is None or not (found.get_most_significant_bits() or found.get_least_significant_bits())
        return "" if zero else str(found)

    def topics(self) -> list[str]:
        found = self._asked(lambda: self._consumer.list_topics(timeout=ANSWER)).topics
        return sorted(name for name in found if not name.startswith("__"))

    def watermarks(self, partition: int) -> tuple[int, int]:
        """The first offset that is kept, and the end as the broker says it."""
        at = self._at(partition, 0)
        low, high = self._asked(lambda: self._consumer.get_watermark_offsets(at, timeout=ANSWER))
        return int(low), int(high)

    def ends(self, marks: Mapping[int, tuple[int, int]]) -> tuple[dict[int, int], dict[int, str]]:
        """Where reading ends, by partition, from the watermarks on, and marks of the last records before."""
        codes, left, last = self._kafka.KafkaError, set(marks), dict[int, str]()
        ends = {p: high for p, (_, high) in marks.items()}
        self._consumer.assign([self._at(p, max(low, high - _BEFORE)) for p, (low, high) in marks.items()])
        begun = time.monotonic()
        while left:
            for message in self._some():
                partition, error = message.partition(), message.error()
                if error is None:
                    ends[partition], last[partition] = max(ends[partition], message.offset() + 1), _marked(message)
                elif error.code() == codes._PARTITION_EOF:
                    ends[partition] = max(ends[partition], message.offset())
                    left.discard(partition)
                elif error.code() not in (codes._TRANSPORT, codes._ALL_BROKERS_DOWN):
                    raise RunFailed(f"{self._log.shown}: {self._log.words(error)}")
            took = time.monotonic() - begun
            left = {p for p in left if ends[p] == marks[p][1]} if took > _TAIL else left  # the others are growing
            if left and took > ANSWER:
                said = f" ({self._log.words(self._wrong)})" if self._wrong else ""
                raise RunFailed(
                    f"{self._log.shown}: partition {min(left)} does not say where it ends{said}: run again when the "
                    "broker answers"
                )
        self._consumer.unassign()
        return ends, last

    def _at(self, partition: int, offset: int) -> Any:
        return self._kafka.TopicPartition(self._log.topic, partition, offset)

    def _some(self) -> Sequence[Any]:
        """What has come, at once; else the next that comes within a quarter of a second."""
        found: Sequence[Any] = self._consumer.consume(_ONCE, 0) or self._consumer.consume(1, 0.25)
        return found

    # ------------------------------------------------ records

    def records(self, span: Span, most_bytes: int) -> Iterator[list[Any]]:
        if self._next != (span.partition, span.low):  # else it is being read already
            self._check_kept(span)
            self._left = []
            self._consumer.assign([self._at(span.partition, span.low)])
        self._next = (span.partition, -1)
        held: list[Any] = []
        size = 0
        for message in self._until(span):
            held.append(message)
            size += len(message) + 64  # bytes of the value, and what goes with it
            if size >= most_bytes:
                yield held
                held, size = [], 0
        self._next = (span.partition, span.high)
        if held:
            yield held

    def _until(self, span: Span) -> Iterator[Any]:
        codes, place = self._kafka.KafkaError, f"{self._log.shown}/{span.name}"
        since, ended = time.monotonic(), 0.0
        while True:
            got, self._left = self._left or self._some(), []
            now = time.monotonic()
            since = now if got else since
            for n, message in enumerate(got):
                error = message.error()
                if error is None:
                    if message.offset() >= span.high:
                        self._left = got[n:]
                        return
                    if message.offset() >= span.low:
                        yield message
                    if message.offset() == span.high - 1:
                        self._left = got[n + 1 :]
                        return
                    ended = 0.0
                elif error.code() == codes._PARTITION_EOF:
                    if message.offset() >= span.high:
                        self._left = got[n:]  # for the range that follows: it is told once
                        return
                    ended = ended or now
                elif error.code() in (codes._AUTO_OFFSET_RESET, codes.OFFSET_OUT_OF_RANGE):
                    self._check_kept(span)
                    raise _ends_before(place, self._log.words(error))
                elif error.code() in (codes.UNKNOWN_TOPIC_OR_PART, codes.UNKNOWN_TOPIC_ID, codes._UNKNOWN_TOPIC):
                    raise _made_anew(self._log.shown, self._log.words(error))
                elif error.code() not in (codes._TRANSPORT, codes._ALL_BROKERS_DOWN, codes._TIMED_OUT):
                    raise BadSource(f"{place}: {self._log.words(error)}")
            since = time.monotonic() if got else since  # however long they took to be used
            if ended and now - ended > _END_AGAIN:
                raise _ends_before(place, "it ends before")
            if now - since > PATIENCE or (not got and ENDING.overdue(since)):
                said = f" ({self._log.words(self._wrong)})" if self._wrong else ""
                raise StoreAway(errno.EIO, f"the broker did not answer for {now - since:.0f} s{said}", self._log.shown)

    def check(self, span: Span) -> None:
        """Raises SourceChanged if the topic is not that of a range's marks; StoreAway if the broker does not answer."""
        now = self._patiently(self.topic_id) if span.topic else ""
        if now and now != span.topic:
            raise _made_anew(self._log.shown, f"its id is {now}, and was {span.topic}")
        if now or not span.last:
            return
        offset, _, _ = span.last.partition(":")
        place = Span(span.partition, int(offset), int(offset) + 1)
        if self._kept_from(place.partition) > place.low:
            return  # retention has taken what would tell
        found = [_marked(message) for part in self.records(place, 1) for message in part]
        if found and found != [span.last]:  # of a compacted topic the record may be gone
            raise _made_anew(self._log.shown, f"another record is at offset {offset} of partition {place.partition}")

    def _patiently(self, ask: Callable[[], T]) -> T:
        """What a broker answers that may be away for a while."""
        begun = time.monotonic()
        while True:
            try:
                return ask()
            except (RunFailed, self._kafka.KafkaException) as e:
                if isinstance(e, SourceChanged):
                    raise
                if time.monotonic() - begun > PATIENCE or ENDING.overdue(begun):
                    said = self._log.words(self._wrong or (e if isinstance(e, RunFailed) else e.args[0]))
                    raise StoreAway(errno.EIO, f"the broker did not answer ({said})", self._log.shown) from e

    def _kept_from(self, partition: int) -> int:
        """The first offset that is kept."""
        at = self._at(partition, 0)
        low, _ = self._patiently(lambda: self._consumer.get_watermark_offsets(at, timeout=5.0))
        return int(low)

    def _check_kept(self, span: Span) -> None:
        """Raises SourceChanged if records at the beginning of the range are no longer kept."""
        low = self._kept_from(span.partition)
        if low > span.low:
            raise SourceChanged(
                f"{self._log.shown}/{span.name}: offsets {span.low:,} to {min(low, span.high) - 1:,} are no longer "
                f"kept (retention: partition {span.partition} begins at {low:,}): --restart (restart=True) begins with "
                "what the topic still holds; to keep more, raise the topic's retention.ms or retention.bytes"
            )


class _Asking:
    """A consumer for a few questions."""

    def __init__(self, log: TopicLog) -> None:
        self._consumer = _Consumer(log)

    def __enter__(self) -> _Consumer:
        return self._consumer

    def __exit__(self, *_: object) -> None:
        self._consumer.close()


def _marked(message: Any) -> str:
    """What tells a record from another that has its offset in another topic of the name."""
    digest = hashlib.sha256(repr((message.timestamp(), message.key())).encode())
    digest.update(message.value() or b"")
    return f"{message.offset()}:{digest.hexdigest()[:16]}"


def _made_anew(shown: str, why: str) -> SourceChanged:
    return SourceChanged(
        f"{shown}: the topic was deleted since it was planned, or made anew ({why}): --restart (restart=True) begins "
        "with what it holds now"
    )


def _ends_before(place: str, why: str) -> SourceChanged:
    return SourceChanged(
        f"{place}: the partition no longer has these offsets ({why}), as if the topic had been made anew: --restart "
        "(restart=True) begins with what it holds now"
    )


def placed(uri: str, storage: Mapping[str, Any]) -> tuple[str, str, TopicLog, str]:
    """An address of a topic, or of a range of one: the public path of the topic, with a slash, its log, what is below
    it in the address, and the options that follow. Raises BadJob for an address that is none.
    """
    parts = urlsplit(uri)
    shown = redact(uri)
    brokers = parts.netloc.rpartition("@")[2]
    topic, _, below = parts.path.strip("/").partition("/")
    said = dict(parse_qsl(parts.query, keep_blank_values=True))
    if not brokers or not topic or parts.fragment:
        raise BadJob(f"{shown}: give brokers and a topic, as in kafka://HOST:9092/TOPIC")
    if other := next((n for n in said if n not in OURS), None):
        raise BadJob(
            f"{shown}: has {other!r}: an address takes {', '.join(OURS)}; properties of the client, such as "
            f"sasl.password, go into storage{did_you_mean(other, OURS)}"
        )
    client = {n: v for n, v in storage.items() if n != MARKS}
    if "@" in parts.netloc:
        client = {"sasl.username": unquote(parts.username or ""), "sasl.password": unquote(parts.password or ""),
                  **client}  # fmt: skip
    schema = _text(said["schema"], shown) if "schema" in said else ""
    log = TopicLog(brokers, unquote(topic), said, schema, client, storage.get(MARKS, {}))
    return f"kafka://{brokers}/{topic}/", below, log, f"?{parts.query}" if parts.query else ""


def _text(path: str, shown: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as e:
        raise BadJob(f"{shown}: schema {path!r} cannot be read: {e}") from e
