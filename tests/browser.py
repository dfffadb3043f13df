"""A real Chromium for tests, spoken to by its DevTools protocol: pages at a given width, what they hold, clicks."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium")


class Browser:
    """One page of a browser. Everything that it asks of a server, and every script error, is kept in `asked` and
    `wrong`.
    """

    def __init__(self, socket: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._socket, self._loop, self._id = socket, loop, 0
        self.asked: list[str] = []
        self.wrong: list[str] = []
        self._loaded = 0
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._id += 1
        return self._loop.run_until_complete(self._called(self._id, method, params))

    async def _called(self, number: int, method: str, params: dict[str, Any]) -> dict[str, Any]:
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            said = await self._socket.receive_json(timeout=60)
            if said.get("id") == number:
                assert "error" not in said, said
                result: dict[str, Any] = said["result"]
                return result
            self._heard(said)

    def _heard(self, said: dict[str, Any]) -> None:
        what, params = said.get("method"), said.get("params", {})
        if what == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif what == "Page.loadEventFired":
            self._loaded += 1
        elif what == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.wrong.append(params["entry"]["text"])

    def width(self, width: int, *, dark: bool = False) -> None:
        """From now on the screen is this wide; up to 640 it is that of a telephone."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width <= 640
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Go to a page, and wait until it is loaded."""
        before = self._loaded
        self.call("Page.navigate", url=url)
        self.loaded(before)

    def loaded(self, before: int) -> None:
        """Wait until there was one more load than `before`."""
        until = time.monotonic() + 60
        while self._loaded <= before:
            assert time.monotonic() < until, "the page was not loaded"
            self.js("0")
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Click, and wait until the page that follows is loaded."""
        before = self._loaded
        self.js(f"document.querySelector({selector!r}).click()")
        self.loaded(before)

    def js(self, expression: str) -> Any:
        """The value of an expression on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """A picture of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser while inside; `folder` is for its profile."""
    import aiohttp

    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
        "--disable-background-networking", "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}",
        "about:blank",
    ]  # fmt: skip
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    loop = asyncio.new_event_loop()
    try:
        note = folder / "profile" / "DevToolsActivePort"
        until = time.monotonic() + 60
        while not note.exists() or "\n" not in note.read_text():
            assert time.monotonic() < until and running.poll() is None, "Chromium has not started"
            time.sleep(0.05)
        port = note.read_text().splitlines()[0]

        async def connected() -> Any:
            session = aiohttp.ClientSession()
            for _ in range(100):
                async with session.get(f"http://127.0.0.1:{port}/json/list") as found:
                    pages = [one for one in await found.json() if one["type"] == "page"]
                if pages:
                    return session, await session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=1 << 28)
                await asyncio.sleep(0.1)
            raise AssertionError("Chromium has no page")

        session, socket = loop.run_until_complete(connected())
        try:
            yield Browser(socket, loop)
        finally:
            loop.run_until_complete(session.close())
    finally:
        running.terminate()
        running.wait(timeout=30)
        loop.close()
