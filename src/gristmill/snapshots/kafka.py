"""Topics of Kafka, and of what speaks its protocol, as a source: ranges of offsets that workers read where they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar
from urllib.parse import quote

import pyarrow as pa

from gristmill.errors import BadJob, SourceChanged
from gristmill.snapshots.contract import DataFile, Growing, Piece, Snapshot, SnapshotKind, Wanted
from gristmill.sources import kafkalog
from gristmill.sources.kafkalog import MARKS, OURS, Span, TopicLog


class Kafka:
    """`kafka://HOST:9092,HOST:9092/TOPIC`, with `?value=json` (or avro, text, bytes), `keys=text` (or bytes) and
    `schema=FILE` of Avro values. Properties of the client (librdkafka's) are in `storage`.
    """

    name: ClassVar[str] = "kafka"
    queried: ClassVar[bool] = False
    said: ClassVar[tuple[str, ...]] = OURS
    embedded: ClassVar[bool] = False
    marks: ClassVar[tuple[tuple[str, ...], ...]] = ()

    @staticmethod
    def open(wanted: Wanted, version: str) -> Snapshot:
        """All that the topic holds, or the ranges that an earlier snapshot had, whose records may be gone."""
        if version:
            return Offsets(wanted, _still(wanted, version))
        spans = _log(wanted).spans()
        return Offsets(wanted, [*_full(spans), *(s for s in spans if s.low == s.high)])

    @staticmethod
    def onwards(wanted: Wanted, version: str) -> Snapshot:
        """The earlier ranges, and those of the offsets that came since."""
        log, known = _log(wanted), _still(wanted, version)
        ends = {
            partition: max(s.high for s in known if s.partition == partition)
            for partition in {s.partition for s in known}
        }
        since = [_since(log, ends, now) for now in log.spans()]
        return Offsets(wanted, [*known, *(s for s in since if s.low < s.high or s.partition not in ends)])


_: type[SnapshotKind] = Kafka  # for mypy
_grows: Growing = Kafka()


class Offsets:
    """Ranges of offsets."""

    def __init__(self, wanted: Wanted, spans: Sequence[Span]) -> None:
        self._wanted, self._spans = wanted, spans
        self.schema = pa.schema([])  # of values that are JSON, only reading tells it
        self.version = json.dumps([[s.partition, s.low, s.high, s.topic, s.last] for s in spans])
        listed = self._listed()
        offsets, partitions = sum(s.high - s.low for s in listed), len({s.partition for s in listed})
        self.told = f"{offsets:,} offsets of {partitions} partition{'' if partitions == 1 else 's'}"

    def _listed(self) -> list[Span]:
        """Those that are files of the source: the first, so that there is one, and what else has offsets. Empty ones
        tell where what comes next in their partitions begins.
        """
        return [*self._spans[:1], *_full(self._spans[1:])]

    def files(self) -> Sequence[DataFile] | None:
        place = self._wanted.place
        base, said = place.uri.rstrip("/"), "&".join(f"{n}={quote(v, safe='/')}" for n, v in self._wanted.said.items())
        storage = {**place.options, MARKS: {s.name: (s.topic, s.last) for s in self._spans}}
        return [
            DataFile(f"{base}/{s.name}{'?' + said if said else ''}", form="kafka", storage=storage)
            for s in self._listed()
        ]

    def pieces(self) -> Sequence[Piece]:
        return []

    def cancel(self) -> None:
        """Nothing is being read."""

    def close(self) -> None:
        """Nothing is held."""


def _log(wanted: Wanted) -> TopicLog:
    place = wanted.place
    if place.name or place.uri.count("/") != 3:
        raise BadJob(f"{wanted.shown}: give brokers and a topic, as in kafka://HOST:9092/TOPIC")
    return kafkalog.placed(place.uri, place.options)[2]


def _still(wanted: Wanted, version: str) -> list[Span]:
    """The ranges of an earlier snapshot. Raises SourceChanged if the topic is another one now."""
    log, spans = _log(wanted), [Span(*span) for span in json.loads(version)]
    latest = {s.topic or s.partition: s for s in spans}  # an id tells for all
    for span in latest.values():
        log.check(span)
    return spans


def _full(spans: Iterable[Span]) -> list[Span]:
    return [span for span in spans if span.low < span.high]


def _since(log: TopicLog, ends: dict[int, int], now: Span) -> Span:
    """What a partition holds now behind the offset where an earlier snapshot ended."""
    end = ends.get(now.partition, 0)  # a partition that was added later had nothing
    if end == now.low == 0:
        return now
    where = f"{log.shown}: partition {now.partition}"
    if now.high < end:
        raise SourceChanged(
            f"{where} ends at offset {now.high:,}, and was read up to {end:,}, as if the topic had been made anew: "
            "--restart (restart=True) scores what it holds now"
        )
    if now.low > end:
        raise SourceChanged(
            f"{where}: offsets {end:,} to {now.low - 1:,} came since it was read, and are no longer kept (retention): "
            "--restart (restart=True), or a sink of its own, begins with what the topic still holds; to keep more, "
            "raise the topic's retention.ms or retention.bytes"
        )
    return replace(now, low=end)
