"""Whole jobs with a sink in a real object store: published once, resumed, verified, refused where it must be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill as gm
from batchserver import BatchServer
from gristmill.errors import BadJob, CorruptStore, SinkBusy
from gristmill.files import heartbeat, lease
from gristmill.files.objectstore import ObjectFiles
from gristmill.files.roots import opened
from gristmill.result import reading
from llmserver import KEY as API_KEY
from s3server import SECRET, Forgetful, S3Server, Troubled

ROWS = 600


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rows") / "a.parquet"
    pq.write_table(pa.table({"id": np.arange(ROWS)}), path)
    return str(path)


def double(batch: dict[str, Any]) -> dict[str, Any]:
    return {"twice": batch["id"] * 2}


def picky(batch: dict[str, Any]) -> dict[str, Any]:
    if (batch["id"] == 7).any() and not os.path.exists(os.environ.get("GM_FIXED", "/nope")):
        raise ValueError("no sevens")
    return {"twice": batch["id"] * 2}


def job(server: S3Server, rows: str, name: str, fn: Any = double, address: str = "", **sink: Any) -> gm.Job:
    target = gm.sink(f"s3://box/{name}", keep=["id"], storage=server.storage(address), **sink)
    return gm.Job(rows, fn, target, shard_rows=100, workers=0, gates={"min_ok": 0.9})


def files_of(server: S3Server, name: str) -> tuple[str, ObjectFiles]:
    root, files = opened(f"s3://box/{name}", server.storage())
    assert isinstance(files, ObjectFiles)
    return root, files


@pytest.mark.long
def test_rows_are_proved_and_two_nights_compared_in_a_store(server: S3Server, rows: str) -> None:
    """Files, receipts and plan are fetched and hashed; the result before the latest is proved while it is kept."""
    job(server, rows, "proved").run()
    storage = server.storage()
    found = gm.prove("s3://box/proved", 123, key="id", storage=storage, source=True)
    assert found.ok and found.inputs[0].position == 123 and found.row == {"id": 123, "twice": 246}
    assert gm.prove("s3://box/proved", f"{rows}:123", storage=storage).row == found.row
    with pytest.warns():
        job(
            server, rows, "proved", lambda batch: {"twice": [n * 3 if n != 5 else ValueError() for n in batch["id"]]}
        ).run(restart=True)
    changes = gm.diff("s3://box/proved@1", "s3://box/proved", on="id", storage=storage)
    assert (changes.changed, changes.gone, changes.same) == (ROWS - 2, 1, 1)
    assert gm.prove("s3://box/proved@1", 123, key="id", storage=storage).row == found.row


SORTED = {"partition_by": ["part"], "sort_by": ["twice"], "files": 2}


@pytest.mark.parametrize("how", [{}, {"format": "jsonl"}, {"merge": True}, {"partition_by": ["part"]}, SORTED],
                         ids=["parquet", "jsonl", "merge", "partitions", "sorted"])  # fmt: skip
def test_every_row_once(server: S3Server, rows: str, how: dict[str, Any]) -> None:
    """Published, read back, verified; a second run does nothing; no work file is left."""
    name = "once" + "".join(how)

    def parted(batch: dict[str, Any]) -> dict[str, Any]:
        return {**double(batch), "part": [str(i % 3) for i in batch["id"]]}

    made = job(server, rows, name, parted if "partition_by" in how else double, **how)
    report = made.run()
    table = report.read().to_table().sort_by("id")
    assert table["id"].to_pylist() == list(range(ROWS))
    assert table["twice"].to_pylist() == [2 * i for i in range(ROWS)]
    assert gm.verify(made).ok
    assert gm.status(made)["state"] == "done"
    assert made.run().state == "nothing to do"
    root, files = files_of(server, name)
    assert [n for n in files.below(root, "none") if n.endswith(".tmp") or "lease" in n or "probe" in n] == []
    data = [n for n in files.below(root, "_gristmill") if not n.startswith("_")]
    assert len(data) == {"": 6, "format": 6, "merge": 1, "partition_by": 3}.get("".join(how), 6)


@pytest.mark.parametrize("threads", [False, True])
def test_parts_are_joined_after_a_stop(
    server: S3Server, rows: str, monkeypatch: pytest.MonkeyPatch, threads: bool
) -> None:
    """What was joined before the run was stopped is not joined again, and nothing is scored again."""
    from gristmill.commit import merge
    from gristmill.sinks import partition

    monkeypatch.setattr(partition, "HELD_BYTES", 100)  # shards spill what they hold
    monkeypatch.setattr(merge, "AT_ONCE_BYTES", 0 if threads else 1 << 30)
    write, calls, scored = merge.Joining._write, [], []

    def thirds(batch: dict[str, Any]) -> dict[str, Any]:
        scored.append(len(batch["id"]))
        return {**double(batch), "part": batch["id"] % 3}

    def stopped(self: merge.Joining, file: merge.Joined) -> Any:
        calls.append(file.folder)
        if file.folder == "part=1" and calls.count("part=1") == 1:
            raise OSError("the machine went away")
        return write(self, file)

    monkeypatch.setattr(merge.Joining, "_write", stopped)
    made = job(server, rows, f"stopped{threads}", thirds, partition_by=["part"], sort_by=["twice"])
    with pytest.raises(gm.RunFailed, match="the machine went away"):
        made.run()
    before = sum(scored)
    report = made.run()
    assert sum(scored) == before and calls.count("part=0") == 1 and calls.count("part=1") == 2
    assert report.read().to_table()["id"].to_pylist() == [i for p in range(3) for i in range(p, ROWS, 3)]
    assert gm.verify(made, deep=True).ok


@pytest.mark.long
def test_a_report_of_the_whole_result(server: S3Server, rows: str) -> None:
    """`reduce` reads the parts before they are published, and its file is an object beside them."""

    def counted(stream: pa.RecordBatchReader, folder: str) -> None:
        Path(folder, "count.txt").write_text(str(sum(b.num_rows for b in stream)))

    target = gm.sink("s3://box/reduced", keep=["id"], storage=server.storage(), files=2)
    for restart in (False, True):
        made = gm.Job(rows, double, target, shard_rows=100, workers=0, reduce=counted)
        assert made.run(restart=restart).state == "done"
        assert gm.verify(made, deep=True).ok
        ((name, path),) = gm.reduced(made).items()
        root, files = files_of(server, "reduced")
        assert name == "count.txt" and files.read(path) == str(ROWS).encode()
        assert [n for n in files.below(root, "_gristmill") if n.startswith("_reduced/")] == [path[len(root) + 1 :]]


@pytest.mark.long
def test_vectors_are_reduced_before_they_are_published(server: S3Server, rows: str) -> None:
    """Of an npy sink, from objects that have no visible name yet; a file of it that is deleted is made again."""

    def summed(stream: pa.RecordBatchReader, folder: str) -> None:
        total = sum(float(b.column("v").flatten().to_numpy().sum(dtype=np.float64)) for b in stream)
        Path(folder, "sum.txt").write_text(str(total))

    def vectors(batch: dict[str, Any]) -> dict[str, Any]:
        return {"v": np.stack([batch["id"], batch["id"]], axis=1).astype(np.float32)}

    target = gm.sink("s3://box/summed", keep=["id"], storage=server.storage(), format="npy", files=2)
    made = gm.Job(rows, vectors, target, shard_rows=100, workers=0, reduce=summed)
    _root, files = files_of(server, "summed")
    wanted = str(float(ROWS * (ROWS - 1))).encode()
    for state in ("done", "nothing to do", "nothing to do"):
        assert made.run().state == state and gm.verify(made, deep=True).ok
        ((_, path),) = gm.reduced(made).items()
        assert files.read(path) == wanted
        files.remove(path)
    assert "missing" in " ".join(gm.verify(made).lines)


def test_a_folder_named_like_a_file(server: S3Server, rows: str) -> None:
    """There are only folders in a store; one is named with a slash at its end."""
    report = job(server, rows, "out.parquet/").run()
    assert sorted(report.read().to_table()["id"].to_pylist()) == list(range(ROWS))
    assert job(server, rows, "out.parquet/").run().state == "nothing to do"


def test_npy(server: S3Server, rows: str) -> None:
    """Vectors, their ids and the manifest."""
    made = job(server, rows, "npy", lambda b: {"v": np.ones((len(b["id"]), 4), np.float32)}, format="npy")
    made.run()
    assert gm.verify(made).ok
    root, files = files_of(server, "npy")
    manifest = pq.read_table(pa.BufferReader(files.read(f"{root}/manifest.parquet")))
    assert sum(manifest["rows"].to_pylist()) == ROWS


@pytest.mark.long
def test_restart_replaces_and_dead_rows_are_retried(
    server: S3Server, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generations: dead letters scored again join the result; a restart replaces it and cleans up."""
    from gristmill.driver.run import retry_dead

    made = job(server, rows, "retry", picky)
    report = made.run()
    assert report.rows_dead == 1
    assert json.loads(report.dead()["payload"][0].as_py()) == {"id": 7}
    (tmp_path / "fixed").touch()
    monkeypatch.setenv("GM_FIXED", str(tmp_path / "fixed"))
    assert retry_dead(made.spec).rows_dead == 0
    again = made.run(restart=True)
    assert sorted(again.read().to_table()["id"].to_pylist()) == list(range(ROWS))
    assert gm.verify(made).ok


