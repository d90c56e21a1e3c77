"""Compiled code on disk, for numba: another user's files are not run, and unreadable files are replaced.

numba unpickles what it finds, and unpickling runs code. It imports this module by the name that
`compiled_code.set_directory` gives it, the first time that it looks for code.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from numba.core import caching

logger = logging.getLogger(__name__)
_told: set[str] = set()


def _tell(path: str, reason: str) -> None:
    """Warn once about a path."""
    if path not in _told:
        _told.add(path)
        logger.warning("compiled code at %s is not used: %s", path, reason)


def is_ours(path: str | os.PathLike[str]) -> bool:
    """Return whether a file or directory belongs to this user, or to root; one that does not exist does.

    Raises:
        OSError: its owner cannot be told.
    """
    try:
        return os.stat(path).st_uid in (os.geteuid(), 0)
    except FileNotFoundError:
        return True


class Locator(caching.UserProvidedCacheLocator):
    """Keeps code in the directory that is set, and none where that cannot be written."""

    def ensure_cache_path(self) -> None:
        """Make the directory, if that is possible."""
        try:
            super().ensure_cache_path()
        except OSError as error:
            _tell(
                self.get_cache_path(), f"it cannot be written ({error.strerror}), so functions are compiled each time"
            )


class Files(caching.IndexDataCacheFile):
    """The files of one function."""

    def _load_index(self) -> dict[Any, str]:
        found: dict[Any, str] | None = self._read(self._index_path, super()._load_index)
        return found or {}

    def _load_data(self, name: str) -> Any:
        return self._read(self._data_path(name), lambda: super(Files, self)._load_data(name))

    def _read(self, path: str, read: Any) -> Any:
        """Return what `read` does; None if the file is another user's, or broken."""
        try:
            if is_ours(self._cache_path) and is_ours(path):
                return read()
            _tell(path, "it belongs to another user")
        except Exception as error:  # a pickle that was cut short fails in any way
            _tell(path, f"it is broken ({type(error).__name__}) and made anew")
        return None

    def save(self, key: Any, data: Any) -> None:
        """Write compiled code, if there is room."""
        try:
            if is_ours(self._cache_path):
                super().save(key, data)
        except OSError as error:
            _tell(self._cache_path, f"it cannot be written ({error.strerror}), so functions are compiled each time")


caching.IndexDataCacheFile = Files  # type: ignore[misc]
