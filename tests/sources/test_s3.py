"""Sources in an object store, on a real server: listing, reading, and no secret in anything that is shown."""

from __future__ import annotations

import pickle
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from gristmill.errors import BadSource, GristmillError
from gristmill.job.job import source
from gristmill.sources.paths import changed, open_input, resolve
from s3server import KEY, SECRET, S3Server


@pytest.fixture(scope="module")
def endpoint(weed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of an S3 server with two Parquet files in bucket `box`."""
    server = S3Server(weed, tmp_path_factory.mktemp("s3"))
    try:
        _fill(server.address)
        yield server.address
    finally:
        server.stop()


def _fill(address: str) -> None:
    fs = pafs.S3FileSystem(access_key=KEY, secret_key=SECRET, endpoint_override=address, scheme="http")
    rows = pa.table({"a": np.arange(100_000), "b": [f"row {i}" for i in range(100_000)]})
    for name in ("box/d/x=1/a b.parquet", "box/d/x=2/b.parquet"):
        with fs.open_output_stream(name) as out:
            pq.write_table(rows, out, row_group_size=30_000)
    for name in ("box/d/_SUCCESS", "box/d/_tmp/c.parquet"):
        with fs.open_output_stream(name) as out:
            out.write(b"")


def uri(endpoint: str, path: str, secret: str = SECRET) -> str:
    return f"s3://{KEY}:{secret}@{path}?endpoint_override={endpoint.replace(':', '%3A')}&scheme=http"


@pytest.mark.parametrize("path", ["box/d", "box/d/", "box/d/*/*.parquet", "box/**/*.parquet", "box/d/x=?"])
@pytest.mark.parametrize("secret", [SECRET, "hu%2Fsh%2Bword"])
def test_folders_and_globs(endpoint: str, path: str, secret: str) -> None:
    """As on a disk; a secret may be written as it is or percent-encoded."""
    fs, files = resolve(source(uri(endpoint, path, secret)))
    assert [f.path for f in files] == ["s3://box/d/x=1/a b.parquet", "s3://box/d/x=2/b.parquet"]
    assert all(f.size > 0 and f.stamp for f in files)
    assert changed(pickle.loads(pickle.dumps(fs)), files[0]) is None
    assert "word" not in repr(fs) + repr(files)


def test_rows(endpoint: str, planned: Any) -> None:
    """Planned and read by ranges."""
    plan = planned(uri(endpoint, "box/d"))
    assert [i.rows for i in plan.infos] == [100_000, 100_000]
    read = plan.read([[29_000, 31_000], [99_999, 100_000]], columns=["b"], where="a % 1000 = 999")
    assert read.rows["b"].to_pylist() == ["row 29999", "row 30999", "row 99999"]


def test_credentials_as_options(endpoint: str) -> None:
    """`storage=` instead of the URI."""
    storage = {"access_key": KEY, "secret_key": SECRET, "endpoint_override": endpoint, "scheme": "http"}
    assert len(resolve(source("s3://box/d", storage=storage))[1]) == 2


@pytest.mark.parametrize(
    ("path", "secret", "said"),
    [("box/nope", SECRET, "s3://box/nope.*no such file or folder; box exists and holds d"),
     ("box/d", "wrongword", "cannot be listed|not readable")],
)  # fmt: skip
def test_what_is_wrong_is_told_without_the_secret(endpoint: str, path: str, secret: str, said: str) -> None:
    """Fault 39, in one line."""
    with pytest.raises(BadSource, match=said) as caught:
        resolve(source(uri(endpoint, path, secret)))
    shown = "".join(str(e) for e in (caught.value, caught.value.__cause__ or ""))
    assert secret not in shown
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, GristmillError)


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_in_a_store(endpoint: str, tmp_path: Path, kind: str) -> None:
    """Its members are read with the rights in its address, which nothing shows, or by options of its store."""
    for n in range(3):
        pq.write_table(pa.table({"a": [n]}), tmp_path / f"{n}.parquet")
    archive = tmp_path / f"x.{kind}"
    if kind == "tar":
        with tarfile.open(archive, "w") as out:
            out.add(tmp_path / "0.parquet", "d/0.parquet")
            out.add(tmp_path / "1.parquet", "./d/1.parquet")
    else:
        with zipfile.ZipFile(archive, "w") as packed:
            packed.write(tmp_path / "0.parquet", "d/0.parquet")
            packed.write(tmp_path / "1.parquet", "d/1.parquet")
    fs = pafs.S3FileSystem(access_key=KEY, secret_key=SECRET, endpoint_override=endpoint, scheme="http")
    with fs.open_output_stream(f"box/{archive.name}") as out:
        out.write(archive.read_bytes())
    options = {"access_key": KEY, "secret_key": SECRET, "endpoint_override": endpoint, "scheme": "http"}
    plain = f"{kind}://d::s3://box/{archive.name}"
    for one in (source(f"{kind}://d::{uri(endpoint, f'box/{archive.name}')}"), source(plain, storage={"s3": options})):
        storage, files = resolve(one)
        assert [f.path.partition("::")[0] for f in files] == [f"{kind}://d/0.parquet", f"{kind}://d/1.parquet"]
        storage = pickle.loads(pickle.dumps(storage))
        assert [pq.read_table(open_input(storage, f.path))["a"].to_pylist() for f in files] == [[0], [1]]
        assert changed(storage, files[0]) is None and SECRET not in repr(files)