def test_letters_that_were_cleared_away_are_retried_all_the_same(
    server: S3Server, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk: those in `_dead` are the reader's."""
    made = job(server, rows, "cleared", picky)
    made.run()
    root, files = files_of(server, "cleared")
    files.remove_folder(f"{root}/_dead")
    assert gm.dead(made).num_rows == 1
    (tmp_path / "fixed").touch()
    monkeypatch.setenv("GM_FIXED", str(tmp_path / "fixed"))
    assert gm.retry_dead(made).rows_dead == 0
    assert sorted(gm.read(made).to_table()["id"].to_pylist()) == list(range(ROWS))


def test_nothing_is_appended_to_a_result_of_which_a_part_has_gone(server: S3Server, tmp_path: Path) -> None:
    """Fault 36: a bucket's lifecycle rule took it. Refused, and nothing is published."""
    for name, first in (("a", 0), ("b", 100)):
        pq.write_table(pa.table({"id": range(first, first + 10)}), tmp_path / f"{name}.parquet")
        made = job(server, f"{tmp_path}/*.parquet", "taken")
        if name == "a":
            made.run()
    root, files = files_of(server, "taken")
    (part,) = (n for n in files.below(root, "_gristmill") if n.startswith("part-"))
    files.remove(f"{root}/{part}")
    with pytest.raises(CorruptStore, match=f"{part} is published, but the file is gone: .*--restart"):
        made.run(append=True)
    assert gm.status(made)["published_generation"] == 1
    made.run(restart=True)
    assert gm.read(made).count_rows() == 20


def test_a_reader_in_the_middle_of_a_file_reads_on(server: S3Server, rows: str) -> None:
    """Fault 61: though a restart publishes, and its part is visible no more."""
    made = job(server, rows, "readers", lambda b: {"v": np.random.rand(len(b["id"]), 400)})
    made.run()
    system, paths = (data := gm.read(made)).filesystem, data.files
    with system.open_input_file(paths[0]) as part:
        size = part.size()
        head = part.read(size // 2)
        made.run(restart=True)
        whole = head + part.read()
    assert len(whole) == size
    assert pq.read_table(pa.BufferReader(whole)).num_rows == 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_is_told_that_the_store_s_connections_do_not_go_on(server: S3Server, rows: str) -> None:
    """At once, as no request would ever end there; its parent's do."""
    made = job(server, rows, "forked")
    made.run()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            gm.read(made)
        except BadJob as e:
            os.write(writing, str(e).encode())
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert f"was forked from process {os.getpid()}" in os.read(reading, 4096).decode()
    assert gm.read(made).count_rows() == ROWS


def test_a_damaged_and_a_deleted_part_are_named(server: S3Server, rows: str) -> None:
    """Fault 36."""
    made = job(server, rows, "damaged")
    made.run()
    root, files = files_of(server, "damaged")
    parts = sorted(n for n in files.below(root, "_gristmill") if n.startswith("part-"))
    files.remove(f"{root}/{parts[0]}")
    whole = files.read(f"{root}/{parts[1]}")
    files.write_over(f"{root}/{parts[1]}", whole[:-9] + b"x" + whole[-8:])
    verdict = gm.verify(made)
    assert not verdict.ok
    assert any(parts[0] in line and "missing" in line for line in verdict.lines)
    assert any(parts[1] in line and "changed" in line for line in verdict.lines)


def test_a_store_that_ignores_conditions_is_refused(server: S3Server, rows: str) -> None:
    """Fault 32: two runs could both commit a shard there."""
    store = Forgetful()
    try:
        with pytest.raises(BadJob, match="ignores If-None-Match"):
            job(server, rows, "refused", address=store.address).run()
    finally:
        store.close()


def test_the_second_run_on_a_sink_is_told_whose_it_is(server: S3Server, rows: str) -> None:
    """Fault 30: exit 75, naming the first."""
    root, files = files_of(server, "held")
    held = files.lease("held", f"{root}/_gristmill", lambda _: None)
    with held, pytest.raises(SinkBusy, match=f"process {os.getpid()} on "):
        job(server, rows, "held").run()
    assert job(server, rows, "held").run().rows_ok == ROWS


def test_a_receipt_is_created_once(server: S3Server) -> None:
    """Of many at once one wins; an answer that was lost is found to be one's own."""
    root, files = files_of(server, "create")
    won: list[int] = []
    racers = [
        threading.Thread(target=lambda n=n: won.append(n) if files.write_new(f"{root}/r", b"%d" % n) else None)
        for n in range(8)
    ]  # fmt: skip
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert len(won) == 1
    assert files.read(f"{root}/r") == b"%d" % won[0]
    assert files.write_new(f"{root}/r", b"%d" % won[0])


RUN = """
import sys, time
import gristmill as gm
def slow(batch):
    time.sleep(0.3)
    print("scored", int(batch["id"][0]), flush=True)
    return {"twice": batch["id"] * 2}
rows, uri, address = sys.argv[1:4]
storage = {"access_key": "AKIAME", "secret_key": "hu/sh+word", "endpoint_override": address, "scheme": "http"}
sink = gm.sink(uri, keep=["id"], storage=storage)
report = gm.Job(rows, slow, sink, shard_rows=50, workers=0).run()
print("rows", report.rows_ok, report.shards_resumed)
"""


def started(server: S3Server, rows: str, name: str, folder: Path, before: str = "") -> subprocess.Popen[str]:
    """The same script each time, `before` being what its interpreter does first."""
    script = folder / "run.py"
    script.write_text(RUN)
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(before)
    paths = [str(folder / "site"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)} if before else None
    command = [sys.executable, str(script), rows, f"s3://box/{name}", server.address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def after_some_receipts(server: S3Server, name: str, least: int) -> None:
    root, files = files_of(server, name)
    deadline = time.monotonic() + 60
    while sum("/receipts/" in n for n in files.below(root, "none")) < least:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.long
def test_killed_and_resumed(server: S3Server, rows: str, tmp_path: Path) -> None:
    """SIGKILL of the run: the next one takes the lease at once and scores no committed shard again."""
    first = started(server, rows, "killed", tmp_path)
    after_some_receipts(server, "killed", 3)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    second = started(server, rows, "killed", tmp_path)
    said, _ = second.communicate(timeout=120)
    assert second.returncode == 0, said
    resumed = int(said.split()[-1])
    assert resumed >= 3
    scored = [int(line.split()[1]) for line in said.splitlines() if line.startswith("scored")]
    assert min(scored) >= 50 * 3  # the first shards have their receipts
    root, files = files_of(server, "killed")
    assert sorted(reading.read(root, files).to_table()["id"].to_pylist()) == list(range(ROWS))


@pytest.mark.long
def test_the_server_stops_in_the_middle(weed: Path, rows: str, tmp_path: Path) -> None:
    """Fault 32: requests wait until it is back."""
    server = S3Server(weed, tmp_path)
    try:
        _stopped_and_started(server, rows, tmp_path)
    finally:
        server.stop()


def _stopped_and_started(server: S3Server, rows: str, tmp_path: Path) -> None:
    run = started(server, rows, "stopped", tmp_path)
    after_some_receipts(server, "stopped", 2)
    server.stop()
    time.sleep(2)
    server.start()
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    root, files = files_of(server, "stopped")
    assert sorted(reading.read(root, files).to_table()["id"].to_pylist()) == list(range(ROWS))


@pytest.mark.long
def test_the_commands_reach_a_store(server: S3Server, rows: str, tmp_path: Path) -> None:
    """apply, status, dead, verify and the same apply again, with what the libraries themselves read from the
    environment and the endpoint in the address.
    """
    (tmp_path / "doubling.py").write_text("def double(batch):\n    return {'twice': batch['id'] * 2}\n")
    at = server.storage()
    keys = {"AWS_ACCESS_KEY_ID": at["access_key"], "AWS_SECRET_ACCESS_KEY": at["secret_key"]}
    sink = f"s3://box/commands?endpoint=http://{server.address}&region=us-east-1"

    def told(*args: str) -> str:
        command = [sys.executable, "-m", "gristmill", *args]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **keys})
        assert done.returncode == 0, done.stderr
        assert at["secret_key"] not in done.stdout + done.stderr
        return done.stdout

    apply = ("apply", rows, sink, "--fn", "doubling:double", "--keep", "id", "--progress", "off")
    assert json.loads(told(*apply, "--json"))["rows_ok"] == ROWS
    assert json.loads(told("status", sink, "--json"))["state"] == "done"
    assert "nothing to do" in told(*apply).lower()
    assert told("dead", sink) is not None
    told("verify", sink)
    assert gm.status("s3://box/commands", storage=at)["rows_ok"] == ROWS
    assert gm.verify("s3://box/commands", storage=at).ok


@pytest.mark.long
def test_commands_end_as_they_say(server: S3Server, rows: str, tmp_path: Path) -> None:
    """The library's threads are still at work when a command is done: it ended with SIGABRT, one time in fifteen."""
    at = server.storage()
    keys = {"AWS_ACCESS_KEY_ID": at["access_key"], "AWS_SECRET_ACCESS_KEY": at["secret_key"]}
    gm.Job(rows, double, gm.sink("s3://box/ends", keep=["id"], storage=at), workers=0).run()
    sink = f"s3://box/ends?endpoint=http://{server.address}&region=us-east-1"
    command = [sys.executable, "-m", "gristmill", "status", sink, "--json"]
    for _ in range(15):
        several = [subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **keys}) for _ in range(3)]
        assert [json.loads(p.communicate()[0])["state"] for p in several] == ["done"] * 3
        assert [p.returncode for p in several] == [0] * 3


