"""From the URI of a sink to its root, without secrets, and the file layer that opens it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

from gristmill.errors import BadJob, MissingExtra
from gristmill.files.contract import Files
from gristmill.files.disk import LOCAL
from gristmill.job.delivery import STORES
from gristmill.job.secret import reveal
from gristmill.job.uris import file_named, local_path, records_of, redact, refuse_empty

_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
_QUERY = re.compile(r"\?(?=[\w.\-]+=)")  # elsewhere a question mark is part of a name

# What pyarrow and s3fs call a source's options, and what obstore calls them: one job uses one set of names.
_NAMES = {
    "access_key": "access_key_id",
    "key": "access_key_id",
    "secret_key": "secret_access_key",
    "secret": "secret_access_key",
    "token": "session_token",
    "endpoint_override": "endpoint",
    "endpoint_url": "endpoint",
    "anonymous": "skip_signature",
    "anon": "skip_signature",
    "force_virtual_addressing": "virtual_hosted_style_request",
}
_LEFT_OUT = frozenset({"scheme", "allow_bucket_creation", "allow_bucket_deletion", "background_writes"})


def opened(uri: str, storage: Mapping[str, Any] | None = None) -> tuple[str, Files]:
    """A sink's root, as it may be shown, and its file layer. No request is made to a store yet. Raises BadJob."""
    text = str(reveal(uri))
    refuse_empty(text, "sink")
    scheme = text.partition("://")[0].lower() if "://" in text else "file"
    if scheme in _STORES:
        return _store(scheme, text, dict(reveal(storage or {})))
    if scheme != "file":
        raise BadJob(
            f"sink {scheme}://…: a sink must be a local folder, an object store ({', '.join(sorted(_STORES))}) or one "
            f"of {', '.join(STORES.ours)}"
        )
    path = local_path(text)
    if os.path.isdir(path):
        return path, LOCAL
    if file_named(text):
        return records_of(text), LOCAL
    if os.path.exists(path):
        raise BadJob(f"sink {path}: is a file; a sink is a folder, or a file named .parquet or .jsonl")
    return path, LOCAL


def _store(scheme: str, uri: str, storage: dict[str, Any]) -> tuple[str, Files]:
    try:
        import obstore  # noqa: F401

        from gristmill.files.objectstore import ObjectFiles
    except ImportError as e:
        raise MissingExtra(f"{redact(uri)}: an object store needs obstore: pip install 'gristmill[s3]'") from e
    plain, *queries = _QUERY.split(uri, maxsplit=1)
    public = redact(plain).rstrip("/")
    bucket, slash, path = public.partition("://")[2].partition("/")
    if not path.strip("/") or ".." in path.split("/"):
        raise BadJob(f"sink {public}: give a folder inside the bucket, such as {scheme}://{bucket}/answers")
    if wrong := [n for n in path.split("/") if n in ("", ".") or re.search(r"[\\\x00-\x1f\x7f]", n)]:
        raise BadJob(f"sink {public}: {wrong[0]!r} is not a name that every store keeps unchanged: use another folder")
    options = {**_user(plain), **dict(parse_qsl("".join(queries))), **storage}
    secure = str(options.get("scheme", "https"))
    settings = {_NAMES.get(k, k): v for k, v in options.items() if k not in _LEFT_OUT and v is not None}
    if "endpoint" in settings:
        if "://" not in str(settings["endpoint"]):
            settings["endpoint"] = f"{secure}://{settings['endpoint']}"
        settings.setdefault("region", "us-east-1")
    return public, ObjectFiles(f"{scheme}://{bucket}{slash}", settings)


def _user(uri: str) -> dict[str, str]:
    """Credentials in a URI, `s3://key:secret@bucket/x`, as a source may have them; the secret may hold a slash."""
    rest = uri.partition("://")[2]
    clean = redact(uri).partition("://")[2]
    user = rest[: len(rest) - len(clean)].rstrip("@")
    if not uri.startswith("s3") or ":" not in user:
        return {}
    key, _, secret = user.partition(":")
    return {"access_key_id": unquote(key), "secret_access_key": unquote(secret)}
