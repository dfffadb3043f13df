"""Who may look at the pages of `up`: addresses, the token, other sites."""

from __future__ import annotations

import pytest

from gristmill.errors import BadJob
from gristmill.pages.access import Access, Listen, listen_of

TOKEN = "0123456789abcdef0123"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("8080", Listen("127.0.0.1", 8080)),
        ("localhost:8080", Listen("localhost", 8080)),
        ("127.0.0.2:1", Listen("127.0.0.2", 1)),
        ("[::1]:8080", Listen("::1", 8080)),
    ],
)
def test_this_machine_needs_no_token(text: str, found: Listen) -> None:
    """Addresses of the own machine, with and without a host."""
    assert listen_of(text, "") == found and found.local


@pytest.mark.parametrize("text", ["0.0.0.0:8080", "[::]:8080", "192.168.1.4:80", "scores.example.org:80"])
def test_beyond_this_machine_a_token_is_needed(text: str) -> None:
    """Without one it is refused, with the way out; with one it is not."""
    with pytest.raises(BadJob, match="set GRISTMILL_TOKEN"):
        listen_of(text, "")
    assert not listen_of(text, TOKEN).local


@pytest.mark.parametrize("text", ["", "x", ":8080", "::1:8080", "h:70000", "h:-1", "h:²"])
def test_what_is_no_address_is_refused(text: str) -> None:
    """One line that says what one looks like."""
    with pytest.raises(BadJob, match="give a port, or HOST:PORT"):
        listen_of(text, TOKEN)


def test_a_token_that_can_be_guessed_is_refused() -> None:
    """It says how to make one, and does not say the token."""
    with pytest.raises(BadJob, match="at least 16") as error:
        listen_of("8080", "hunter2")
    assert "hunter2" not in str(error.value)


def test_without_a_token_names_of_others_are_not_answered() -> None:
    """A name can be made to lead here (DNS rebinding), an address cannot."""
    access = Access()
    for host in ("localhost", "localhost:8080", "127.0.0.1:9", "[::1]:8080", "LOCALHOST"):
        assert access.knows_host(host), host
    for host in ("", "evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example:80", "a b"):
        assert not access.knows_host(host), host


def test_the_token_lets_in_by_cookie_or_header() -> None:
    """The cookie is not the token, and that of another token is none."""
    access, other = Access(TOKEN), Access(TOKEN + "x")
    cookie = access.set_cookie.partition(";")[0]
    assert TOKEN not in access.set_cookie and "HttpOnly" in access.set_cookie and "SameSite" in access.set_cookie
    assert access.lets_in(cookie, "") and access.lets_in(f"a=b; {cookie}", "")
    assert access.lets_in("", f"Bearer {TOKEN}") and access.lets_in("", f"bearer {TOKEN}")
    for cookies in ("", "gristmill=", f"gristmill={TOKEN}", other.set_cookie.partition(";")[0], "\x00;="):
        assert not access.lets_in(cookies, ""), cookies
    for header in ("", "Bearer ", TOKEN, f"Bearer {TOKEN}x", "Basic é"):
        assert not access.lets_in("", header), header


def test_only_forms_of_these_pages_count() -> None:
    """What they send along is of this start alone, and a browser must not say that it comes from elsewhere."""
    access, host = Access(), "localhost:8080"
    assert access.sent_by_us(access.form, "http://localhost:8080", "same-origin", host)
    assert access.sent_by_us(access.form, "", "", host)
    assert not access.sent_by_us(Access().form, "", "", host)
    assert not access.sent_by_us("", "", "", host)
    assert not access.sent_by_us(access.form, "http://evil.example", "", host)
    assert not access.sent_by_us(access.form, "null", "", host)
    assert not access.sent_by_us(access.form, "", "cross-site", host)
