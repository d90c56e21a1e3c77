"""Load compiled code from disk for numba, but never another user's files, and replace unreadable files.

numba unpickles the files that it finds, and unpickling runs code. When numba first searches for compiled code, it
imports this module, whose name `compiled_code.set_directory` has set; from then on, numba compiles as `emitting`
describes.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from numba.core import caching

from xgpt.core import emitting

logger = logging.getLogger(__name__)
_told: set[str] = set()


def _tell(path: str, reason: str) -> None:
    """Warn once about a path."""
    if path not in _told:
        _told.add(path)
        logger.warning("compiled code at %s is not used: %s", path, reason)


def is_ours(path: str | os.PathLike[str]) -> bool:
    """Return whether a file or directory belongs to this user or to root, or does not exist.

    Raises:
        OSError: its owner cannot be determined.
    """
    try:
        return os.stat(path).st_uid in (os.geteuid(), 0)
    except FileNotFoundError:
        return True


class Locator(caching.UserProvidedCacheLocator):
    """Keeps code in the configured directory if that can be written."""

    def ensure_cache_path(self) -> None:
        """Create the directory if possible."""
        try:
            super().ensure_cache_path()
        except OSError as error:
            _tell(
                self.get_cache_path(), f"it cannot be written ({error.strerror}), so functions are compiled each time"
            )


class Files(caching.IndexDataCacheFile):
    """The files with one function's compiled code."""

    def _load_index(self) -> dict[Any, str]:
        found: dict[Any, str] | None = self._read(self._index_path, super()._load_index)
        return found or {}

    def _load_data(self, name: str) -> Any:
        return self._read(self._data_path(name), lambda: super(Files, self)._load_data(name))

    def _read(self, path: str, read: Any) -> Any:
        """Return the result of `read`, or None if the file is another user's or unreadable."""
        try:
            if is_ours(self._cache_path) and is_ours(path):
                return read()
            _tell(path, "it belongs to another user")
        except Exception as error:  # a truncated pickle may raise anything
            _tell(path, f"it is damaged ({type(error).__name__}) and is compiled again")
        return None

    def save(self, key: Any, data: Any) -> None:
        """Write compiled code, if there is room."""
        try:
            if is_ours(self._cache_path):
                super().save(key, data)
        except OSError as error:
            _tell(self._cache_path, f"it cannot be written ({error.strerror}), so functions are compiled each time")


caching.IndexDataCacheFile = Files  # type: ignore[misc]
emitting.install()
