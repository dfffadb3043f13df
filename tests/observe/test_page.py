"""The report as a page: everything that a row or an error holds is text, nothing is fetched, and it can be read on a
telephone, in a real browser.
"""

from __future__ import annotations

import dataclasses
import http.server
import re
import shutil
import subprocess
import threading
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gristmill.commit.documents import Drifted
from gristmill.observe import charts
from gristmill.observe.factlines import lines
from gristmill.observe.facts import Drift, Example, Incident, Kind, Night, Pace, Run, SinkFacts, Slow, Standing, Way
from gristmill.observe.page import page
from gristmill.observe.report import WorkerPace

HOSTILE = "</pre></style><script>document.title='no'</script><img src=x onerror=\"document.title='no'\">'\"&{{7*7}}"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def facts(text: str = "plain") -> SinkFacts:
    """A sink of which everything is known, with this text wherever others may have written it."""
    worker = WorkerPace(f"w0 {text}", f"host {text}", 600, 10.0)
    run = Run(
        run="r", generation=3, kind="new", state="failed", started=1_795_000_000.0, seconds=12.5, host=f"host {text}",
        command=("gristmill", "run", f"job {text}.yaml"), folder=f"/srv/{text}", engine=f"ray {text}", model=text,
        error=f"ValueError: {text}", rows=1200, workers=2, pace=((0.0, 0), (5.0, 500), (12.5, 1200)), busy=0.5,
        padding=0.1, used={"requests": 3.0}, per_worker=(worker, worker), notes=(text,),
        slowest=(Slow(4, 2.5, 100, f"w0 {text}", f"/data/{text}.parquet", 0, 100),),
    )  # fmt: skip
    night = Night(1, "2026-11-20T23:14:00+0100", 12.5, 1300, 1200, 60, 40, f"models/{text}", "sha256:abc", {text: 60})
    past = ((1, 0.1, "held"), (2, 0.31, "failed"))
    drifted = Drifted(f"score {text}", "psi", 0.31, 0.1, 0.25, 0.01, "failed", f"the result of {text}", text)
    example = Example(f"/data/{text}:3", "model", text, f'{{"t": "{text}"}}')
    way = Way(f"accept {text}", f"gristmill run 'job {text}.yaml' --accept")
    return SinkFacts(
        sink=f"/srv/{text}", state="unfinished", at=1_795_000_100.0, version="0.1.0",
        standing=Standing("not published: a gate did not hold", f"min_ok {text}", way),
        now={"gate": f"min_ok {text}", "shards_done": 3, "shards_total": 9, "rows_done": 500, "rows_ok": 480},
        rows=(("rows in", "1,300", text),), nights=(night, dataclasses.replace(night, generation=2, rows_ok=1100)),
        runs=(run,), kinds=(Kind(f"Error {text}", 60, (example,)),),
        letters=f"cannot be read: {text}", digests=(("model", text), (f"code {text}", text), (f"option {text}", text)),
        inputs=((f"/data/{text}.parquet", "1.2 MB"),), columns=((f"col {text}", f"struct<{text}>"),),
        deliveries=(f"duckdb:///{text}",), incidents=(Incident("failed", text, 1_795_000_000.0),),
        drift=(Drift(f"score {text}", (drifted,), (text, "b"), (0.5, 0.5), (0.1, 0.9), past),),
        job=f"source: {text}", folder=f"/srv/{text}",
    )  # fmt: skip


