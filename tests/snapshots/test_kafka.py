"""Topics of Kafka as sources, on two brokers that disagree about where a topic ends."""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from topics import KEPT, doubled, job, made, picky

import gristmill as gm
import storeservers
from gristmill.sources import openreaders
from gristmill.sources.kafka import KafkaSource
from gristmill.sources.kafkalog import Span, TopicLog
from listeners import signalled, silent

kafka = pytest.importorskip("confluent_kafka", reason="no Kafka client: install confluent-kafka")

BROKERS = {"tansu": storeservers.tansu, "mock": storeservers.mock_brokers}
PARTITIONS = {"tansu": 3, "mock": 4}  # what topics have on each
_topics = iter(range(1000))


class Topic:
    """A new topic of a broker, and a producer."""

    def __init__(self, kind: str, brokers: str) -> None:
        self.kind, self.brokers, self.name = kind, brokers, f"reviews{next(_topics)}"
        self.client = {"bootstrap.servers": brokers, "log_level": 0}
        self.producer = kafka.Producer(self.client)
        self.count = 0
        if kind == "tansu":
            made(self.client, self.name, PARTITIONS[kind])
        else:  # it makes a topic that is asked for
            there = self.producer.list_topics(self.name, timeout=10).topics[self.name]
            assert len(there.partitions) == PARTITIONS[kind]

    @property
    def address(self) -> str:
        return f"kafka://{self.brokers}/{self.name}"

    def put(self, values: list[Any], partition: int | None = None, **more: Any) -> None:
        """Values, as JSON unless they are bytes or None, in turn to the first two partitions."""
        for value in values:
            data = (
                value if value is None or isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode()
            )
            to = self.count % 2 if partition is None else partition
            self.producer.produce(self.name, data, partition=to, **more)
            self.count += 1
        assert self.producer.flush(10) == 0

    def rows(self, first: int, last: int) -> None:
        """Rows of a number and a text."""
        self.put([{"id": i, "text": f"naïve {i}"} for i in range(first, last)])


