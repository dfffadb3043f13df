"""All things of one sort (model kinds, formats, engines) by name: ours, and those that installed packages register."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gristmill.errors import BadJob, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class Registry(Generic[T]):
    """Things by name. Ours are given as MODULE:NAME and imported on first use. Entry points of `group` are searched
    only for a name that is not ours, so that they cost nothing if unused. `what` is how errors call one of them,
    `needs` are the attributes that each must have, `aliases` are other names of ours.
    """

    def __init__(
        self,
        what: str,
        group: str,
        ours: Mapping[str, str],
        needs: tuple[str, ...],
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.ours = ours
        self.aliases = aliases
        self._what = what
        self._group = group
        self._needs = needs
        self._loaded: dict[str, T] = {}

    def get(self, name: str) -> T:
        """Raises BadJob for an unknown name, and for one whose package does not provide what it registers."""
        if name not in self._loaded:
            if name in self.ours:
                module, _, attribute = self.ours[name].partition(":")
                self._loaded[name] = getattr(importlib.import_module(module), attribute)
            elif name in self.registered:
                self._loaded[name] = self._load(self.registered[name])
            else:
                raise self.unknown(name)
        return self._loaded[name]

    def known(self, name: str) -> str:
        """The name itself, for a name that may be in capitals, begin with a dot, or be an alias. Raises BadJob if there
        is none.
        """
        plain = name.lower().lstrip(".")
        found = next((n for n in (plain, self.aliases.get(plain, ""), name) if n in self.ours), name)
        if found not in self:
            raise self.unknown(name)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self.ours or name in self.registered

    @property
    def names(self) -> tuple[str, ...]:
        """All names: ours, then those of other packages."""
        return (*self.ours, *self.registered)

    def name_of(self, thing: Any) -> str | None:
        """The name that a class is registered under; None if it is not."""
        path = f"{thing.__module__}:{thing.__qualname__}"
        if (name := next((n for n, ours in self.ours.items() if ours == path), None)) is not None:
            return name
        top = thing.__module__.partition(".")[0]  # other packages need not be importable
        same = [n for n, point in self.registered.items() if point.module.partition(".")[0] == top]
        return next((n for n in same if self.get(n) is thing), None)

    def package_of(self, name: str) -> tuple[str, str] | None:
        """Distribution and version of the package that registers a name; None for one of ours."""
        point = None if name in self.ours else self.registered.get(name)
        return None if point is None or point.dist is None else (point.dist.name, point.dist.version)

    def unknown(self, name: str) -> BadJob:
        """The error for an unknown name: the nearest one, and all names."""
        hint = did_you_mean(str(name), self.names)
        return BadJob(f"{self._what} {name!r}: it must be one of {', '.join(self.names)}{hint}")

    @functools.cached_property
    def registered(self) -> dict[str, EntryPoint]:
        """Entry points by name. Raises BadJob if one has a name of ours, or that of another package."""
        from importlib.metadata import entry_points

        found: dict[str, EntryPoint] = {}
        for point in entry_points(group=self._group):
            if point.name in self.ours:
                whose = "gristmill's own"
            elif point.name in found and found[point.name].value != point.value:
                whose = f"also registered by {_told(found[point.name])}"
            else:
                found[point.name] = point
                continue
            raise BadJob(
                f"{_told(point)} registers {self._what} {point.name!r}, which is {whose}: it needs another name "
                f"(entry point group {self._group}); until it has one, uninstall one of the two"
            )
        return found

    def _load(self, point: EntryPoint) -> T:
        where = f"{self._what} {point.name!r} of {_told(point)} ({point.value})"
        try:
            found: T = point.load()
        except (Exception, SystemExit) as e:
            raise BadJob(f"{where} cannot be imported: {type(e).__name__}: {e}") from e
        if lacks := [name for name in self._needs if not hasattr(found, name)]:
            raise BadJob(f"{where} has no {', '.join(lacks)}: docs/extending.md lists what it must have")
        if "name" in self._needs and isinstance(own := found.name, str) and own != point.name:  # type: ignore[attr-defined]
            raise BadJob(f"{where} calls itself {own!r}: its name must be the one under which it is registered")
        return found


def _told(point: EntryPoint) -> str:
    return "a package" if point.dist is None else f"package {point.dist.name} {point.dist.version}"
