"""Objects of a sink as pyarrow's data sets read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.arrow.filesystem import called, python_file


def handler(files: Any, otherwise: Mapping[str, str]) -> Any:
    """A handler for pyarrow.fs.PyFileSystem that can only open objects for reading. `otherwise` says where to look for
    objects that are gone.
    """
    import pyarrow.fs as pafs

    from gristmill.files.objectreads import Ranges

    class Called(Ranges):
        def read(self, size: int = -1) -> bytes:
            with called():
                return super().read(size)

    def found(path: str) -> Called:
        with called():
            return Called(files, path, otherwise.get(path))

    class Reading(pafs.FileSystemHandler):  # type: ignore[misc]
        def get_type_name(self) -> str:
            return "gristmill-objects"

        def normalize_path(self, path: str) -> str:
            return path

        def get_file_info(self, paths: list[str]) -> list[Any]:
            return [pafs.FileInfo(p, pafs.FileType.File, size=found(p).size) for p in paths]

        def open_input_file(self, path: str) -> Any:
            return python_file(found(path))

        open_input_stream = open_input_file

    def refused(self: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("a published sink is only read")

    for name in pafs.FileSystemHandler.__abstractmethods__ - set(vars(Reading)):
        setattr(Reading, name, refused)
    Reading.__abstractmethods__ = frozenset()
    return Reading()
