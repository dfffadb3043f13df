"""What URIs contain: the path of a local one, and those of stores without their secrets, so that they can be shown,
stored and compared.
"""

from __future__ import annotations

import ipaddress
import os
import re
from urllib.parse import unquote

from gristmill.errors import BadJob

__all__ = [
    "QUERY",
    "file_formats",
    "file_named",
    "file_of",
    "in_uri",
    "is_local",
    "is_secret",
    "local_path",
    "records_of",
    "redact",
    "refuse_empty",
    "store_place",
]

_FILES = {".parquet": ("parquet",), ".jsonl": ("jsonl", "openai-batch")}  # by the ending of a sink that is one file
_RECORDS = ".gristmill"

_URI = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*)://(?P<rest>[^\s'\"<>]*)")
_SECRET_ENDS = (
    "token", "secret", "password", "passwd", "pwd", "signature", "credential", "credentials", "authorization",
    "accesskey", "accesskeyid", "secretkey", "apikey", "accountkey", "privatekey",
)  # fmt: skip
_SECRET_NAMES = frozenset({"sig", "auth", "code", "pass", "policy", "keypairid"})
_OF_THE_WEB = "key"  # a secret there (`?key=API_KEY`); in a store's address the columns that tell rows apart
_SIGNED = re.compile(r"^x-(amz|goog|oss|cos|ms)-", re.IGNORECASE)  # parts of a signed URL: they differ at each signing
_SAS = frozenset(
    [
        "sv",
        "ss",
        "srt",
        "sr",
        "st",
        "se",
        "sp",
        "spr",
        "sip",
        "skoid",
        "sktid",
        "skt",
        "ske",
        "sks",
        "skv",
        "sdd",
        "saoid",
        "suoid",
        "scid",
    ]
)
QUERY = re.compile(r"\?(?=[\w.\-]+=)")  # elsewhere a question mark is a wildcard
_ONE_STORE = {"gcs": "gs", "s3a": "s3", "s3n": "s3", "abfs": "abfss", "az": "abfss", "wasb": "wasbs", "http": "https"}
_ONE_SLASH = re.compile(r"file:/(?!/)", re.IGNORECASE)
_GENERATION = re.compile(r"(.*[^@/])/?@(\d+|staged)")
_KEPT_USER = frozenset({"abfs", "abfss", "wasb", "wasbs", "adl", "az"})  # what precedes @ names the container


def is_address(host: str) -> bool:
    """Whether a host is an IP address, and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_local(uri: str) -> bool:
    """Whether an address is a path on this machine, plain or with file://."""
    return "://" not in uri or uri.partition("://")[0].lower() in ("file", "local")


def local_path(uri: str) -> str:
    """The absolute path of a local address: `~` is the home folder, and `%20` in a `file://` one a space. Spark and
    Java write `file:/PATH`.
    """
    if _ONE_SLASH.match(uri):
        return os.path.abspath(unquote(uri[len("file:") :]))
    scheme, separator, rest = uri.partition("://")
    if separator and scheme.lower() in ("file", "local"):
        uri = unquote(rest.removeprefix("localhost/" if rest.startswith("localhost/") else ""))
        uri = f"/{uri}" if rest.startswith("localhost/") else uri
    return os.path.abspath(os.path.expanduser(uri))


def store_place(uri: str) -> str:
    """The place that an address in a store names, whatever it is written like: without user and query, and with one
    scheme for those that are of one store. In Azure containers tell places apart: an address need not name the account.
    """
    scheme, _, rest = redact(QUERY.split(uri, maxsplit=1)[0]).partition("://")
    host, slash, path = rest.partition("/")
    scheme = _ONE_STORE.get(scheme.lower(), scheme.lower())
    return f"{scheme}://{host.partition('@')[0]}{slash}{path}".rstrip("/")


def in_uri(path: str) -> str:
    """A path as an address has it, whose %41 is an A, and whose ? and # end it."""
    return path.replace("%", "%25").replace("?", "%3F").replace("#", "%23")


