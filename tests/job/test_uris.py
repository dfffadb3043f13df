"""Fault 39: a URI that is shown or stored has no secret in it."""

from __future__ import annotations

import pytest

from gristmill.job.uris import local_path, redact


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("s3://AKIA:wJalr@bucket/key", "s3://bucket/key"),
        ("s3://AKIA:wJ/al/r@bucket/key", "s3://bucket/key"),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("https://user:pass@host:8080/x.csv", "https://host:8080/x.csv"),
        ("http://localhost:80/x@y", "http://localhost:80/x@y"),
        ("https://h/x?a=1&X-Amz-Signature=abc&X-Amz-Date=2026&X-Amz-Credential=AK", "https://h/x?a=1"),
        ("https://acc.blob/x?sv=2024&se=2026&sp=r&sig=abc%3D", "https://acc.blob/x"),
        ("https://h/x?access_token=abc&page=2", "https://h/x?page=2"),
        ("https://h/x?author=ann&sv=1", "https://h/x?author=ann&sv=1"),
        ("https://maps.h/x?KEY=abc&page=2", "https://maps.h/x?page=2"),
        ("sqlite:///r.sqlite?mode=upsert&key=id", "sqlite:///r.sqlite?mode=upsert&key=id"),
        ("qdrant://h:6333?key=id&api_key=abc", "qdrant://h:6333?key=id"),
        ("abfs://container:key@account.dfs/x", "abfs://container@account.dfs/x"),
        ("s3://k:s@b/part-?", "s3://b/part-?"),
        ("memory://a/b", "memory://a/b"),
        ("/local/a:b@c", "/local/a:b@c"),
        ("no 's3://a:b@c/d' and gs://e:f@g/h here", "no 's3://c/d' and gs://g/h here"),
    ],
)
def test_secrets_go_and_the_name_stays(given: str, shown: str) -> None:
    """Passwords, tokens and signatures are taken out; what names the file is not."""
    assert redact(given) == shown


def test_a_local_address_with_one_slash() -> None:
    """As Spark writes it: no folder called `file:` in the current one."""
    assert local_path("file:/data/a%20b") == local_path("file:///data/a%20b") == "/data/a b"


def test_a_new_signature_names_the_same_file() -> None:
    """A signed URL is the same source after it was signed again, so that a run can be resumed."""
    first = redact("https://h/x.parquet?X-Amz-Date=20260101&X-Amz-Expires=60&X-Amz-Signature=a")
    assert first == redact("https://h/x.parquet?X-Amz-Date=20260202&X-Amz-Expires=90&X-Amz-Signature=b")
