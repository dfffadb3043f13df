"""The file layer below a sink in an object store: S3 and compatible stores, Google's and Azure's, through obstore.

obstore and not pyarrow, because a commit needs conditional PUTs, which pyarrow's file systems do not have. Where a disk
has a link that fails if the name is taken, a store has a PUT with `If-None-Match: *`; where a disk has rename, a store
has a single PUT, which readers see whole or not at all. If the answer to a PUT was lost, the content of the object
shows whether the PUT was ours, because everything that is created holds a nonce.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from gristmill.errors import BadJob
from gristmill.files.disk import join, sha256_of
from gristmill.files.heartbeat import ObjectLease, beating
from gristmill.files.lease import Holder
from gristmill.files.requests import Contended, answer
from gristmill.process.pool import Pool
from gristmill.process.scratch import SCRATCH

AT_ONCE = 32  # requests under way at a time, so that round trips of some 20 ms overlap
PATIENCE = 180.0  # seconds until a store that does not answer is an error: longer than a restart or a failover takes
CHUNK = 16 << 20  # bytes of a part of a multipart upload; smaller files are one PUT
COPY_LIMIT = 5 << 30  # the largest object that S3 copies in one request
_SERVER = (  # settings and variables that say where a bucket or container is
    *("endpoint", "account_name", "azure_storage_account_name"),
    *("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ACCOUNT_NAME"),
)
_BLOCK = 1024  # items given to the threads at a time
T = TypeVar("T")


class ObjectFiles:
    """Files below `base`, such as `s3://bucket/`, with which every path begins. `settings` are obstore's, with secrets.

    Files of a shard are first written to a folder on this machine, so that their writers may seek and their content is
    hashed before it travels; `settle` uploads them. Errors are OSErrors without the store's own text, which may reveal
    what signed a request.
    """

    free_links = False

    def __init__(self, base: str, settings: Mapping[str, Any], patience: float = PATIENCE) -> None:
        self._base = base
        self._settings = dict(settings)
        self._patience = patience
        self._begin()

    def _begin(self) -> None:
        self._opened: Any = None
        self._pending: dict[str, str] = {}  # path -> where it is until it is settled
        self._digests: dict[str, tuple[int, str]] = {}

    @property
    def server(self) -> str:
        """The endpoint and the account, as far as they are given or in the environment."""
        said = {**os.environ, **self._settings}
        return repr([(name, str(said[name])) for name in _SERVER if name in said])

    def __repr__(self) -> str:
        return f"ObjectFiles({self._base})"

    def __getstate__(self) -> dict[str, Any]:
        return {"_base": self._base, "_settings": self._settings, "_patience": self._patience}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    # ------------------------------------------------ files of a shard

    def create(self, path: str) -> BinaryIO:
        """A new file in the scratch folder, which stands in for `path` until it is settled."""
        if path in self._pending:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        file = SCRATCH.create(path.rpartition("/")[2])
        self._pending[path] = file.name
        return file

    def sync(self, file: BinaryIO) -> None:
        """Flush only: what is on this machine need not be durable, the upload is."""
        file.flush()

    @contextmanager
    def local(self, path: str) -> Iterator[str]:
        """The file in the scratch folder, or a temporary copy of the object."""
        if path in self._pending:
            yield self._pending[path]
            return
        copy = SCRATCH.create(path.rpartition("/")[2])
        try:
            with copy:
                self._fetch(path, copy)
            yield copy.name
        except FileNotFoundError as e:
            if os.path.exists(copy.name):  # another file is missing, or the object
                raise
            raise OSError(f"{copy.name}: the copy of {path} was removed while it was read") from e
        finally:
            with suppress(FileNotFoundError):
                os.unlink(copy.name)

    def _fetch(self, path: str, copy: BinaryIO) -> None:
        import obstore

        async def fetched() -> None:
            copy.seek(0)  # again, after an answer that was cut off
            copy.truncate()
            got = await obstore.get_async(self._store(), self._key(path))
            async for chunk in got.stream(min_chunk_size=1 << 20):
                copy.write(chunk)

        self._try(path, fetched)

    def digest(self, path: str) -> tuple[int, str]:
        """Bytes and sha256; for a file that is not settled yet, those that its upload will have."""
        if path in self._digests:
            return self._digests[path]
        with self.local(path) as local:
            found = os.path.getsize(local), sha256_of(local)
        if path in self._pending:
            self._digests[path] = found
        return found

    def settle(self, paths: Iterable[str]) -> None:
        """Upload files from the scratch folder, and remove them there."""
        for _ in self.map(self._upload, [p for p in paths if p in self._pending]):
            pass

    def _upload(self, path: str) -> None:
        self._put(path, Path(self._pending[path]), self.digest(path)[1])
        self._forget(path)

    def _forget(self, path: str) -> bool:
        local = self._pending.pop(path, None)
        self._digests.pop(path, None)
        if local is not None:
            with suppress(FileNotFoundError):
                os.unlink(local)
        return local is not None

    def link(self, source: str, target: str) -> None:
        """A copy inside the store. The name is checked first, and the copy itself does not guard it: only a run of the
        same generation would write it, and that copies the same object, named by the same receipt.
        """
        import obstore

        if self._there(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        if self.size(source) <= COPY_LIMIT:
            self._try(target, lambda: obstore.copy_async(self._store(), self._key(source), self._key(target)))
        else:
            with self.local(source) as local:
                self._put(target, Path(local), sha256_of(local))

    def _put(self, path: str, local: Path, digest: str) -> None:
        import obstore

        size = local.stat().st_size
        chunk = max(CHUNK, size // 9_000)  # a store takes 10,000 parts at most
        about = {"attributes": {"sha256": digest}, "use_multipart": size > chunk, "chunk_size": chunk}
        self._try(path, lambda: obstore.put_async(self._store(), self._key(path), local, **about))

    def same(self, path: str, source: str, size: int, sha256: str) -> bool:
        """By the sha256 that was given with the upload and travels with a copy; by its content if there is none."""
        import obstore

        try:
            found = self._try(path, lambda: obstore.get_async(self._store(), self._key(path), options={"head": True}))
            told = found.attributes.get("sha256")
            if size >= 0 and found.meta["size"] != size:
                return False
            return (self.digest(path)[1] if told is None else told) == sha256
        except FileNotFoundError:
            return False

    def _there(self, path: str) -> bool:
        import obstore

        try:
            self._try(path, lambda: obstore.head_async(self._store(), self._key(path)))
            return True
        except FileNotFoundError:
            return False

    # ------------------------------------------------ small whole files

    def write_new(self, path: str, data: bytes) -> bool:
        """PUT with `If-None-Match: *`. If the name is taken, perhaps by an attempt whose answer was lost, the content
        shows whose it is; if there is none, another request was at it at the same moment, and this one is repeated.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        async def created() -> bool:
            try:
                await obstore.put_async(self._store(), self._key(path), data, mode="create")
                return True
            except (AlreadyExistsError, PreconditionError) as e:
                try:
                    return (await self._got(path))[0] == data
                except FileNotFoundError:
                    raise Contended from e

        return bool(self._try(path, created))

    def write_over(self, path: str, data: bytes) -> None:
        """One PUT."""
        import obstore

        self._try(path, lambda: obstore.put_async(self._store(), self._key(path), data, use_multipart=False))

    note = write_over

    def read(self, path: str) -> bytes:
        """One GET."""
        return self.look(path)[0]

    def look(self, path: str) -> tuple[bytes, dict[str, Any]]:
        """A file, and the version that it has."""
        return self._try(path, lambda: self._got(path))

    async def _got(self, path: str) -> tuple[bytes, dict[str, Any]]:
        import obstore

        found = await obstore.get_async(self._store(), self._key(path))
        return bytes(await found.bytes_async()), dict(found.meta)

    def swap(self, path: str, data: bytes, version: Mapping[str, Any]) -> bool:
        """Replace a file if it still has this version: PUT with `If-Match`; false if it has another one. If it was
        refused only because another request was at it at the same moment, it is tried again.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mode: Any = {name: version[name] for name in ("e_tag", "version") if version.get(name)}

        async def swapped() -> bool:
            try:
                await obstore.put_async(self._store(), self._key(path), data, mode=mode)
                return True
            except (AlreadyExistsError, PreconditionError) as e:
                stands, now = await self._got(path)
                if stands != data and all(now.get(name) == mode[name] for name in mode):
                    raise Contended from e
                return stands == data

        return bool(self._try(path, swapped))

    def remove(self, path: str) -> None:
        """Remove a file, in the scratch folder or in the store."""
        import obstore

        if not self._forget(path):
            with suppress(FileNotFoundError):
                self._try(path, lambda: obstore.delete_async(self._store(), self._key(path)))

    # ------------------------------------------------ folders, which are prefixes

    def make_folder(self, path: str) -> None:
        """Does nothing: a prefix exists with the first object below it."""

    def prove(self, folder: str) -> None:
        """Create an object twice: a store that lets the second one through ignores `If-None-Match`, and is refused; so
        is one that does not permit removing it. Raises BadJob.
        """
        path = join(folder, f"probe-{secrets.token_hex(6)}")
        try:
            if not self.write_new(path, b"first") or self.write_new(path, b"second"):
                raise BadJob(
                    f"{folder}: this store ignores If-None-Match on a PUT, without which two runs could both commit a "
                    "shard: use a store that honours conditional writes, or a local folder"
                )
        finally:
            try:
                self.remove(path)
            except PermissionError as e:
                raise BadJob(
                    f"{folder}: objects can be written there, but not deleted ({e.strerror}). A run deletes its lease, "
                    "and the files that a later result replaces: allow s3:DeleteObject, or write to a local folder"
                ) from e
            except OSError:
                pass  # if the store is unavailable, the next request will find out

    def holds(self, folder: str) -> bool:
        """Whether there is anything below."""
        import obstore

        async def first() -> bool:
            async for _ in obstore.list(self._store(), self._key(folder), chunk_size=1):
                return True
            return False

        return self._try(folder, first)

    def names(self, folder: str) -> list[str]:
        """One listing request for each 1,000 names."""
        return list(self.sizes(folder))

    def entries(self, folder: str) -> Iterator[str]:
        """As `names`."""
        return iter(self.names(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        """As `names`: a listing has the sizes too."""
        start = len(self._key(folder)) + 1
        return {name: size for key, size in self._listed(folder) if "/" not in (name := key[start:])}

    def as_long(self, folder: str, wanted: Iterable[tuple[str, int]]) -> Iterator[bool]:
        """By listings, which have the sizes: one request for each 1,000 names in a folder."""
        listed: dict[str, dict[str, int]] = {}
        for path, size in wanted:
            below, _, name = path.rpartition("/")
            if below not in listed:
                listed[below] = self.sizes(f"{folder}/{below}" if below else folder)
            yield listed[below].get(name) == size

    def below(self, root: str, skip: str) -> Iterator[str]:
        """All below the root except its folder `skip`, which is not listed, and folders that contain one."""
        import obstore

        top = self._key(root)
        found = self._try(root, lambda: obstore.list_with_delimiter_async(self._store(), top or None))
        start = len(top) + 1 if top else 0
        yield from (o["path"][start:] for o in found["objects"])
        for prefix in found["common_prefixes"]:
            if prefix[start:].strip("/") != skip:
                keys = [key[start:] for key in self._keys(self._base + prefix)]
                apart = tuple({key.partition(f"/{skip}/")[0] + "/" for key in keys if f"/{skip}/" in key})
                yield from (key for key in keys if not key.startswith(apart or "\0"))

    def _keys(self, folder: str) -> list[str]:
        return [key for key, _ in self._listed(folder)]

    def _listed(self, folder: str) -> list[tuple[str, int]]:
        import obstore

        prefix = self._key(folder).rstrip("/")

        async def listed() -> list[tuple[str, int]]:
            chunks = obstore.list(self._store(), prefix, chunk_size=1000)
            return [(o["path"], o["size"]) async for chunk in chunks for o in chunk]

        return self._try(folder, listed)

    def remove_folder(self, path: str) -> None:
        """Up to 1,000 files per request, if the store supports it."""
        import obstore

        keys = iter(self._keys(path))
        while block := list(itertools.islice(keys, 1000)):
            with suppress(OSError):
                self._try(path, partial(obstore.delete_async, self._store(), block))

    # ------------------------------------------------ the rest of the contract

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """Many at once: each waits for the network."""
        rest = iter(items)
        with Pool(AT_ONCE, "gristmill-store") as threads:
            while block := list(itertools.islice(rest, _BLOCK)):
                yield from threads.map(work, block)

    def arrow(self, otherwise: Mapping[str, str] | None = None) -> Any:
        """A read-only pyarrow file system over these paths."""
        from gristmill.arrow.filesystem import python_files
        from gristmill.files.dataset import handler

        return python_files(handler(self, otherwise or {}))

    def size(self, path: str) -> int:
        """Bytes of an object."""
        import obstore

        return int(self._try(path, lambda: obstore.head_async(self._store(), self._key(path)))["size"])

    def range(self, path: str, start: int, stop: int) -> bytes:
        """Some bytes of an object."""
        import obstore

        span = {"start": start, "end": stop}
        return bytes(self._try(path, lambda: obstore.get_range_async(self._store(), self._key(path), **span)))

    def hasty(self, patience: float) -> ObjectFiles:
        """The same files for a caller with little time: requests fail after so many seconds, twice that at worst."""
        return ObjectFiles(self._base, self._settings, patience)

    def lease(self, sink: str, folder: str, tell: Callable[[str], None]) -> ObjectLease:
        """An object with a heartbeat."""
        return ObjectLease(self, sink, folder, tell)

    def holder(self, folder: str) -> Holder | None:
        """Who sends heartbeats."""
        return beating(self, folder)

    # ------------------------------------------------ the store

    def _key(self, path: str) -> str:
        assert path.startswith(self._base) or path + "/" == self._base, path
        return path[len(self._base) :]

    def _store(self) -> Any:
        if self._opened is None:
            from obstore.store import from_url

            def wait(seconds: float) -> str:
                return f"{round(1000 * min(seconds, self._patience))}ms"

            backoff = {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2}
            self._opened = from_url(
                self._base,
                config=self._settings,
                # http only if the endpoint says so; a slow answer is worth waiting for, a lost one is not
                client_options={"allow_http": True, "timeout": wait(60), "connect_timeout": wait(10)},
                retry_config={
                    "max_retries": 5 if self._patience > 30 else 0,
                    "retry_timeout": timedelta(seconds=30),
                    "backoff": backoff,
                },
            )
        return self._opened

    def _try(self, path: str, request: Callable[[], Awaitable[T]]) -> T:
        """The request's answer, or an OSError. obstore itself repeats what cannot have been done already."""
        return answer(path, request, self._patience)
