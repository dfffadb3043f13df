"""The calls of Qdrant's client, and the aliases of collections: the names that applications use, and the turns of those
who set them (qdrant.py says what these are for).
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from gristmill.errors import BadJob, RunFailed
from gristmill.job.formatoptions import known
from gristmill.process.extras import require
from gristmill.stores.contract import Mark, Place, StoreUnavailable
from gristmill.stores.onefile import marks_of

TIMEOUT = 60  # seconds for an answer
TURN = "_turn"  # how the second alias of what is published ends, before a number

_local: dict[str, tuple[Any, int]] = {}  # folders that are open in this process, and by how many
_opening = threading.RLock()  # of folders; their client is of one thread at a time


class Client:
    """The library's client, opened when it is used."""

    def __init__(self, place: Place) -> None:
        require("qdrant_client", "qdrant", place.shown)
        if not place.name:
            raise BadJob(f"{place.shown}: name a collection: {place.shown.partition('#')[0]}#passages")
        self._place = place
        self._about = urlsplit(place.uri)
        if not self.remote:
            known(self._said, (), f"{place.shown}: a folder of Qdrant's local mode")
        self._client: Any = None
        self._lock: Any = contextlib.nullcontext() if self.remote else _opening

    @property
    def remote(self) -> bool:
        """Whether it is a server."""
        return bool(self._about.hostname)

    @property
    def _said(self) -> dict[str, Any]:
        return {**dict(parse_qsl(self._about.query)), **self._place.options}

    def call(self, name: str, *values: Any, **options: Any) -> Any:
        """A call of the client. Raises StoreUnavailable, and Gone for a collection that is not there."""
        from qdrant_client.http.exceptions import ApiException, ResponseHandlingException, UnexpectedResponse

        try:
            with self._lock:
                if self._client is None:
                    self._client = self._server() if self.remote else self._folder()
                return getattr(self._client, name)(*values, **options)
        except UnexpectedResponse as e:
            if e.status_code == 404:
                raise Gone(self._place.shown) from e
            raise StoreUnavailable(f"{self._place.shown}: Qdrant says: {self._place.words(e)}") from e
        except (ApiException, ResponseHandlingException) as e:
            raise StoreUnavailable(f"{self._place.shown}: cannot be reached: {self._place.words(e)}") from e
        except (ValueError, RuntimeError) as e:
            if not self.remote and ("not found" in str(e) or str(e).startswith("Alias ")):
                raise Gone(self._place.shown) from e
            raise StoreUnavailable(f"{self._place.shown}: Qdrant says: {self._place.words(e)}") from e

    def _server(self) -> Any:
        from qdrant_client import QdrantClient

        said = {"timeout": TIMEOUT, **self._said}
        secure = self._about.scheme == "qdrants"
        given = {"host": self._about.hostname, "port": self._about.port or 6333, "https": secure}
        if self._about.path.strip("/"):
            given["prefix"] = self._about.path.strip("/")
        try:
            return QdrantClient(**given, **said, check_compatibility=False)
        except TypeError as e:  # an option that it does not know
            raise BadJob(f"{self._place.shown}: Qdrant's client says: {self._place.words(e)}") from e

    def _folder(self) -> Any:
        from qdrant_client import QdrantClient

        path = self._place.path
        client, users = _local.get(path) or (QdrantClient(path=path, force_disable_check_same_thread=True), 0)
        _local[path] = client, users + 1
        return client

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
            if client is None:
                return
            if not self.remote:
                _, users = _local.pop(self._place.path)
                if users > 1:
                    _local[self._place.path] = client, users - 1
                    return
            client.close()


class Gone(RunFailed):
    """A collection that is not there, or no longer."""


def aliases_of(client: Client) -> dict[str, str]:
    """All aliases, and the collections that they are set to."""
    return {found.alias_name: found.collection_name for found in client.call("get_aliases").aliases}


def target_of(client: Client, alias: str) -> str | None:
    """The collection that an alias is set to."""
    return aliases_of(client).get(alias)


def published(client: Client, alias: str) -> tuple[str | None, Any]:
    """The same, and how it is made: of one that was replaced and removed meanwhile, the next one."""
    while (there := target_of(client, alias)) is not None:
        with contextlib.suppress(Gone):
            return there, client.call("get_collection", there).config
    return None, None


def about_of(client: Client, collection: str) -> dict[str, Any]:
    """The metadata of a collection."""
    return client.call("get_collection", collection).config.metadata or {}


def marks_in(about: Mapping[str, Any], shown: str) -> list[Mark]:
    """The marks in the metadata of a collection."""
    return marks_of(about["marks"].encode(), shown) if "marks" in about else []


# ---------------------------------------------------------------- setting aliases


def setting(alias: str, to: str) -> list[Any]:
    """What sets an alias to a collection."""
    from qdrant_client import models

    made = models.CreateAliasOperation(create_alias=models.CreateAlias(collection_name=to, alias_name=alias))
    return [models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=alias)), made]


def turns(target: str, live: str | None) -> str:
    """What the turns begin with of a collection that is published, or of the first one of all."""
    digest = hashlib.sha256(target.encode()).hexdigest()[:10]
    return f"gm_{digest}_first{TURN}" if live is None else f"{live}{TURN}"


def turn_in(names: Collection[str], target: str, live: str | None) -> str | None:
    """The turn among all aliases."""
    begins = turns(target, live)
    return max((name for name in names if name.startswith(begins)), key=_number, default=None)


def _number(turn: str) -> int:
    return int(turn.rpartition(TURN)[2] or 0)


def next_turn(turn: str) -> str:
    """What a turn is called after somebody has taken it who publishes nothing."""
    return f"{turn.rpartition(TURN)[0]}{TURN}{_number(turn) + 1}"
