"""Which staging places of a lake have files that a log may name: a note beside them, made before the commit that names
them, and kept for good once that is done.

Tables tell it, too, but not for ever, and not of each other: a log forgets, a table that is renamed or registered twice
shares its folder with another, which knows nothing of it. Delta, Iceberg and Lance leave names alone that begin with _,
also where they clean up.
"""

from __future__ import annotations

import json
import os

from gristmill.files.disk import LOCAL

NOTES = "_gristmill_named"  # the folder of the notes, among the data files


class Named:
    """The notes in a folder of data files. Versions of a table are told apart by what its format calls them; "" is
    that there is no table.
    """

    def __init__(self, folder: str) -> None:
        self._folder = os.path.join(folder, NOTES)

    def begin(self, place: str, version: str) -> None:
        """The files there are about to be named, by the version after this one."""
        LOCAL.make_folder(self._folder)
        LOCAL.write_over(self._path(place), json.dumps({"after": version}).encode())

    def keep(self, place: str) -> None:
        """They are named, or it will never be known whether they are."""
        LOCAL.make_folder(self._folder)
        LOCAL.write_over(self._path(place), json.dumps({}).encode())

    def forget(self, place: str) -> None:
        """They are not named, or are no more."""
        LOCAL.remove(self._path(place))

    def usable(self, place: str, version: str) -> bool:
        """Whether files may be staged there: none of them is named, or a commit was interrupted, and the version that
        it was to follow is the newest.
        """
        note = self._note(place)
        return note is None or note.get("after") == version

    def removable(self, place: str, version: str) -> bool:
        """Whether no log can name files there. Where there was no table, whoever made one may have renamed it since."""
        return self._note(place) is None or (version != "" and self.usable(place, version))

    def of(self, places: str) -> list[str]:
        """The places with a note whose names begin so."""
        return [name for name in LOCAL.names(self._folder) if name.startswith(places)]

    def _path(self, place: str) -> str:
        return os.path.join(self._folder, place)

    def _note(self, place: str) -> dict[str, str] | None:
        try:
            with open(self._path(place), "rb") as file:
                return dict(json.load(file))
        except FileNotFoundError:
            return None
        except ValueError:  # whatever it said, there was a commit
            return {}