@pytest.fixture(scope="module", params=list(BROKERS))
def broker(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Each kind of broker, by its name and its address."""
    with BROKERS[request.param]() as address:
        yield request.param, address


@pytest.fixture
def topic(broker: tuple[str, str]) -> Topic:
    """A topic without records."""
    return Topic(*broker)


def ids(sink: Path) -> list[int]:
    """The ids of a result, which has each offset of a partition once."""
    found = gm.read(str(sink)).to_table()
    assert found["double"].to_pylist() == [2 * i for i in found["id"].to_pylist()]
    places = list(zip(found["_partition"].to_pylist(), found["_offset"].to_pylist(), strict=True))
    assert len(places) == len(set(places))
    return sorted(found["id"].to_pylist())


def length(batch: dict[str, Any]) -> dict[str, Any]:
    """A number for rows whatever they hold."""
    return {"n": list(range(len(next(iter(batch.values())))))}


def kept(address: str, sink: Path, keep: list[str], **more: Any) -> list[dict[str, Any]]:
    """Rows of a topic with these columns, in the order of the source."""
    storage = more.pop("storage", {})
    source = gm.source(address, storage=storage, **more)
    gm.apply(source, str(sink), fn=length, keep=keep, workers=0, gates={"min_ok": 0.1})
    return gm.read(str(sink)).to_table().select(keep).to_pylist()


def test_a_record_is_a_row_with_what_the_broker_knows_of_it(topic: Topic, tmp_path: Path) -> None:
    """Its value's keys as columns, its key, partition, offset, time and headers."""
    values = [{"id": 2**53 + 1, "text": "日本語 🦀\nline", "tags": ["a", None]}, {"id": 2, "text": None}]
    headers = [("trace", b"\x00\xff"), ("trace", "ü".encode()), ("none", None)]
    topic.put(values[:1], 0, key="schlüssel", headers=headers, timestamp=1_700_000_000_123)
    topic.put(values[1:], 1)
    columns = ["id", "text", "tags", "_key", "_partition", "_offset", "_timestamp", "_headers"]
    first, second = kept(topic.address, tmp_path / "out", columns)
    assert first == {
        **values[0],
        "_key": "schlüssel",
        "_partition": 0,
        "_offset": 0,
        "_timestamp": dt.datetime.fromtimestamp(1_700_000_000.123, dt.timezone.utc),
        "_headers": [{"key": n, "value": v} for n, v in headers],
    }
    assert (second["id"], second["text"], second["tags"], second["_key"], second["_headers"]) == (
        2,
        None,
        None,
        None,
        [],
    )
    assert abs(second["_timestamp"].timestamp() - time.time()) < 60


@pytest.mark.few(1)
def test_the_end_of_a_topic_is_where_reading_ends(topic: Topic, tmp_path: Path) -> None:
    """Not the watermark, which one of the brokers gives as the beginning of its last batch."""
    topic.rows(0, 100)
    consumer = kafka.Consumer({**topic.client, "group.id": "x"})
    told = sum(consumer.get_watermark_offsets(kafka.TopicPartition(topic.name, p), timeout=10)[1] for p in (0, 1))
    consumer.close()
    assert (told < 100) == (topic.kind == "tansu")
    job(topic.address, tmp_path / "out").run()
    assert ids(tmp_path / "out") == list(range(100))


@pytest.mark.long
def test_append_brings_what_came_since(topic: Topic, tmp_path: Path) -> None:
    """Nothing to do without new records; new ones are refused without append, and scored alone with it."""
    topic.rows(0, 60)
    todo = job(topic.address, tmp_path / "out")
    todo.run()
    parts = sorted((tmp_path / "out").glob("*.parquet"))
    assert todo.run().rows_ok == 60 and sorted((tmp_path / "out").glob("*.parquet")) == parts
    for first, last in ((60, 70), (70, 81)):
        topic.rows(first, last)
        with pytest.raises(gm.PlanChanged, match=r"is new[\s\S]*--append"):
            todo.run()
        assert "append" in todo.plan().sink
        assert todo.run(append=True).rows_ok == last
        assert ids(tmp_path / "out") == list(range(last))
    assert set(parts) < set((tmp_path / "out").glob("*.parquet"))
    topic.put([{"id": 81, "text": "elsewhere"}], 2)
    todo.run(append=True)
    assert ids(tmp_path / "out") == list(range(82))
    assert gm.verify(str(tmp_path / "out")).ok
    assert todo.run(restart=True).rows_ok == 82


@pytest.mark.long
def test_a_killed_run_reads_exactly_what_it_had_planned(topic: Topic, tmp_path: Path) -> None:
    """Records that come meanwhile are appended by another run."""
    topic.rows(0, 200)
    killed(topic.address, tmp_path / "out")
    topic.rows(200, 230)
    report = job(topic.address, tmp_path / "out", 0.1).run()
    assert report.shards_resumed > 0
    assert ids(tmp_path / "out") == list(range(200))
    job(topic.address, tmp_path / "out", 0.1).run(append=True)
    assert ids(tmp_path / "out") == list(range(230))


def killed(address: str, sink: Path) -> None:
    """A run in a process apart, killed when some of it is committed."""
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import topics; topics.job({address!r}, {str(sink)!r}, 0.1).run()"
    running = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while len(list(sink.glob("_gristmill/g*/receipts/*.json"))) < 2:
            assert running.poll() is None and time.monotonic() < until
            time.sleep(0.02)
    finally:
        running.kill()
        running.wait()


@pytest.fixture(params=["told", "untold"])
def ids_of_topics(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Brokers that tell a topic's id, and those that do not (before Kafka 2.8), of which records tell."""
    if request.param == "untold":
        monkeypatch.setattr("gristmill.sources.kafkalog._Consumer.topic_id", lambda _: "")
    return str(request.param)


def made_anew(topic: Topic, first: int, last: int) -> None:
    """The topic deleted, and made again with other rows."""
    from confluent_kafka.admin import AdminClient

    openreaders.close_all()  # this broker's answer to whoever still reads a deleted topic crashes librdkafka 2.16
    admin = AdminClient(topic.client)  # which has to live until the topic is gone
    admin.delete_topics([topic.name])[topic.name].result()
    made(topic.client, topic.name, PARTITIONS[topic.kind])
    topic.rows(first, last)


@pytest.mark.long
def test_a_topic_made_anew_is_not_mixed_with_the_one_before(
    broker: tuple[str, str], ids_of_topics: str, tmp_path: Path
) -> None:
    """By a run that goes on, one that appends, one of dead letters, nor one that finds the same offsets again; a
    restart scores what is there now.
    """
    if broker[0] != "tansu":
        pytest.skip("librdkafka's brokers delete no topics")
    topic, done, dead = Topic(*broker), Topic(*broker), Topic(*broker)
    for each in (topic, done, dead):
        each.rows(0, 100)
    killed(topic.address, tmp_path / "out")
    job(done.address, tmp_path / "done").run()
    picking = gm.Job(
        gm.source(dead.address),
        gm.model(picky, fixed=str(tmp_path / "fixed"), returns={"double": "int64"}),
        gm.sink(str(tmp_path / "dead"), keep=KEPT),
        workers=0,
    )
    assert picking.run().rows_dead == 1
    (tmp_path / "fixed").touch()
    told = "its id is .*, and was" if ids_of_topics == "told" else "another record is at offset 49 of partition"
    for each in (topic, done, dead):
        made_anew(each, 1000, 1100)
    for again in (
        lambda: job(topic.address, tmp_path / "out", 0.1).run(),
        lambda: job(done.address, tmp_path / "done").run(),
        lambda: job(done.address, tmp_path / "done").run(append=True),
        lambda: gm.retry_dead(picking, accept_code_change=True),
    ):
        with pytest.raises(gm.PlanChanged, match=f"made anew.*{told}.*--restart") as refused:
            again()
        assert refused.value.exit_code == 4
    assert ids(tmp_path / "done") == list(range(100))
    for todo, sink in (
        (job(topic.address, tmp_path / "out", 0.1), "out"),
        (job(done.address, tmp_path / "done"), "done"),
    ):
        todo.run(restart=True)
        assert ids(tmp_path / sink) == list(range(1000, 1100))


def test_a_topic_made_anew_while_a_run_reads_it(
    broker: tuple[str, str], ids_of_topics: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made anew after the plan, with as many records: no row of it is scored. One that is gone is told, too."""
    if broker[0] != "tansu":
        pytest.skip("librdkafka's brokers delete no topics")
    topic = Topic(*broker)
    topic.rows(0, 60)
    inspect, looks = KafkaSource.inspect, []

    def late(self: KafkaSource, file: Any, *given: Any) -> Any:
        found = inspect(self, file, *given)
        looks.append(file.path)
        if len(looks) == 2:
            made_anew(topic, 1000, 1060)
        return found

    monkeypatch.setattr(KafkaSource, "inspect", late)
    with pytest.raises(gm.PlanChanged, match="made anew"):
        job(topic.address, tmp_path / "out").run()
    assert not list(tmp_path.glob("out/_gristmill/g*/receipts/*.json"))
    assert not list(tmp_path.glob("out/*.parquet"))


@pytest.mark.few(1)
def test_ranges_that_were_pinned_without_marks_are_read_on(
    topic: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As results have them that are older than the marks."""
    topic.rows(0, 60)
    with monkeypatch.context() as patched:
        patched.setattr("gristmill.sources.kafkalog._Consumer.topic_id", lambda _: "")
        patched.setattr("gristmill.sources.kafkalog._marked", lambda _: "")
        job(topic.address, tmp_path / "out").run()
    assert job(topic.address, tmp_path / "out").run().state == "nothing to do"
    topic.rows(60, 70)
    job(topic.address, tmp_path / "out").run(append=True)
    assert ids(tmp_path / "out") == list(range(70))


@pytest.mark.few(1)
def test_a_compacted_topic_has_the_latest_record_of_each_key(topic: Topic, tmp_path: Path) -> None:
    """Its offsets have gaps, which are no rows, and a deleted key is a record without a value. (Neither broker
    compacts; the markers of transactions leave such gaps, at every place of a range.)
    """
    producer = kafka.Producer({**topic.client, "transactional.id": topic.name})
    producer.init_transactions(10)
    for n, value in enumerate([{"id": 1}, {"id": 2}, None, {"id": 4}]):
        producer.begin_transaction()
        producer.produce(topic.name, None if value is None else json.dumps(value), key=f"k{n}", partition=0)
        producer.commit_transaction()
    assert TopicLog(topic.brokers, topic.name).spans()[0].high == 8
    found = kept(topic.address, tmp_path / "out", ["id", "_key", "_offset"], where="_partition = 0")
    assert found == [{"id": i, "_key": f"k{n}", "_offset": 2 * n} for n, i in enumerate([1, 2, None, 4])]
    some = kept(topic.address, tmp_path / "some", ["_offset"], where="id IS NOT NULL")
    assert [r["_offset"] for r in some] == [0, 2, 6]
    assert gm.verify(str(tmp_path / "out"), source=False).ok


@pytest.mark.long
def test_retention_in_a_partition_that_was_empty(broker: tuple[str, str], tmp_path: Path) -> None:
    """Records that came since and are gone are told, also where the earlier run found a partition, or all, empty."""
    if broker[0] != "mock":
        pytest.skip("only librdkafka's brokers drop old records by their size")
    one, all_of_it = Topic(*broker), Topic(*broker)
    one.put([{"id": i, "text": "a"} for i in range(5)], 0)
    todo = job(one.address, tmp_path / "one")
    sink = gm.sink(str(tmp_path / "all"), keep=["value"])
    counted = gm.model(length, returns={"n": "int64"})
    nothing = gm.Job(f"{all_of_it.address}?value=text", counted, sink, workers=0, gates={"allow_empty": True})
    todo.run()
    nothing.run()
    for each in (one, all_of_it):
        each.put([{"id": 1000 + i, "text": "x" * 500_000} for i in range(20)], 1)
    for late in (todo, nothing):
        with pytest.raises(gm.PlanChanged, match=r"partition 1: offsets 0 to \d+ came since .* no longer kept"):
            late.run(append=True)
    assert ids(tmp_path / "one") == list(range(5))


@pytest.mark.long
def test_records_that_retention_has_removed_are_told(broker: tuple[str, str], tmp_path: Path) -> None:
    """By a resumed run, and by one that is to append what came since; a restart takes what is left."""
    if broker[0] != "mock":
        pytest.skip("only librdkafka's brokers drop old records by their size")
    topic, after = Topic(*broker), Topic(*broker)
    topic.rows(0, 200)
    after.rows(0, 40)
    killed(topic.address, tmp_path / "out")
    job(after.address, tmp_path / "after").run()
    for each in (topic, after):
        each.put([{"id": 1000 + i, "text": "x" * 500_000} for i in range(30)])
    with pytest.raises(gm.PlanChanged, match=r"offsets \d+ to \d+ are no longer kept.*--restart") as told:
        job(topic.address, tmp_path / "out", 0.1).run()
    assert told.value.exit_code == 4
    with pytest.raises(gm.PlanChanged, match=r"offsets 20 to \d+ came since it was read, and are no longer kept"):
        job(after.address, tmp_path / "after").run(append=True)
    assert len(ids(tmp_path / "after")) == 40
    report = job(topic.address, tmp_path / "out", 0.1).run(restart=True)
    assert 0 < report.rows_ok < 30 and min(ids(tmp_path / "out")) >= 1000


@pytest.mark.long
def test_workers_read_ranges_and_dead_letters_are_read_again(topic: Topic, tmp_path: Path) -> None:
    """By processes of their own, from the offsets that were planned; what was read can be read again to verify it."""
    topic.rows(0, 300)
    sink = gm.sink(str(tmp_path / "out"), keep=KEPT)
    model = gm.model(picky, fixed=str(tmp_path / "fixed"), returns={"double": "int64"})
    todo = gm.Job(gm.source(topic.address), model, sink, workers=2, shard_rows=50)
    assert todo.run().rows_dead == 1
    (dead,) = gm.dead(str(tmp_path / "out")).to_pylist()
    assert (dead["source"], dead["position"]) == (f"{topic.address}/1/0-150", 6)
    topic.rows(300, 310)
    assert gm.verify(todo, source=True).ok
    (tmp_path / "fixed").touch()
    gm.retry_dead(todo, accept_code_change=True)
    assert ids(tmp_path / "out") == list(range(300))
    todo.run(append=True)
    assert ids(tmp_path / "out") == list(range(310))


@pytest.mark.few(1)
def test_offsets_without_records_are_passed_over(topic: Topic, tmp_path: Path) -> None:
    """The markers of transactions, also where a range, or what a shard reads of it, ends with one. (Neither broker
    tells which transactions were aborted.)
    """
    topic.rows(0, 10)
    producer = kafka.Producer({**topic.client, "transactional.id": topic.name})
    producer.init_transactions(10)
    for some in (range(10, 40), range(40, 41), range(41, 50)):
        producer.begin_transaction()
        for i in some:
            producer.produce(topic.name, json.dumps({"id": i, "text": ""}), partition=0)
        producer.commit_transaction()
    log = TopicLog(topic.brokers, topic.name)
    assert [s.high for s in log.spans()[:2]] == [5 + 40 + 3, 5]
    begun = time.monotonic()
    found = [m.offset() for part in log.records(Span(0, 34, 36), 1 << 20) for m in part]
    assert found == [34] and list(log.records(Span(0, 47, 48), 1 << 20)) == []
    assert time.monotonic() - begun < 5
    job(topic.address, tmp_path / "out").run()
    assert ids(tmp_path / "out") == list(range(50))
    job(topic.address, tmp_path / "out").run()
    topic.put([{"id": 50, "text": ""}], 0)
    job(topic.address, tmp_path / "out").run(append=True)
    assert ids(tmp_path / "out") == list(range(51))


@pytest.mark.few(1)
def test_text_and_bytes(topic: Topic, tmp_path: Path) -> None:
    """Values and keys as they are; records without a value have null."""
    values = [b"plain", "naïve".encode(), None, b"", b"\xff\xfe"]
    topic.put(values, 0, key=b"\xff")
    found = kept(f"{topic.address}?value=bytes&keys=bytes", tmp_path / "raw", ["value", "_key"])
    assert found == [{"value": v, "_key": b"\xff"} for v in values]
    found = kept(f"{topic.address}?value=text&keys=bytes", tmp_path / "text", ["value"])
    assert found == [{"value": v} for v in ("plain", "naïve", None, "")]
    (dead,) = gm.dead(str(tmp_path / "text")).to_pylist()
    assert dead["position"] == 4 and "value=bytes" in dead["message"]
    with pytest.raises(gm.BadSource, match=r"not JSON objects.*value=text"):
        job(topic.address, tmp_path / "out").run()
    with pytest.raises(gm.BadJob, match=r"value is 'xml': it must be one of json, avro, text, bytes"):
        job(f"{topic.address}?value=xml", tmp_path / "out").run()
    assert not (tmp_path / "out" / "_SUCCESS").exists()


def test_values_that_are_not_json_are_dead_letters(topic: Topic, tmp_path: Path) -> None:
    """With their offset and what they hold; a record without a value has null in all columns."""
    topic.put([{"id": 1}, b"{broken", b"", b"[1]", {"id": 5}, b'{"id":\n 6}'], 1)
    topic.put([None, b'{"id": 8}\n', b'\n{"id": 9}', b' {\n"id": 10\n}\r\n\n'], 1)
    report = job(topic.address, tmp_path / "out", on_bad_file="fail").run()
    assert ids(tmp_path / "out") == [1, 5, 6, 8, 9, 10]
    dead = gm.dead(str(tmp_path / "out")).to_pylist()
    assert sorted(d["position"] for d in dead) == [1, 2, 3, 6] and report.rows_dead == 4
    assert all(d["source"].startswith(topic.address + "/1/0-10") for d in dead)


@pytest.mark.few(1)
def test_where_limit_sample_and_columns(topic: Topic, tmp_path: Path) -> None:
    """They hold for topics as for files, the broker's columns among them."""
    topic.rows(0, 100)
    found = kept(topic.address, tmp_path / "a", ["id"], where="id >= 10 and _partition = 0 and _offset < 20")
    assert [r["id"] for r in found] == list(range(10, 40, 2))
    assert len(kept(topic.address, tmp_path / "b", ["id"], limit=7)) == 7
    found = kept(topic.address, tmp_path / "c", ["id", "_offset"], sample=9)
    assert len(found) == 9 and all(r["_offset"] == r["id"] // 2 for r in found)
    assert kept(topic.address, tmp_path / "d", ["_offset"], columns=["_offset"], where="_partition = 1")[-1] == {
        "_offset": 49
    }


@pytest.mark.few(1)
def test_a_topic_without_records_is_a_source_of_no_rows(topic: Topic, tmp_path: Path) -> None:
    """The first records are appended."""
    sink = gm.sink(str(tmp_path / "out"), keep=KEPT)
    empty = gm.Job(gm.source(topic.address), gm.model(doubled), sink, workers=0, gates={"allow_empty": True})
    assert empty.run().rows_in == 0
    topic.rows(0, 5)
    assert empty.run(append=True).rows_ok == 5
    assert ids(tmp_path / "out") == list(range(5))


ID = {"name": "id", "type": "long"}
SCHEMA = {
    "type": "record",
    "name": "R",
    "fields": [ID, {"name": "u", "type": ["null", {"type": "string", "logicalType": "uuid"}]}],
}
WIDER = {**SCHEMA, "fields": [*SCHEMA["fields"], {"name": "note", "type": ["null", "string"], "default": None}]}
UUID = "12345678-1234-5678-1234-567812345678"


def encoded(schema: dict[str, Any], row: dict[str, Any], number: int | None = None) -> bytes:
    """A value as Avro, framed if its schema has a number."""
    import fastavro

    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), row)
    return (b"" if number is None else b"\0" + number.to_bytes(4, "big")) + out.getvalue()


@contextmanager
def registry(schemas: dict[int, Any], asked: list[str]) -> Iterator[str]:
    """A server that knows schemas by their numbers, and who asked."""

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers.get("Authorization", ""))
            number = int(self.path.rpartition("/")[2])
            self.send_response(200 if number in schemas else 404)
            self.end_headers()
            if number in schemas:
                self.wfile.write(json.dumps({"schema": json.dumps(schemas[number])}).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Registry)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_avro_of_one_schema(topic: Topic, tmp_path: Path) -> None:
    """Bytes that are no record of it are dead letters; without a schema the way out is told."""
    pytest.importorskip("fastavro")
    (tmp_path / "r.avsc").write_text(json.dumps(SCHEMA))
    topic.put(
        [encoded(SCHEMA, {"id": 7, "u": UUID}), None, b"\xff\xff", encoded(SCHEMA, {"id": 8, "u": None}) + b"!"], 0
    )
    address = f"{topic.address}?value=avro&schema={tmp_path}/r.avsc"
    assert kept(address, tmp_path / "out", ["id", "u"]) == [{"id": 7, "u": UUID}, {"id": None, "u": None}]
    assert [d["position"] for d in gm.dead(str(tmp_path / "out")).to_pylist()] == [2, 3]
    with pytest.raises(gm.BadJob, match=r"needs the values' schema: schema=FILE.avsc.*schema.registry.url"):
        kept(f"{topic.address}?value=avro", tmp_path / "no", ["id"])


@pytest.mark.few(1)
def test_avro_of_a_registry(topic: Topic, tmp_path: Path) -> None:
    """Each value is read with the schema it names; the registry's password is nowhere in the sink."""
    pytest.importorskip("fastavro")
    topic.put([encoded(SCHEMA, {"id": 1, "u": UUID}, 4), encoded(WIDER, {"id": 2, "u": None, "note": "ü"}, 9)], 0)
    asked: list[str] = []
    with registry({4: SCHEMA, 9: WIDER}, asked) as url:
        storage = {"schema.registry.url": url, "basic.auth.user.info": "me:ssh-secret"}
        found = kept(f"{topic.address}?value=avro", tmp_path / "out", ["id", "u", "note"], storage=storage)
        assert found == [{"id": 1, "u": UUID, "note": None}, {"id": 2, "u": None, "note": "ü"}]
        assert set(asked) == {"Basic bWU6c3NoLXNlY3JldA=="}
        topic.put([encoded(SCHEMA, {"id": 1, "u": UUID}, 5)], 1)
        with pytest.raises(gm.BadSource, match="the registry has no schema 5 for us: 404"):
            kept(f"{topic.address}?value=avro", tmp_path / "no", ["id"], storage=storage)
    assert not said_in(tmp_path / "out", b"ssh-secret")


def said_in(folder: Path, secret: bytes) -> list[str]:
    """Files that hold a secret."""
    files = [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]
    return [file for file in files if secret in Path(file).read_bytes()]


@pytest.mark.few(1)
def test_secrets_of_an_address_reach_nothing(topic: Topic, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither sink nor messages, whether they are in the address or in storage."""
    topic.rows(0, 30)
    address = topic.address.replace("://", "://user:ssh-one@")
    todo = job(address, tmp_path / "out", storage={"ssl.key.password": "ssh-two"})
    todo.run()
    assert todo.plan().sink
    shown = capfd.readouterr()
    assert "ssh-" not in shown.out + shown.err
    assert not said_in(tmp_path / "out", b"ssh-")
    with pytest.raises(gm.BadJob, match="No such configuration property") as told:
        job(address, tmp_path / "no", storage={"sasl.pasword": "ssh-two"}).run()
    assert "ssh-" not in str(told.value)
    with pytest.raises(gm.BadJob, match=r"'auto.offset.reset', which is ours to set"):
        job(address, tmp_path / "no", storage={"auto.offset.reset": "earliest"}).run()
    with pytest.raises(gm.BadJob, match=r"has 'vlue': an address takes .*; did you mean 'value'\?$"):
        job(f"{address}?vlue=text", tmp_path / "no").run()
    assert not (tmp_path / "no").exists()


def certified(folder: Path, password: str) -> tuple[Path, Path]:
    """A self-made certificate of this machine, and its key, which the password opens."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    cert, key = folder / "cert.pem", folder / "key.pem"
    said = [
        "-x509",
        "-newkey",
        "rsa:2048",
        "-days",
        "2",
        "-subj",
        "/CN=reader",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    files = ["-keyout", str(key), "-out", str(cert), "-passout", f"pass:{password}"]
    subprocess.run([openssl, "req", *said, *files], check=True, capture_output=True)
    return cert, key


@pytest.mark.long
def test_by_tls_with_a_certificate_of_each_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               capfd: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """The properties of the client are those of `storage`, secrets of the environment among them, which are nowhere in
    the sink; what is wrong with them is told in the client's words.
    """
    password = "ssh-of-the-key"
    cert, key = certified(tmp_path, password)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key, password)
    context.load_verify_locations(cert)
    context.verify_mode = ssl.CERT_REQUIRED
    monkeypatch.setenv("KEY_PASSWORD", password)
    monkeypatch.setattr("gristmill.sources.kafkalog.ANSWER", 4.0)
    with contextlib.ExitStack() as stack:
        front = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = f"127.0.0.1:{front.getsockname()[1]}"
        broker = stack.enter_context(storeservers.tansu(address))
        shown = stack.enter_context(storeservers.tls(front, broker, context))
        client = {"security.protocol": "SSL", "ssl.ca.location": str(cert), "ssl.certificate.location": str(cert),
                  "ssl.key.location": str(key)}  # fmt: skip
        secret = {**client, "ssl.key.password": password, "bootstrap.servers": address, "log_level": 0}
        made(secret, "reviews", 1)
        producer = kafka.Producer(secret)
        for i in range(30):
            producer.produce("reviews", json.dumps({"id": i}))
        assert producer.flush(10) == 0
        said = {
            "source": {
                "uri": f"kafka://{address}/reviews",
                "storage": {**client, "ssl.key.password": "${env:KEY_PASSWORD}"},
            },
            "model": {"call": "topics:doubled", "returns": {"double": "int64"}},
            "sink": {"uri": str(tmp_path / "out"), "keep": KEPT},
            "engine": {"workers": 1},
        }
        (tmp_path / "job.yaml").write_text(json.dumps(said))
        shown.clear()
        gm.load_job(str(tmp_path / "job.yaml")).run()
        assert ids(tmp_path / "out") == list(range(30)) and set(shown) == {"reader"}
        out = capfd.readouterr()
        assert "ssh-" not in out.out + out.err and not said_in(tmp_path / "out", password.encode())
        for change, words in (
            ({"ssl.key.password": "ssh-other"}, r"the Kafka client does not take this \(storage\)"),
            ({"ssl.ca.location": ""}, "does not let us in: .*certificate verify failed"),
        ):
            wrong = {**client, "ssl.key.password": password, **change}
            wrong = {n: v for n, v in wrong.items() if v}
            with pytest.raises((gm.BadJob, gm.BadSource), match=words) as told:
                job(f"kafka://{address}/reviews", tmp_path / "no", storage=wrong).run()
            assert "ssh-" not in str(told.value) and not (tmp_path / "no").exists()
        openreaders.close_all()


def test_sasl_is_said_to_the_broker(broker: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                    capfd: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Whose refusal is told without the password (neither broker lets anybody in so)."""
    monkeypatch.setattr("gristmill.sources.kafkalog.ANSWER", 1.5)
    said = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "me"}
    with pytest.raises((gm.BadSource, gm.RunFailed), match=r"kafka://.*/reviews: ") as told:
        job(f"kafka://{broker[1]}/reviews", tmp_path / "no", storage={**said, "sasl.password": "ssh-mine"}).run()
    out = capfd.readouterr()
    assert "ssh-" not in str(told.value) + out.out + out.err and not (tmp_path / "no").exists()


@pytest.mark.few(1)
def test_a_broker_that_is_away_and_a_topic_that_is_not_there(broker: tuple[str, str], tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """One line with the client's own words, before anything is made."""
    monkeypatch.setattr("gristmill.sources.kafkalog.ANSWER", 2.0)
    with pytest.raises(gm.RunFailed, match=r"kafka://127.0.0.1:1/reviews: cannot be reached: .*run again") as told:
        job("kafka://127.0.0.1:1/reviews", tmp_path / "out").run()
    assert told.value.exit_code == 1 and "\n" not in str(told.value)
    if broker[0] == "tansu":
        topic = Topic(*broker)
        with pytest.raises(gm.BadSource, match=f"there is no topic '{topic.name}x': .*; did you mean '{topic.name}'"):
            job(topic.address + "x", tmp_path / "out").run()
    with pytest.raises(gm.BadJob, match=r"give brokers and a topic, as in kafka://HOST:9092/TOPIC"):
        job(f"kafka://{broker[1]}", tmp_path / "out").run()
    assert not (tmp_path / "out").exists()


def test_ranges_are_read_one_after_the_other_whatever_is_between(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client goes on where it is, and begins anew elsewhere."""
    topic.rows(0, 4000)
    log = TopicLog(topic.brokers, topic.name)
    for first, last in ((0, 10), (10, 500), (500, 510), (490, 505), (1900, 2000), (0, 2000), (7, 8)):
        found = [m.offset() for part in log.records(Span(1, first, last), 1 << 12) for m in part]
        assert found == list(range(first, last))
    monkeypatch.setattr("gristmill.sources.kafkalog._END_AGAIN", 0.5)
    with pytest.raises(gm.PlanChanged, match="the topic had been made anew"):
        list(log.records(Span(1, 1990, 2010), 1 << 20))


@pytest.mark.long
def test_a_broker_that_goes_away_is_waited_for_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever reads a range, once its patience is over."""
    from gristmill.sources.patience import StoreAway

    monkeypatch.setattr("gristmill.sources.kafkalog.PATIENCE", 0.5)
    with storeservers.tansu() as address:
        topic = Topic("tansu", address)
        topic.rows(0, 10)
        log = TopicLog(topic.brokers, topic.name)
        assert len(log.spans()) == PARTITIONS["tansu"]
    with pytest.raises(StoreAway, match=r"kafka://.*: the broker did not answer"):
        list(log.records(Span(0, 0, 5), 1 << 20))


@pytest.mark.skipif(sys.platform == "win32", reason="signals to a process")
def test_a_signal_is_heard_while_a_broker_does_not_answer(tmp_path: Path) -> None:
    """The client waits for half a minute, in C."""
    with silent() as (place, asked), signalled(asked) as stopped, pytest.raises(stopped):
        job(f"kafka://{place}/reviews", tmp_path / "out").plan()


def test_a_plan_tells_offsets_and_about_how_many_bytes(topic: Topic, tmp_path: Path) -> None:
    """From a sample of what the topic holds."""
    topic.put([{"id": i, "text": "x" * 1000} for i in range(100)])
    told = job(topic.address, tmp_path / "out").plan()
    assert told.rows == 100 and told.rows_estimated and 100_000 < told.bytes < 110_000
