"""Every snippet of README and of the pages in docs, typed in page by page."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import gristmill as gm
from batchserver import BatchServer
from llmserver import KEY as KEY_OF_CHAT
from s3server import KEY, SECRET, S3Server
from snippets import DOCS, PAGES, ROOT, Reader, blocks

# How many blocks of a page are only read here. One more has to be counted; its reason stands above it.
NOT_RUN = {
    "README.md": 3,
    "docs/clusters.md": 2,
    "docs/databases.md": 1,
    "docs/install.md": 1,
    "docs/language-models.md": 4,
    "docs/models.md": 2,
    "docs/nightly.md": 7,
    "docs/speed.md": 1,
    "docs/stores.md": 2,
    "docs/tutorial.md": 1,
}
STORES = "docs/object-stores.md"
DELIVERIES = "docs/stores.md"
DATABASES = "docs/databases.md"
PROMPTS = "docs/language-models.md"
ELSEWHERE = "docs/extending.md"  # whose files are those of a package that tests/extending installs
PROSE = {
    ELSEWHERE,
    "docs/architecture.md",
    "docs/benchmarks.md",
    "docs/reliability.md",
}  # pages about the inside: no snippets


pytestmark = pytest.mark.filterwarnings("ignore::gristmill.GristmillWarning")


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page) and page not in (STORES, DELIVERIES, DATABASES, PROMPTS, ELSEWHERE)]
)
def test_the_snippets_of_the_page(page: str, reader: Callable[[str], Reader]) -> None:
    """Each does what it says, in the order in which they stand there."""
    read(page, reader(page))


@pytest.mark.long
def test_the_snippets_about_stores(
    store: S3Server, reader: Callable[[str], Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, with a store that the environment names."""
    for name, value in {"S3_ENDPOINT": store.address, "S3_KEY": KEY, "S3_SECRET": SECRET}.items():
        monkeypatch.setenv(name, value)
    read(STORES, reader(STORES))


@pytest.mark.long
def test_the_snippets_about_deliveries(
    databases: dict[str, str], reader: Callable[[str], Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, with servers that the environment names."""
    for name, value in databases.items():
        monkeypatch.setenv(name, value)
    read(DELIVERIES, reader(DELIVERIES))


def test_the_snippets_about_databases(
    databases: dict[str, str], reader: Callable[[str], Reader], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same, with a server that the environment names, and a file that SQLAlchemy opens."""
    monkeypatch.setenv("PG_URL", databases["PG_URL"])
    monkeypatch.setenv("KAFKA_BROKER", databases["KAFKA_BROKER"])
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.sqlite")) as db, db:
        db.execute("CREATE TABLE reviews (review_id INTEGER, text TEXT)")
        db.executemany("INSERT INTO reviews VALUES (?, ?)", [(n, "x" * n) for n in range(9)])
    read(DATABASES, reader(DATABASES))
    import psycopg

    with psycopg.connect(databases["PG_URL"]) as server:
        server.execute("DROP TABLE orders")


@pytest.mark.long
def test_the_snippets_about_language_models(reader: Callable[[str], Reader], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, with an endpoint that the environment names."""
    with BatchServer(model="gpt-4.1-mini,claude-haiku-4-5", answer="auto", takes=0.2) as server:
        for vendor, url in (("OPENAI", server.url), ("ANTHROPIC", server.anthropic)):
            monkeypatch.setenv(f"{vendor}_API_KEY", KEY_OF_CHAT)
            monkeypatch.setenv(f"{vendor}_BASE_URL", url)
        read(PROMPTS, reader(PROMPTS))


def read(page: str, session: Reader) -> None:
    """Type in a page, and look at what its jobs have left."""
    for block in blocks(page):
        session.read(block)
    if check := CHECKS.get(page):
        check()


def test_what_is_not_run_is_counted() -> None:
    """With a reason, or the test that runs it, which takes it from the page."""
    left = [block for page in PAGES for block in blocks(page) if block.reason]
    assert Counter(block.page for block in left) == NOT_RUN
    for block in left:
        if block.note.startswith("run by"):
            test = (ROOT / block.reason).read_text()
            assert f'block("{block.page}", ' in test, f"{block}: {block.reason} does not take it"
        else:
            assert len(block.reason.split()) > 2, str(block)


def test_pages_have_snippets_or_are_about_the_inside() -> None:
    """No block of a page escapes for its form: all fences are read."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        fences = len(re.findall(r"^ *(?:```|~~~)", text, re.MULTILINE))
        assert page in PROSE or fences == 2 * len(blocks(page)), page


def test_links_lead_to_files_that_are_there() -> None:
    """Relative ones of README, CONTRIBUTING and docs; pages of the reference are made with the site."""
    made = {DOCS / "reference" / f"{name}.md" for name in ("cli", "job-file", "options", "python", "errors")}
    for page in (*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"):
        path = ROOT / page
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text()):
            target = (path.parent / link).resolve()
            assert target in made or target.exists(), f"{page}: {link}"


# ---------------------------------------------------------------- what the pages' jobs have left


def features() -> None:
    """A row for each customer in every sink, and the classes in their columns."""
    for sink in ("scores", "pinned", "wide", "risk", "net"):
        assert gm.read(sink).count_rows() == 100
    scores = gm.read("scores").to_table()["probabilities"].to_pylist()
    wide = gm.read("wide").to_table()
    assert wide.column_names == ["customer_id", "p_churn", "p_stay"]
    assert list(map(list, zip(wide["p_churn"].to_pylist(), wide["p_stay"].to_pylist(), strict=True))) == scores


def models() -> None:
    """A row for each customer in every sink; a failed one where the page has one."""
    rows = {sink: gm.read(sink).count_rows() for sink in ("linear", "own", "ratio", "careful", "audited")}
    assert rows == {"linear": 100, "own": 100, "ratio": 100, "careful": 99, "audited": 100}


def steps() -> None:
    """Chunks of their files in order, and the colour of each image but the torn one."""
    chunks, colours = gm.read("chunks").to_table().to_pylist(), gm.read("colours").to_table().to_pylist()
    assert [(Path(c["path"]).name, c["chunk"], len(c["text"].split())) for c in chunks] == [
        ("long.md", 0, 100), ("long.md", 1, 100), ("long.md", 2, 50), ("short.txt", 0, 2),
    ]  # fmt: skip
    assert [c["colour"] for c in colours] == [[255, 0, 0], [0, 0, 255]]


CHECKS: dict[str, Callable[[], None]] = {"docs/features.md": features, "docs/models.md": models, "docs/steps.md": steps}
