"""Choose where numba stores compiled code: in the user's cache, with a separate directory for each state of the
sources.

By default, numba recompiles a function only if the function's own file has changed. So after a change of a called
function in another file, outdated code would stay in use.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from xgpt.core.io import cache_dir

ROOMS = ("xrunner/cpu", "xsimulator/counts", "xsimulator/costs")
KEPT_S = 30 * 86400.0
"""Directories for other states of the sources are deleted at this age, in seconds."""


LOCATORS = "xgpt.core.compiled_files.Locator,InTreeCacheLocator,UserWideCacheLocator,IPythonCacheLocator"
"""Classes with which numba searches for compiled code, in this order (see `compiled_files`)."""
NOWHERE = os.devnull + "/compiled"

logger = logging.getLogger(__name__)


def set_directory() -> None:
    """Set where numba stores compiled code, unless the user has set it. Call this before numba compiles."""
    _set("CACHE_LOCATOR_CLASSES", LOCATORS)
    try:
        _set("CACHE_DIR", str(_directory()))
    except (OSError, RuntimeError):  # without readable sources or a home directory, numba chooses another directory
        return


def _set(name: str, value: str) -> None:
    if f"NUMBA_{name}" not in os.environ:
        os.environ[f"NUMBA_{name}"] = value
        if "numba" in sys.modules:
            setattr(sys.modules["numba"].config, name, value)


def sources() -> str:
    root, found = Path(__file__).parents[2], sha256()
    for room in ROOMS:
        for file in sorted((root / room).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()


def _directory() -> Path:
    """Return the directory for this state of the sources, after making it writable only for its owner.

    Code in this directory is executed. So return `NOWHERE` if the directory, or one of its parents in the cache,
    belongs to a user other than this one or root.
    """
    directory = cache_dir() / "compiled" / sources()[:16]
    for folder in (directory.parents[1], directory.parents[0], directory):
        if not folder.exists():
            continue
        status = folder.stat()
        if status.st_uid not in (os.geteuid(), 0):
            logger.warning(
                "compiled code is not cached: %s belongs to another user; set XDG_CACHE_HOME to your own directory",
                folder,
            )
            return Path(NOWHERE)
        if status.st_uid == os.geteuid() and status.st_mode & 0o022:
            folder.chmod(status.st_mode & ~0o022)
    if not directory.exists():
        with suppress(OSError):
            directory.mkdir(parents=True, mode=0o700)
            for other in directory.parent.iterdir():
                if other.stat().st_mtime < time.time() - KEPT_S:
                    shutil.rmtree(other, ignore_errors=True)
    return directory
