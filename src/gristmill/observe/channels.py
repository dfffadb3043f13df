"""Mail and commands, as channels of alerts: bounded in time; what is wrong is said without addresses and passwords."""

from __future__ import annotations

import contextlib
import os
import signal
import smtplib
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from email.message import EmailMessage
from typing import IO
from urllib.parse import unquote, urlsplit

from gristmill.job.recipients import Alert
from gristmill.job.secret import Secret, reveal, scrub
from gristmill.observe.posting import EACH_S, NotTold

LOOKED, SAID = 4096, 200  # bytes at the end of what a command complains of, and characters of its last line


def send_mail(alert: Alert, subject: str, text: str, until: float) -> None:
    """Send a mail: with STARTTLS if the server has it, which it must to be given a password. Raises NotTold."""
    server = urlsplit(reveal(alert.smtp))
    host, tls = server.hostname or "localhost", ssl.create_default_context()
    mail = EmailMessage()
    mail["Subject"] = " ".join(subject.split())
    mail["From"] = alert.sender or f"gristmill@{socket.gethostname()}"
    mail["To"] = ", ".join(alert.email)
    mail.set_content(text)
    timeout = max(0.1, min(EACH_S, until - time.monotonic()))
    try:
        if server.scheme == "smtps":
            client: smtplib.SMTP = smtplib.SMTP_SSL(host, server.port or 465, timeout=timeout, context=tls)
        else:
            client = smtplib.SMTP(host, server.port or 25, timeout=timeout)
        with client:
            _log_in(client, server.scheme, unquote(server.username or ""), unquote(server.password or ""), tls)
            client.send_message(mail)
    except smtplib.SMTPResponseException as e:
        raise NotTold(f"the mail server answered {e.smtp_code} ({type(e).__name__})") from None
    except (smtplib.SMTPException, OSError) as e:
        why = getattr(e, "reason", None) or getattr(e, "strerror", None) or type(e).__name__
        raise NotTold(f"the mail server did not take it ({why})") from None


def _log_in(client: smtplib.SMTP, scheme: str, user: str, password: str, tls: ssl.SSLContext) -> None:
    client.ehlo()
    if scheme == "smtp" and client.has_extn("starttls"):
        client.starttls(context=tls)
        client.ehlo()
    elif scheme == "smtp" and password:
        raise NotTold("the mail server has no STARTTLS, and a password is not sent in the clear: use smtps://")
    if user:
        client.login(user, password)


def run_command(
    words: Sequence[str], given: bytes, environ: Mapping[str, str], until: float, hidden: Sequence[Secret] = ()
) -> None:
    """Run a command with this on its standard input; of what it prints, only the last line of its errors is told, if it
    fails. It is ended, with all that it started, if it takes too long. Raises NotTold.
    """
    with contextlib.ExitStack() as stack:
        errors: IO[bytes] | None = None
        with contextlib.suppress(OSError):  # a full disk keeps no alert back
            errors = stack.enter_context(tempfile.TemporaryFile())  # no pipe: what the command leaves running holds it
        code = _ended(words, given, environ, until, subprocess.DEVNULL if errors is None else errors)
        if code:
            said = "" if errors is None else scrub(_last_line(errors), hidden)[:SAID]
            raise NotTold(f"it ended with {code}" + (f": {said}" if said else ""))


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - LOOKED))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return "".join(c for c in lines[-1] if c.isprintable()) if lines else ""


def _ended(
    words: Sequence[str], given: bytes, environ: Mapping[str, str], until: float, errors: int | IO[bytes]
) -> int:
    """What a command ended with. Raises NotTold."""
    own = os.name != "nt"
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, env=dict(environ),
            start_new_session=own,
        )  # fmt: skip
    except OSError as e:
        raise NotTold(f"it cannot be run ({e.strerror})") from None
    try:
        process.communicate(given, max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            if own:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.communicate()
        raise NotTold("it did not end in time") from None
    return process.returncode
