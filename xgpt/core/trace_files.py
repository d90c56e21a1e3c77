"""Read the lines of a trace, which may come from anyone: with or without gzip, within limits on lines and bytes."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Generator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Literal

from xgpt.core.errors import InputError, reason_of
from xgpt.core.io import configs_dir, load_yaml, open_input, parse
from xgpt.core.schema.base import Frozen

MOST_LINES = 3_000_000
MOST_LINE_BYTES = 16 << 20
MOST_BYTES = 8 << 30
MOST_MEMORY = 700_000_000
PER_BRACKET, PER_VALUE = 72, 40

Role = Literal["input", "output", "timestamp", "status", "session", "id", "parent", "delay", "end"]
Unit = Literal["s", "ms", "us", "ns"]


class TraceFormat(Frozen):
    name: str
    fields: frozenset[str]
    unit: Unit
    is_whole: bool = False
    block_size: int | None = None


class TraceNames(Frozen):
    roles: dict[Role, tuple[str, ...]]
    parts: dict[str, tuple[str, ...]]
    units: dict[str, Unit]
    formats: tuple[TraceFormat, ...]
    conversations: tuple[str, ...]
    answering: tuple[str, ...]
    lists: tuple[str, ...]
    histograms: dict[str, tuple[str, ...]]


@cache
def names() -> TraceNames:
    return parse(load_yaml(configs_dir() / "traces.yaml", "traces"), TraceNames, "traces")


def lines_of(path: Path, field: str, longest: int = MOST_LINE_BYTES) -> Generator[str]:
    """Yield the lines of a file. A file whose name ends in .gz is decompressed. Close the generator to close the file.

    Args:
        longest: largest number of bytes of a line.

    Raises:
        InputError: the file cannot be read, is not text, or exceeds a limit.
    """
    number = num_bytes = 0
    try:
        with open_input(path) as plain, gzip.open(plain) if path.suffix == ".gz" else plain as file:
            while line := file.readline(longest + 1):
                number, num_bytes = number + 1, num_bytes + len(line)
                if len(line) > longest:
                    accepted = f"a line may have at most {longest:,} bytes"
                    raise InputError(f"{path}, line {number}", f"more than {longest:,} bytes", accepted)
                if number > MOST_LINES or num_bytes > MOST_BYTES:
                    limit = f"{MOST_LINES:,} lines" if number > MOST_LINES else f"{MOST_BYTES:,} bytes"
                    raise InputError(field, str(path), f"it has more than {limit}: give a part of it")
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError(field, str(path), "it is not a complete gzip file: fetch or compress it again") from None
    except UnicodeDecodeError as error:
        raise InputError(field, str(path), f"it cannot be read: {reason_of(error)}; save it as UTF-8") from None
    except OSError as error:
        raise InputError(field, str(path), f"it cannot be read: {reason_of(error)}; give another file") from None


def text_of(path: Path, field: str) -> str:
    """Return the text of a file, which must be small enough to be one JSON document."""
    parts, size = [], 0
    with closing(lines_of(path, field, MOST_MEMORY // 3)) as lines:
        for line in lines:
            parts.append(line)
            size += memory_of(line)
            check_memory(size, path, field)
    return "".join(parts)


def memory_of(text: str) -> int:
    return 3 * len(text) + PER_BRACKET * (text.count("[") + text.count("{")) + PER_VALUE * text.count(",")


def check_memory(size: int, path: Path, field: str) -> None:
    if size > MOST_MEMORY:
        accepted = "it is too large for one document: give one request on each line, or a part of it"
        raise InputError(field, str(path), accepted)


def head_of(path: Path, field: str, least: int = 300) -> str:
    """Return the beginning of a file, from its first character that is no white space: lines of at least `least`
    characters, if it has so many.
    """
    head = ""
    with closing(lines_of(path, field, MOST_MEMORY // 3)) as lines:
        for line in lines:
            head = (head + line).lstrip()
            if len(head) >= least:
                break
    return head