def generation_named(sink: str) -> tuple[str, int | str | None]:
    """A sink and the generation of it that is named after an @, as in `scores/@3`, or "staged"; None for the latest."""
    match = _GENERATION.fullmatch(sink)
    return (
        (sink, None)
        if match is None or os.path.exists(sink)
        else (match[1], int(match[2]) if match[2].isdecimal() else match[2])
    )


def file_named(uri: str) -> bool:
    """Whether a sink of this name is one file: out.parquet or out.jsonl, without a slash at the end."""
    return bool(file_formats(uri))


def file_formats(uri: str) -> tuple[str, ...]:
    """The formats that one file of this name may have, the usual one first; none for a sink that is a folder."""
    return next((formats for ending, formats in _FILES.items() if uri.lower().endswith(ending)), ())


def records_of(file: str) -> str:
    """The folder of a sink that is one file on a local disk: beside the file, and hidden, so that whoever reads all
    files there does not read its parts as well.
    """
    folder, name = os.path.split(local_path(file))
    return os.path.join(folder, f".{name}{_RECORDS}")


def file_of(root: str) -> str | None:
    """The file of a sink that is one file, from its folder; None for any other sink."""
    folder, name = os.path.split(root)
    if "://" in root or not (name.startswith(".") and name.endswith(_RECORDS)):
        return None
    file = name[1 : -len(_RECORDS)]
    return os.path.join(folder, file) if file_named(file) else None


def redact(text: str) -> str:
    """`text` with the secrets of every URI in it removed.

    Passwords are removed with their user (`s3://key:secret@bucket/x` becomes `s3://bucket/x`), and so are query
    parameters that are tokens or belong to a signature. What is left still names the file, and is the same after the
    next signing.
    """
    return _URI.sub(_clean, text) if "://" in text else text


def _clean(found: re.Match[str]) -> str:
    scheme, rest = found["scheme"], found["rest"]
    rest, hash_mark, fragment = rest.partition("#") if scheme.startswith("http") else (rest, "", "")
    rest, question, query = rest.partition("?")
    rest = _without_user(scheme.lower(), rest)
    kept = _kept(query, scheme.lower().startswith("http")) if question else ""
    fragment = "" if is_secret(fragment.partition("=")[0]) else hash_mark + fragment
    shown = question + query if kept == query else "?" + kept if kept else ""  # a lone ? may be a wildcard
    return f"{scheme}://{rest}{shown}{fragment}"


def _without_user(scheme: str, rest: str) -> str:
    authority, slash, path = rest.partition("/")
    if "@" not in authority:
        # A secret may hold an unescaped slash: `key:ab/cd@bucket/x`. A port is digits, so this is not host:port.
        port = authority.partition(":")[2]
        if not port or port.isdigit() or "@" not in path:
            return rest
        authority, slash, path = rest.rpartition("@")[0] + "@", "", rest.rpartition("@")[2]
    user, _, host = authority.rpartition("@")
    if scheme in _KEPT_USER:
        return f"{user.partition(':')[0]}@{host}{slash}{path}"
    return f"{host}{slash}{path}"


def is_secret(name: str) -> bool:
    """Whether the value under this name, in a query or among options, is likely a secret."""
    plain = name.lower().replace("-", "").replace("_", "")
    return bool(_SIGNED.match(name)) or plain in _SECRET_NAMES or plain.endswith(_SECRET_ENDS)


def _kept(query: str, web: bool) -> str:
    pairs = query.split("&")
    names = [p.partition("=")[0] for p in pairs]
    secret = [is_secret(n) or (web and n.lower() == _OF_THE_WEB) for n in names]
    signed = any(secret)
    return "&".join(
        p
        for p, n, hidden in zip(pairs, names, secret, strict=True)
        if not (hidden or (signed and (n in _SAS or n.lower() in ("expires", "date"))))
    )


def refuse_empty(uri: str, what: str) -> None:
    """Raises BadJob for a text of nothing, which would be the current folder."""
    if not uri.strip():
        raise BadJob(f"the {what} is {uri!r}, perhaps a variable that is not set: name it (the current folder is .)")
