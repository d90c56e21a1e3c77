"""Keep every finished run of a search in a file, from which the search can go on."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from xgpt.core.errors import InputError, MachineError, reason_of
from xgpt.core.io import cache_dir, make_parents
from xgpt.core.schema.tuning import TuneJournal, TuneRun


class Journal:
    """The file of a search: a `TuneJournal`, and a `TuneRun` on each further line.

    Args:
        path: the file. None means that runs are kept only in memory.
        resume: whether to go on with the file's runs. Otherwise the file must not exist.

    Raises:
        InputError: the file exists and `resume` is not set, or it is of another search.
    """

    def __init__(self, path: Path | None, search: TuneJournal, *, resume: bool) -> None:
        self._path, self.runs = path, list[TuneRun]()
        if path is None:
            return
        if path.exists():
            if not resume:
                accepted = "it exists already: give `resume` to go on with its runs, or another file"
                raise InputError("journal", str(path), accepted)
            self.runs = _runs_in(path, search)
            return
        if resume:
            raise InputError("journal", str(path), "there is no such file to go on with; leave `resume` out")
        self._append(search.model_dump_json())

    def add(self, run: TuneRun) -> None:
        self.runs.append(run)
        if self._path is not None:
            self._append(run.model_dump_json())

    def _append(self, line: str) -> None:
        assert self._path is not None
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise MachineError(f"{self._path} cannot be written: {reason_of(error)}") from None


def _runs_in(path: Path, search: TuneJournal) -> list[TuneRun]:
    try:
        first, *rest = path.read_text(encoding="utf-8").splitlines()
        kept = TuneJournal.model_validate_json(first)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("journal", str(path), f"it cannot be read: {reason_of(error)}") from None
    except (ValueError, ValidationError):
        raise InputError("journal", str(path), "it is no journal of `xgpt tune`: give another file") from None
    if kept.sha256 != search.sha256:
        accepted = f"it is of another search ({kept.problem}; now {search.problem}): give that problem, or another file"
        raise InputError("journal", str(path), accepted)
    runs = []
    for number, line in enumerate(rest, 2):
        try:
            runs.append(TuneRun.model_validate_json(line))
        except ValidationError:
            if number == len(rest) + 1:  # the last line was cut off when the process was killed
                continue
            raise InputError("journal", str(path), f"line {number} is no run: remove it") from None
    return runs


@contextmanager
def alone() -> Iterator[None]:
    """Hold the lock of this machine's searches: two of them would disturb each other's measurements."""
    path = cache_dir() / "tune.lock"
    make_parents(path)
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise MachineError(
                f"another `xgpt tune` measures on this machine (process {file.read().strip() or 'unknown'}), and two "
                "would disturb each other: wait until it has ended"
            ) from None
        file.truncate(0)
        file.write(json.dumps(os.getpid()))
        file.flush()
        yield