@pytest.mark.long
def test_a_lease_that_moves_no_more_is_taken(server: S3Server, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder was on another machine, so that only its heartbeat tells of it: without one for STALE seconds the sink
    is free, with one it is busy.
    """
    monkeypatch.setattr(heartbeat, "STALE", 2.0)
    monkeypatch.setattr(heartbeat, "LOOK", 0.2)
    root, files = files_of(server, "stale")
    theirs = {**vars(lease.myself()), "host": "elsewhere", "machine": "another kernel", "nonce": "theirs"}
    assert files.write_new(f"{root}/_gristmill/lease.json", json.dumps({**theirs, "beat": 0}).encode())
    over = threading.Event()

    def beats() -> None:
        count = 0
        while not over.wait(0.1):
            count += 1
            _, version = files.look(f"{root}/_gristmill/lease.json")
            files.swap(f"{root}/_gristmill/lease.json", json.dumps({**theirs, "beat": count}).encode(), version)

    beating = threading.Thread(target=beats)
    beating.start()
    with pytest.raises(SinkBusy, match="elsewhere"):
        job(server, rows, "stale").run()
    over.set()
    beating.join()
    began = time.monotonic()
    assert job(server, rows, "stale").run().rows_ok == ROWS
    assert time.monotonic() - began > 2.0


@pytest.mark.long
def test_a_run_that_stood_still_comes_back(server: S3Server, rows: str, tmp_path: Path) -> None:
    """Faults 29a and 35: stopped for longer than its lease lasts, while another machine's run does all its work; as it
    goes on it commits nothing anew, and every row is there once.
    """
    first = started(server, rows, "stood", tmp_path)
    after_some_receipts(server, "stood", 2)
    first.send_signal(signal.SIGSTOP)
    elsewhere = (
        "import gristmill.files.heartbeat as h\nh.STALE, h.LOOK, h._machine = 2.0, 0.2, lambda: 'another machine'\n"
    )
    second = started(server, rows, "stood", tmp_path, before=elsewhere)
    said, _ = second.communicate(timeout=120)
    assert second.returncode == 0, said
    root, files = files_of(server, "stood")
    published = files.read(f"{root}/_SUCCESS")
    first.send_signal(signal.SIGCONT)
    first.communicate(timeout=120)
    assert json.loads(files.read(f"{root}/_SUCCESS"))["files"] == json.loads(published)["files"]
    assert sorted(reading.read(root, files).to_table()["id"].to_pylist()) == list(range(ROWS))
    assert gm.verify("s3://box/stood", storage=server.storage()).ok


@pytest.mark.long
def test_two_runs_at_once(server: S3Server, rows: str, tmp_path: Path) -> None:
    """Started together on an empty sink: one scores every row, the other is told whose it is, or finds it done."""
    runs = [started(server, rows, "raced", tmp_path) for _ in range(2)]
    said = [run.communicate(timeout=120)[0] for run in runs]
    assert sorted(run.returncode for run in runs)[0] == 0, said
    assert sum("rows 600" in text for text in said) >= 1
    for run, text in zip(runs, said, strict=True):
        assert run.returncode == 0 or "another run holds this sink" in text
    root, files = files_of(server, "raced")
    assert sorted(reading.read(root, files).to_table()["id"].to_pylist()) == list(range(ROWS))


def test_secrets_are_nowhere(server: S3Server, rows: str) -> None:
    """Fault 39: neither in what stands in the store nor in reports and errors; a wrong one is told without it."""
    made = job(server, rows, "secrets")
    report = made.run()
    root, files = files_of(server, "secrets")
    for name in files.below(root, "none"):
        assert SECRET.encode() not in files.read(f"{root}/{name}"), name
    assert SECRET not in repr(report) + json.dumps(report.as_dict(), default=str) + repr(files)
    wrong = {**server.storage(), "secret_key": "wrongword"}
    with pytest.raises(BadJob, match="cannot be read") as caught:
        gm.Job(rows, double, gm.sink("s3://box/denied", storage=wrong), workers=0).run()
    assert "wrongword" not in str(caught.value) + str(caught.value.__cause__)


@pytest.mark.long
def test_a_store_in_trouble(server: S3Server, rows: str) -> None:
    """Fault 32: of the requests some are refused with 503 or 429, come late, or lose their answer after they were done.
    The job takes longer, and its result is exact.
    """
    proxy = Troubled(server.address, every=7)
    try:
        made = job(server, rows, "trouble", address=proxy.address)
        report = made.run()
        assert sorted(report.read().to_table()["id"].to_pylist()) == list(range(ROWS))
        assert gm.verify(made).ok
        assert all(proxy.troubles[kind] >= 1 for kind in Troubled.KINDS), proxy.troubles
    finally:
        proxy.close()
    root, files = files_of(server, "trouble")
    assert [n for n in files.below(root, "none") if n.endswith(".tmp")] == []


@pytest.mark.long
def test_requests_a_shard(server: S3Server, rows: str) -> None:
    """What a shard more costs in requests, as docs/scaling.md says: a bill and a rate limit are made of it."""
    seen = []
    for shard_rows in (100, 20):
        proxy = Troubled(server.address)
        target = gm.sink(f"s3://box/count{shard_rows}", keep=["id"], storage=server.storage(proxy.address))
        report = gm.Job(rows, double, target, shard_rows=shard_rows, workers=0).run()
        seen.append((report.shards, dict(proxy.seen)))
        proxy.close()
    (few, before), (many, after) = seen
    a_shard = {kind: (after[kind] - before[kind]) / (many - few) for kind in after}
    print(few, before, many, after, a_shard)
    assert a_shard["PUT"] <= 3.2, a_shard  # the part, its receipt, its copy under the published name
    assert sum(a_shard.values()) <= 8, a_shard


def test_files_are_appended(server: S3Server, tmp_path: Path) -> None:
    """--append in a store: only the new file is scored, and both are read."""
    (tmp_path / "in").mkdir()
    for n in range(2):
        pq.write_table(pa.table({"id": np.arange(n * 50, n * 50 + 50)}), tmp_path / "in" / f"{n}.parquet")
        made = job(server, str(tmp_path / "in"), "append")
        report = made.run(append=n > 0)
        assert report.rows_run == 50
    assert sorted(report.read().to_table()["id"].to_pylist()) == list(range(100))
    assert gm.verify(made).ok


@pytest.mark.long
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_process_that_leaves_a_read_ends_well(server: S3Server, rows: str, form: str) -> None:
    """Arrow's threads, which read objects through Python, do not abort the process that ends in the midst of it."""
    job(server, rows, f"left-{form}", format=form).run()
    code = f"import gristmill as gm; rows = gm.read('s3://box/left-{form}', storage={server.storage()!r}); "
    for _ in range(3):
        line = [sys.executable, "-c", code + "next(iter(rows.to_batches()))"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
def test_a_job_file_says_how_to_reach_its_sink(
    server: S3Server, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its dead letters are shown and scored again by the job's name, or the sink's with the job beside it."""
    (tmp_path / "model.py").write_text(
        "import os\ndef f(rows):\n"
        "    return [ValueError('no') if r['id'] % 50 == 7 and not os.path.exists('fixed') else r for r in rows]\n"
    )
    settings = {**server.storage(), "secret_key": "${env:BOX_SECRET}"}
    sink = {"uri": "s3://box/by_file", "storage": settings}
    spec = {
        "source": rows,
        "model": {"call": "model:f", "batch_format": "rows"},
        "sink": sink,
        "gates": {"min_ok": 0.9},
    }
    (tmp_path / "job.yaml").write_text(json.dumps({**spec, "engine": {"workers": 1}}))
    monkeypatch.setenv("BOX_SECRET", SECRET)

    def gristmill(*args: str) -> str:
        command = [sys.executable, "-m", "gristmill", *args]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    gristmill("run", "job.yaml", "--progress", "off")
    assert json.loads(gristmill("dead", "job.yaml", "--by", "error", "--json"))["rows"] == 12
    (tmp_path / "fixed").touch()
    again = ["retry-dead", "s3://box/by_file", "--job", "job.yaml", "--progress", "off", "--json"]
    assert json.loads(gristmill(*again))["rows_ok"] == ROWS
    assert "no dead letters" in gristmill("dead", "job.yaml")
    assert "nothing to do" in gristmill("retry-dead", "job.yaml", "--progress", "off")


@pytest.mark.long
def test_batches_are_noted_in_the_store(server: S3Server, rows: str) -> None:
    """A provider's batch is created once: the next run fetches what it was answered, and asks for the rest."""
    with BatchServer(cancel=1, takes=0.2) as provider:
        prompt = gm.Prompt("{{ id }}", "m", base_url=provider.url, api_key=API_KEY, batch_api="openai")
        made = gm.Job(rows, prompt, gm.sink("s3://box/batches", keep=["id"], storage=server.storage()), workers=1)
        with pytest.raises(gm.RunFailed, match="was cancelled at the provider"):
            made.run()
        assert made.run().rows_ok == ROWS
        told = provider.told()
    assert len(told["batches"]) == 2 and set(told["computed"].values()) == {1}
    assert sum(told["computed"].values()) == ROWS - 2  # a row was asked alone by each of the two runs


@pytest.mark.parametrize("how", [{}, {"format": "jsonl"}, {"merge": True}], ids=["parquet", "jsonl", "merge"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.few(1)
def test_updates(server: S3Server, tmp_path: Path, how: dict[str, Any], workers: int) -> None:
    """What changed is scored, all else keeps its answers: of parts that are taken over, and of rows in other places."""
    name = f"updates{''.join(how)}{workers}"
    asked = tmp_path / "asked"

    def counting(batch: dict[str, Any]) -> dict[str, Any]:
        with asked.open("a") as out:
            out.write("x" * len(batch["x"]))
        return {"twice": batch["x"] * 2}

    def run() -> Any:
        asked.unlink(missing_ok=True)
        target = gm.sink(f"s3://box/{name}", keep=["id"], storage=server.storage(), **how)
        model = gm.model(counting, takes={"x": "int64"})
        update = {"key": ["id"]}
        return gm.Job(str(tmp_path / "in"), model, target, shard_rows=100, workers=workers, update=update).run()

    (tmp_path / "in").mkdir()
    for n in range(3):
        ids = np.arange(n * 100, n * 100 + 100)
        pq.write_table(pa.table({"id": ids, "x": ids}), tmp_path / "in" / f"{n}.parquet")
    run()
    ids = np.arange(199, 99, -1)
    pq.write_table(pa.table({"id": ids, "x": np.where(ids == 150, -1, ids)}), tmp_path / "in" / "1.parquet")
    report = run()
    assert report.updated == {"kept": 299, "scored": 1, "gone": 0} and asked.read_text() == "x"
    assert gm.verify(report.sink, storage=server.storage()).ok
    read = report.read().to_table().to_pylist()
    want = [*range(100), *range(199, 99, -1), *range(200, 300)]
    assert read == [{"id": i, "twice": -2 if i == 150 else 2 * i} for i in want]