class Elements(HTMLParser):
    """All elements of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def shape(text: str) -> list[tuple[str, list[str]]]:
    return [(tag, sorted(attributes)) for tag, attributes in Elements(text).found]


def test_what_others_wrote_is_text() -> None:
    """A page with hostile text everywhere has the elements and attributes of one with plain text, and says the text."""
    hostile = page(facts(HOSTILE))
    assert shape(hostile) == shape(page(facts()))
    assert not [tag for tag, _ in shape(hostile) if tag in ("script", "img", "iframe", "link", "base", "form")]
    assert Elements(hostile).text.count(HOSTILE) > 20
    assert "49" not in Elements(page(facts("{{7*7}}"))).text.replace("1,49", "")


def test_nothing_is_fetched() -> None:
    """No element names an address, and a policy forbids what a browser might fetch all the same."""
    text = page(facts())
    elements = Elements(text).found
    assert not [a for _, a in elements if {"src", "href", "srcset", "action", "data"} & a.keys()]
    assert "url(" not in text and "@import" not in text and "http://" not in text and "https://" not in text
    assert any("default-src 'none'" in str(a.get("content")) for tag, a in elements if tag == "meta")


def test_the_page_and_the_terminal_tell_the_same() -> None:
    """Counts, generations, errors with examples, drift, workers, slow shards, digests, how to run it again."""
    text, told = Elements(page(facts())).text, "\n".join(f"{name} {line}" for name, line in lines(facts()))
    for part in (
        "/srv/plain", "min_ok plain", "1,200", "models/plain", "Error plain", "/data/plain:3", "psi", "w0 plain",
        "/data/plain.parquet", "gristmill run 'job plain.yaml'", "ValueError: plain", "duckdb:///plain",
    ):  # fmt: skip
        assert part in text, part
        assert part in told, part
    assert "−8.3 %" in text


def test_a_sink_without_anything() -> None:
    """A page of what is not known yet has no empty charts or tables."""
    text = page(SinkFacts(sink="/out", state="empty", at=1.0, version="0", standing=Standing("nothing was run here")))
    assert "nothing was run here" in text and "<svg" not in text and "Drift" not in text and "Errors" not in text


def test_throughput_over_time() -> None:
    """Rows a second are those of each stretch of time, whatever number of points was kept."""
    pace = Pace()
    for second in range(10_000):
        pace.take(float(second), second * 100)
    points = pace.points(10_000.0, 1_000_000)
    assert len(points) <= Pace.MOST + 1 and points[-1] == (10_000.0, 1_000_000)
    found = charts.rates(points)
    assert len(found) <= 65 and all(abs(rate - 100) < 1 for _, rate in found[1:])
    assert charts.rates(((0.0, 0),)) == [] and charts.line([], "x") == "" and charts.columns([], "x") == ""


def test_charts_of_nothing_and_of_very_much() -> None:
    """No division by zero, no coordinate outside of the picture."""
    for values in ((0, 0, 0), (10**12, 1, 0), (1, 0, 10**6)):
        drawn = charts.columns([("1", tuple(zip(("ok", "dead", "filtered"), values, strict=True)))] * 3, "x")
        for y, high in re.findall(r'y="([-\d.]+)" width="[\d.]+" height="([-\d.]+)"', drawn):
            assert 0 <= float(y) <= charts.HEIGHT and 0 <= float(high) <= charts.HEIGHT


# ---------------------------------------------------------------- in a browser

browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium")
LOOK = """<!doctype html><title>before</title>
<iframe src="report.html" style="width:{width}px;height:800px;border:0"></iframe>
<script>
addEventListener('load', () => {{
  const page = document.querySelector('iframe').contentDocument, root = page.documentElement;
  const dark = getComputedStyle(page.body).backgroundColor;
  const small = [...page.querySelectorAll('p, td, summary')].filter(e => parseFloat(getComputedStyle(e).fontSize) < 12);
  document.body.dataset.found = JSON.stringify({{
    wide: root.scrollWidth, title: page.title, scripts: page.scripts.length, images: page.images.length,
    charts: page.querySelectorAll('svg').length, background: dark, small: small.length }});
}});
</script>"""


@browser
@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_in_a_real_browser(width: int, dark: bool, tmp_path: Path) -> None:
    """It fits a telephone and a screen without scrolling sideways, is dark where that is wanted, runs nothing."""
    (tmp_path / "report.html").write_text(page(facts(HOSTILE)), encoding="utf-8")
    (tmp_path / "look.html").write_text(LOOK.format(width=width))
    found = looked(tmp_path, width, dark)
    assert found["wide"] <= width
    assert HOSTILE in found["title"] and found["scripts"] == found["images"] == 0
    assert found["charts"] == 4 and found["small"] == 0
    assert (found["background"] == "rgb(20, 23, 26)") == dark


def looked(folder: Path, width: int, dark: bool) -> dict[str, Any]:
    """What a browser finds on the page in a frame of this width."""
    import html
    import json

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        command = [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
            f"--user-data-dir={folder / 'profile'}", f"--window-size={width + 40},900", "--virtual-time-budget=5000",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--dump-dom", f"http://127.0.0.1:{server.server_port}/look.html",
        ]  # fmt: skip
        ended = subprocess.run(command, capture_output=True, text=True, timeout=90)
    finally:
        server.shutdown()
        server.server_close()
    match = re.search(r'data-found="([^"]*)"', ended.stdout)
    assert match is not None, ended.stdout + ended.stderr[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(match[1]))
    return found
