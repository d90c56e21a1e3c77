"""Write a command's output files, each completely or not at all, and never over a user's file.

A command may replace a file only if xgpt wrote the file and nothing has changed it since. A plan.json shows this by
itself (`Plan.is_as_written`). For each other file, the cache directory has a record: the SHA-256 of its bytes, under a
hash of its path. A file without a record, or with other bytes, counts as the user's.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from xgpt.core.errors import InputError, MachineError, reason_of
from xgpt.core.io import cache_dir, dump_json, make_parents, write_atomic
from xgpt.core.schema.plan import Plan
from xgpt.core.schema.step_log import StepRecord


class OutputFile:
    """A file that a command will write.

    Args:
        force: whether to overwrite the user's files and files that the command reads.
        inputs: paths that the command reads. Paths that are not files are ignored.
    """

    def __init__(self, path: Path, field: str = "output", *, force: bool = False, inputs: Iterable[str] = ()) -> None:
        self.path = path
        self._field, self._force, self._inputs = field, force, tuple(inputs)

    def check(self, text: str | None = None) -> None:
        """Check that the file can be written and is not the user's. Call this before long work.

        Args:
            text: the text to write, if known. A file with exactly this text may be replaced.

        Raises:
            InputError: the same command reads the file, xgpt did not write it, or it was changed since.
            MachineError: the file cannot be written.
        """
        check_writable(self.path)
        if self._force or not self.path.is_file():
            return
        if text is not None and self.path.read_bytes() == text.encode():
            return
        way_out = "give another file, or `force` to overwrite it"
        if any(_is_same(self.path, Path(given)) for given in self._inputs):
            raise InputError(self._field, str(self.path), f"this command reads that file; {way_out}")
        if not (is_recorded(self.path) or is_own_plan(self.path)):
            reason = "xgpt did not write that file, or it was changed since"
            raise InputError(self._field, str(self.path), f"{reason}; {way_out}")

    def write(self, text: str) -> None:
        """Write the text to the file, completely or not at all.

        Raises:
            InputError: see `check`. The file may have appeared after the last check.
            MachineError: the file cannot be written.
        """
        self.check(text)
        if self.path.exists() and not self.path.is_file():  # a pipe or a device
            try:
                self.path.write_text(text, encoding="utf-8")
            except OSError as error:
                raise MachineError(f"cannot write {self.path}: {reason_of(error)}; give another file") from None
            return
        target = self.path.resolve()
        if self._force or target.exists():
            write_atomic(target, text)
        else:
            self._create(target, text)
        record(target)

    def _create(self, target: Path, text: str) -> None:
        """Write a new file. On file systems with hard links, this never replaces a file that has just appeared."""
        try:
            make_parents(target)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as directory:
                whole = Path(directory) / target.name
                whole.write_text(text, encoding="utf-8")
                try:
                    os.link(whole, target)
                except FileExistsError:
                    reason = "that file appeared while this command ran; give another file"
                    raise InputError(self._field, str(self.path), reason) from None
                except OSError:
                    os.replace(whole, target)
        except OSError as error:
            raise MachineError(f"cannot write {self.path}: {reason_of(error)}; give another file") from None


def check_step_log(path: Path, *, force: bool = False) -> None:
    """Check that a step log would not replace another kind of file.

    A log has no record, since it grows until its server ends, perhaps by a signal.
    """
    check_writable(path)
    if force or not path.is_file():
        return
    try:
        with path.open("rb") as file:
            line = file.readline()
        if line:
            msgspec.json.decode(line, type=StepRecord)
    except OSError as error:
        raise MachineError(f"cannot read {path}: {reason_of(error)}; give another file") from None
    except msgspec.DecodeError:
        reason = "that file is not a step log; give another file, or `force` to overwrite it"
        raise InputError("step_log", str(path), reason) from None


def record(path: Path) -> None:
    """Record that xgpt wrote the file as it is now. If the cache cannot be written, the file counts as the user's."""
    with suppress(OSError, MachineError):
        write_atomic(_record_of(path), _digest(path) + "\n")


def is_recorded(path: Path) -> bool:
    try:
        return _record_of(path).read_text().strip() == _digest(path)
    except OSError:
        return False


def is_own_plan(path: Path) -> bool:
    """Return whether a file is a plan.json that nobody has edited since xgpt wrote it, in any cache or container."""
    try:
        text = path.read_text(encoding="utf-8")
        plan = Plan.model_validate_json(text)
    except (OSError, ValueError):
        return False
    return plan.is_as_written and dump_json(plan) == text


def check_writable(path: Path) -> None:
    """Raise MachineError if a file cannot be written. Call this before long work."""
    place = next((parent for parent in path.absolute().parents if parent.exists()), Path("/"))
    if path.is_dir():
        reason = "it is a directory"
    elif not place.is_dir():
        reason = f"{place} is not a directory"
    elif path.exists() and not path.is_file():  # a pipe or a device
        reason = "" if os.access(path, os.W_OK) else "Permission denied"
    else:
        reason = _why_not_writable(place)
    if not reason:
        return
    raise MachineError(f"cannot write {path}: {reason}; give another file")


def _why_not_writable(directory: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return reason_of(error)


def _record_of(path: Path) -> Path:
    return cache_dir() / "written" / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except (OSError, ValueError):  # the file does not exist, or the text cannot be a path
        return False
