"""The pages, put together: who may look, who answers, who looks into sinks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from gristmill.pages.access import Access, Listen
from gristmill.pages.asking import Asking
from gristmill.pages.routes import Pages
from gristmill.pages.server import PageServer
from gristmill.pages.shown import Source


@contextlib.contextmanager
def live(at: Listen, token: str, source: Source, environ: Mapping[str, str]) -> Iterator[str]:
    """While inside, the pages are served; gives their address. `environ` is that of the process that reads sinks.
    Raises BadJob if it cannot listen.
    """
    asking = Asking(environ)
    server = PageServer(at, asking.tidy)
    try:
        server.answer = Pages(source, Access(token, f"gristmill-{server.server_port}"), asking).answer
        server.serve()
        yield at.url(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        asking.close()
