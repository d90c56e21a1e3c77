"""Where numba keeps what it compiles: a directory of the user's cache for each state of the sources.

Kept with its source, as numba does by default, a function goes on being run as it was when a function that it calls is
changed in another file: numba looks at the function's own file alone.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from xgpt.core.io import cache_dir

ROOMS = ("xrunner/cpu", "xsimulator")
"""Where functions are compiled."""
KEPT_S = 30 * 86400.0
"""For which directories of other states of the sources are kept."""


def set_directory() -> None:
    """Set `NUMBA_CACHE_DIR`, unless the user has; before numba is imported, or for what it compiles from now on."""
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    try:
        directory = _directory()
    except (OSError, RuntimeError):  # no sources to read, or no home: numba finds another place
        return
    os.environ["NUMBA_CACHE_DIR"] = str(directory)
    if "numba" in sys.modules:
        sys.modules["numba"].config.CACHE_DIR = str(directory)


def sources() -> str:
    """A hash of all files that functions are compiled from."""
    root, found = Path(__file__).parents[2], sha256()
    for room in ROOMS:
        for file in sorted((root / room).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()


def _directory() -> Path:
    directory = cache_dir() / "compiled" / sources()[:16]
    if not directory.exists():
        with suppress(OSError):
            directory.mkdir(parents=True)
            for other in directory.parent.iterdir():
                if other.stat().st_mtime < time.time() - KEPT_S:
                    shutil.rmtree(other, ignore_errors=True)
    return directory
