"""Qdrant's REST API over the client's local mode: the paths and bodies that a server takes, none of its engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pydantic import TypeAdapter
from qdrant_client import QdrantClient, models

KEY = "key-of-qdrant"


class Answering(BaseHTTPRequestHandler):
    """One request."""

    store: QdrantClient
    lock: threading.Lock
    seen: list[str]  # what was asked, as METHOD PATH

    def _answer(self) -> None:
        path, _, _ = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.seen.append(f"{self.command} {path}")
        if self.headers.get("api-key") != KEY:
            return self._send(403, {"status": {"error": "Forbidden"}})
        try:
            with self.lock:
                found = self._called([p for p in path.split("/") if p], json.loads(body) if body else {})
        except ValueError as e:
            return self._send(404 if "not found" in str(e) or "Alias" in str(e) else 400, {"status": {"error": str(e)}})
        return self._send(
            200, {"result": TypeAdapter(Any).dump_python(found, mode="json"), "status": "ok", "time": 0.0}
        )

    def _send(self, status: int, said: Any) -> None:
        data = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _called(self, path: list[str], body: dict[str, Any]) -> Any:
        store, name = self.store, path[1] if len(path) > 1 else ""
        if path == ["aliases"]:
            return store.get_aliases()
        if path == ["collections"]:
            return store.get_collections()
        if path == ["collections", "aliases"]:
            given = TypeAdapter(models.ChangeAliasesOperation).validate_python(body)
            return store.update_collection_aliases(given.actions)
        match self.command, path[2:]:
            case "GET", []:
                return store.get_collection(name)
            case "PUT", []:
                made = models.CreateCollection.model_validate(body)
                return store.create_collection(name, vectors_config=made.vectors, metadata=made.metadata)
            case "PATCH", []:
                return store.update_collection(name, metadata=models.UpdateCollection.model_validate(body).metadata)
            case "DELETE", []:
                return store.delete_collection(name)
            case "PUT", ["points"]:
                return store.upsert(name, models.PointsList.model_validate(body).points)
            case "POST", ["points"]:
                asked = models.PointRequest.model_validate(body)
                return store.retrieve(name, asked.ids, with_payload=True, with_vectors=True)
            case "POST", ["points", "count"]:
                return store.count(name, exact=True)
            case "POST", ["points", "scroll"]:
                at = models.ScrollRequest.model_validate(body)
                points, after = store.scroll(name, limit=at.limit, offset=at.offset, with_vectors=True)
                return {"points": points, "next_page_offset": after}
            case "POST", ["points", "query", "batch"]:
                requests = models.QueryRequestBatch.model_validate(body).searches
                for request in requests:
                    assert request.params is not None and request.params.hnsw_ef >= 128
                    request.params = None  # the local mode would warn
                return store.query_batch_points(name, requests)
        raise ValueError(f"{self.command} {self.path} not found")

    do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = _answer

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@contextmanager
def serving() -> Iterator[tuple[str, list[str]]]:
    """The address of a server, without what follows the #, and what it was asked."""
    seen: list[str] = []
    about = {"store": QdrantClient(":memory:"), "lock": threading.Lock(), "seen": seen}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Mine", (Answering,), about))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"qdrant://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
