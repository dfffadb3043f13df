"""Taking secrets out of URIs, so that a path can be shown, stored and compared."""

from __future__ import annotations

import re

__all__ = ["redact"]

_URI = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*)://(?P<rest>[^\s'\"<>]*)")
_SECRET_ENDS = (
    "token", "secret", "password", "passwd", "pwd", "signature", "credential", "credentials", "authorization",
    "accesskey", "accesskeyid", "secretkey", "apikey", "accountkey", "privatekey",
)  # fmt: skip
_SECRET_NAMES = frozenset({"sig", "auth", "key", "code", "pass", "policy", "keypairid"})
_SIGNED = re.compile(r"^x-(amz|goog|oss|cos|ms)-", re.IGNORECASE)  # of a signed URL: they differ at each signing
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
_KEPT_USER = frozenset({"abfs", "abfss", "wasb", "wasbs", "adl", "az"})  # what stands before @ names the container


def redact(text: str) -> str:
    """`text` with the secrets of every URI in it taken out.

    Passwords go with their user (`s3://key:secret@bucket/x` is `s3://bucket/x`), and so do query parameters that are
    tokens or belong to a signature. What is left still names the file, and is the same after the next signing.
    """
    return _URI.sub(_clean, text) if "://" in text else text


def _clean(found: re.Match[str]) -> str:
    scheme, rest = found["scheme"], found["rest"]
    rest, hash_mark, fragment = rest.partition("#") if scheme.startswith("http") else (rest, "", "")
    rest, question, query = rest.partition("?")
    rest = _without_user(scheme.lower(), rest)
    kept = _kept(query) if question else ""
    fragment = "" if _secret(fragment.partition("=")[0]) else hash_mark + fragment
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


def _secret(name: str) -> bool:
    plain = name.lower().replace("-", "").replace("_", "")
    return bool(_SIGNED.match(name)) or plain in _SECRET_NAMES or plain.endswith(_SECRET_ENDS)


def _kept(query: str) -> str:
    pairs = query.split("&")
    names = [p.partition("=")[0] for p in pairs]
    signed = any(_secret(n) for n in names)
    return "&".join(
        p
        for p, n in zip(pairs, names, strict=True)
        if not (_secret(n) or (signed and (n in _SAS or n.lower() in ("expires", "date"))))
    )
