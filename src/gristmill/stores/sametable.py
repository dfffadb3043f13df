"""Whether the table that a job reads is one that it delivers to, however their addresses spell it: told by what is
there, as one file has several names, and a server several addresses and defaults.
"""

from __future__ import annotations

import contextlib
from urllib.parse import urlsplit

from gristmill.errors import GristmillError
from gristmill.files.disk import which_file
from gristmill.job.delivery import STORES, Place, same_table, table_in
from gristmill.job.snapshots import Wanted


def is_read(wanted: Wanted, to: Place) -> bool:
    """Whether a delivery goes to what is read. What cannot be asked is told by whoever opens it; the addresses alone
    count then.
    """
    read = wanted.place
    if wanted.query is not None or read.store != to.store:
        return False
    if _is_files(to):
        if "+" in read.uri.partition("://")[0]:  # in an object store
            return False
        return same_table(read, to) or (_table(read) == _table(to) and _is_one_file(_path(read), _path(to)))
    kind = STORES.get(to.store)
    told = kind.same(read, to) if hasattr(kind, "same") and not _is_one_address(read, to) else None
    return same_table(read, to) if told is None else bool(told)


def _is_one_address(read: Place, to: Place) -> bool:
    """Whether both are spelled alike, whoever comes there where that chooses neither database nor schema. Several
    servers may answer at one address: that two of them differ says nothing of where the next session ends up.
    """
    one, other = urlsplit(read.uri), urlsplit(to.uri)
    hosts = [parts.netloc.rpartition("@")[2] for parts in (one, other)]
    chosen = one.username == other.username or ("." in to.name and one.path.strip("/"))
    said = (one.path, one.query, read.name, read.options) == (other.path, other.query, to.name, to.options)
    return bool(hosts[0] == hosts[1] and said and chosen)


def _is_files(place: Place) -> bool:
    return STORES.get(place.store).embedded


def _path(place: Place) -> str:
    """The file of a database, or the folder of a table."""
    kind = STORES.get(place.store)
    with contextlib.suppress(GristmillError):  # of a name that is none of a table
        found = kind.files(place) if hasattr(kind, "files") else None
        return place.path if found is None else str(found[0])
    return place.path


def _table(place: Place) -> str:
    """Which table of the file it is; nothing if that is part of the path. Sources know SQLite's schema as well."""
    if hasattr(STORES.get(place.store), "files"):
        return ""
    return table_in(place.store, place.name).removeprefix("main.")


def _is_one_file(one: str, other: str) -> bool:
    """Whether there is a file, or a folder, that has both names: by links, or as it is mounted twice."""
    with contextlib.suppress(OSError):
        return (found := which_file(one)) is not None and found == which_file(other)
    return False
