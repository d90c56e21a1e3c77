"""Find configs by name or path, read JSON and YAML as schema types, and write JSON, step logs and text files."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import select
import stat
import tempfile
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from xgpt.core.documents import Excess, read_json, read_yaml
from xgpt.core.errors import InputError, MachineError, XgptError, nearest_names, reason_of
from xgpt.core.refusals import refusal
from xgpt.core.schema.step_log import StepRecord

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=BaseModel)
LARGEST = 4e18
"""Largest number that a file may contain. With this limit, sums and products of numbers stay finite and fit into 64
bits.
"""
ConfigKind = Literal["models", "devices", "clusters", "engines", "workloads"]


def configs_dir() -> Path:
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "xgpt"


def config_names(kind: ConfigKind) -> list[str]:
    return sorted(path.stem for path in (configs_dir() / kind).glob("*.yaml"))


FILES = (".yaml", ".yml", ".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".txt", ".log", ".prom", ".gz", ".xlsx")


OF_PAPERS = ("gpt3-", "opt-", "t5-", "tcb-")
"""Beginnings of names of models that papers measure. Lists show them apart."""


def find_config(kind: ConfigKind, name: str, field: str | None = None) -> Path:
    """Return the path of a config. `name` is a shipped config's name, or a path.

    Args:
        field: name of the argument, for errors. None means the singular of `kind`.

    Raises:
        InputError: there is neither a shipped config nor a file of this name. The message suggests names.
    """
    shipped = configs_dir() / kind / f"{name}.yaml"
    if "/" not in name and shipped.is_file():
        return shipped
    path = Path(name)
    if path.exists():
        return path
    field = field or kind.removesuffix("s")
    if path.suffix in FILES or path.name != name:
        raise InputError(field, name, "there is no such file or directory; check the path")
    names = config_names(kind)
    near = nearest_names(name, names)
    known = f"one of the {len(names)} shipped names" if near else _listed(names)
    hint = f"did you mean {' or '.join(near)}? Otherwise " if near else ""
    raise InputError(field, name, f"{hint}give a path or {known}")


def _listed(names: list[str]) -> str:
    of_papers = [name for name in names if name.startswith(OF_PAPERS)]
    usual = f"one of {', '.join(name for name in names if name not in of_papers)}"
    return f"{usual}; of papers: {', '.join(of_papers)}" if of_papers else usual


def parse(data: Any, type_: type[T], field: str) -> T:
    """Return `data`, validated as `type_`. Errors call the data `field`.

    Raises:
        InputError: `data` is not valid. The message states the first mistake, in one line.
    """
    try:
        return type_.model_validate(data)
    except ValidationError as error:
        raise refusal(error, type_, data, field) from None


def load_cluster_yaml(path: Path) -> Any:
    """Return a cluster's document. If the document names a device, the name is replaced by the device's document. A
    path to it counts from the cluster's file.

    Raises:
        InputError: a file is missing, unreadable or not YAML, or there is no such device.
    """
    data = load_yaml(path, "cluster")
    if isinstance(data, dict) and isinstance(data.get("device"), str):
        beside = path.parent / data["device"]
        found = find_config("devices", str(beside) if beside.is_file() else data["device"])
        data["device"] = load_yaml(found, "device")
    return data


MOST_BYTES = 1 << 28
PIPE_S = 10.0
"""Seconds within which something must begin to write to a pipe that is read."""


def open_input(path: Path) -> BinaryIO:
    """Open a file of the user's for reading. A pipe to which nothing is written does not block the command.

    Raises:
        OSError: the file cannot be opened.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISFIFO(os.fstat(number).st_mode) and not select.select([number], [], [], PIPE_S)[0]:
            raise OSError(f"nothing was written to this pipe within {PIPE_S:g} s")
        os.set_blocking(number, True)
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_text(path: Path, field: str) -> str:
    """Return the text of a file of settings.

    Raises:
        InputError: the file is missing, unreadable, no text, or too large.
    """
    try:
        with open_input(path) as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise InputError(field, str(path), f"it has over {MOST_BYTES >> 20} MiB; give another file")
        return data.decode("utf-8").replace("\r\n", "\n")
    except FileNotFoundError:
        raise InputError(field, str(path), "there is no such file; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(field, str(path), f"it cannot be read: {reason_of(error)}; give another file") from None


def load_yaml(path: Path, field: str) -> Any:
    try:
        documents = deepcopy(_documents(read_text(path, field)))
    except Excess as error:
        raise InputError(field, str(path), f"{error}; give a smaller, flat file") from None
    except ValueError as error:
        raise InputError(field, str(path), f"it is not YAML: {error}; correct the file") from None
    if documents in ([], [None]):
        raise InputError(field, str(path), "it is empty; give a file with content")
    if len(documents) > 1:
        raise InputError(field, str(path), f"it has {len(documents)} documents; give a file with one")
    return documents[0]


_documents = lru_cache(maxsize=256)(read_yaml)  # a search reads the same few files again and again


FIELDS_OF_FILES = {
    "plan": {"policy", "stages"},
    "fleet": {"kinds", "intervals"},
    "profile": {"layers", "spread"},
    "tune": {"runs", "most_per_s"},
    "model's config": {"model_type"},
}
"""Fields by which files are told apart. `xgpt NAME` writes all but the last."""


def load_json(path: Path, type_: type[T], field: str) -> T:
    """Return the content of one of xgpt's JSON files. Errors call the file's content `field`.

    Raises:
        InputError: the file is missing, not JSON, of another kind or schema version, or invalid.
    """

    def number(text: str) -> float:
        value = float(text) if set(text) & set(".eE") else int(text)
        if abs(value) > LARGEST:
            raise InputError(field, text, f"numbers in this file may be at most {LARGEST:.0e}")
        return value

    try:
        data = read_json(read_text(path, field), number)
    except ValueError as error:
        says = (
            "it is empty"
            if isinstance(error, json.JSONDecodeError) and not error.doc.strip()
            else f"it is not JSON: {error}"
        )
        wrote = f"; give a file that `xgpt {field}` wrote" if field in FIELDS_OF_FILES else ""
        raise InputError(field, str(path), says + wrote) from None
    if not isinstance(data, dict):
        raise InputError(field, str(path), "it must contain a JSON object")
    for kind, fields in FIELDS_OF_FILES.items():
        if kind != field and field in FIELDS_OF_FILES and fields <= data.keys():
            raise InputError(field, str(path), f"it is a {kind}; give a file that `xgpt {field}` wrote")
    if "schema_version" not in data and isinstance(data.get(field), dict):
        raise InputError(field, str(path), f"it has a {field} in its field `{field}`: save this field in a file")
    expected = type_.model_fields["schema_version"].default
    if data.get("schema_version") != expected:
        raise InputError(
            f"{field}.schema_version",
            data.get("schema_version"),
            f"this version of xgpt reads files of version {expected}; give such a file, or make {path} again",
        )
    return parse(data, type_, field)


def dump_json(value: BaseModel) -> str:
    """Return the JSON text of a value, after checking that it can be read back.

    Raises:
        XgptError: the value is not valid, which `Frozen.but` does not check. The message names the wrong field.
    """
    text = value.model_dump_json(indent=1) + "\n"
    try:
        type(value).model_validate_json(text)
    except ValidationError as error:
        field = type(value).__name__.lower()
        raise XgptError(f"the file was not written: {refusal(error, type(value), json.loads(text), field)}") from None
    return text


def sha256(value: BaseModel) -> str:
    """Return the SHA-256 of a value's content, which does not depend on a file's formatting."""
    return hashlib.sha256(value.model_dump_json().encode()).hexdigest()


def file_sha256(path: Path) -> str | None:
    """Return the `sha256` of the value in a JSON file, or None if the file cannot be read.

    The file may be from any version of xgpt. In a version with other fields, the same value has another hash.
    """
    try:
        return hashlib.sha256(to_json(read_json(path.read_bytes()))).hexdigest()
    except (OSError, ValueError):
        return None


def make_parents(path: Path) -> None:
    """Make the directories above a file; `Path.mkdir(parents=True)` calls itself for each, too deep for 1,000."""
    for parent in reversed(path.parents):
        if not parent.is_dir():
            parent.mkdir(exist_ok=True)


def write_atomic(path: Path, text: str) -> None:
    """Write a text to a file atomically: at any time the file has all of the text or its old content.

    Raises:
        MachineError: the file cannot be written.
    """
    try:
        make_parents(path)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise MachineError(f"cannot write {path}: {reason_of(error)}; give another place") from None


class StepLogWriter:
    """Writes the engine's steps to a file, one JSON line each, for `xsimulator.measures` and for replays.

    If a line cannot be written, for example because the disk is full, the log ends there, and the engine continues. The
    file stays locked until `close`, so that no other server writes to it.

    Attributes:
        num_lost: number of steps that were not written, or may not have been since the last flush.
    """

    def __init__(self, path: Path) -> None:
        try:
            make_parents(path)
            self._file = path.open("ab")
            if path.is_file():  # not a pipe or a device
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._file.truncate(0)
        except BlockingIOError:
            self._file.close()
            raise MachineError(f"cannot write {path}: another server writes it; give another file") from None
        except OSError as error:
            raise MachineError(f"cannot write {path}: {reason_of(error)}; give another file") from None
        self._path = path
        self._encode = msgspec.json.Encoder().encode
        self.num_lost = self._num_unflushed = 0

    def __call__(self, record: StepRecord) -> None:
        if self.num_lost:
            self.num_lost += 1
            return
        try:
            self._num_unflushed += 1
            self._file.write(self._encode(record) + b"\n")
        except OSError as error:
            self._end(error)

    def flush(self) -> None:
        if not self.num_lost:
            try:
                self._file.flush()
                self._num_unflushed = 0
            except OSError as error:
                self._end(error)

    def close(self) -> None:
        self.flush()
        with suppress(OSError):  # data that could not be written before cannot be written now either
            self._file.close()

    def _end(self, error: OSError) -> None:
        self.num_lost = self._num_unflushed
        logger.warning("the step log %s is no longer written: %s", self._path, reason_of(error))


def read_step_log(path: Path) -> list[StepRecord]:
    """Return the steps of a log. A killed engine leaves an incomplete last line, which is ignored."""
    decode = msgspec.json.Decoder(StepRecord).decode
    lines = path.read_bytes().split(b"\n")
    return [decode(line) for line in lines[:-1]]
