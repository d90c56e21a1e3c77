"""Read the rows of a trace as many tools write them: CSV, JSON or JSON lines, with or without gzip.

configs/traces.yaml has all known names of columns with lengths and times. A file's format is identified by its names.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from xgpt.core.documents import read_json
from xgpt.core.errors import InputError, cut, similar
from xgpt.core.trace_files import MOST_LINE_BYTES, Role, check_memory, head_of, lines_of, memory_of, names, text_of
from xgpt.core.trace_steps import is_step, requests_of

DELIMITERS = ",;\t|"
CHARACTERS = 4
"""Mean number of characters in a token, for files that have text but no token counts."""
MOST_COLUMNS = 4096
MOST_SPANS = 400_000
_METRIC = re.compile(r"^(# (HELP|TYPE) |[a-zA-Z_:][a-zA-Z0-9_:]*(\{[^}]*\})? [-+0-9])")


class Row(NamedTuple):
    """A request, with the values in its file.

    Attributes:
        has_failed: whether the HTTP status is an error (400 to 599).
        fields: all fields, if the row is a JSON object. In CSV, only the names are known.
    """

    where: str
    input: object
    output: object
    timestamp: object
    has_failed: bool = False
    fields: Mapping[str, object] = MappingProxyType({})
    time_name: str = ""
    turn: Mapping[Role, object] = MappingProxyType({})
    delay_name: str = ""


OF_TURNS: tuple[Role, ...] = ("session", "id", "parent", "delay", "end")


class TraceRows(NamedTuple):
    rows: Iterable[Row]
    notes: list[str]


@cache
def _roles() -> dict[str, tuple[Role, int]]:
    return {name: (role, i) for role, all_ in names().roles.items() for i, name in enumerate(all_)}


@lru_cache(maxsize=MOST_COLUMNS)
def plain(name: str) -> str:
    """Return a name in the spelling of configs/traces.yaml, such as request_tokens for "Request tokens"."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")


def read_rows(path: Path, field: str, opened: ExitStack) -> TraceRows:
    """Return the requests of a trace, after identifying its format.

    Raises:
        InputError: the trace is in no known format. The message names the file, and the line if possible. Also raised
            while rows are read.
    """
    head = head_of(path, field)
    first = head.splitlines()[0] if head else ""
    if is_metrics(head):
        accepted = "it has histograms, not requests: give it as `workload` of `xgpt plan`"
        raise InputError(field, str(path), accepted)
    if path.with_suffix("" if path.suffix == ".gz" else path.suffix).suffix in (".json", ".jsonl", ".ndjson") or (
        first[:1] == "{"
    ):
        try:
            found = _json_rows(path, field, first, opened)
        except (KeyError, TypeError, AttributeError):
            raise _unknown(path, field) from None
        return found._replace(rows=_known(path, field, found.rows))
    return _csv_rows(path, field, first, opened)


def _known(path: Path, field: str, rows: Iterable[Row]) -> Iterator[Row]:
    try:
        yield from rows
    except (KeyError, TypeError, AttributeError):
        raise _unknown(path, field) from None


def _unknown(path: Path, field: str) -> InputError:
    return InputError(field, str(path), "xgpt does not know its format: give CSV with the header input,output")


def is_metrics(text: str) -> bool:
    return bool(_METRIC.match(text)) or (text[:1] == "{" and '"resultType"' in text[:300])


# --- CSV


def _csv_rows(path: Path, field: str, first: str, opened: ExitStack) -> TraceRows:
    if (count := max(first.count(mark) for mark in DELIMITERS) + 1) > MOST_COLUMNS:
        raise InputError(f"{path}, header", f"{count} columns", f"a trace may have at most {MOST_COLUMNS} columns")
    delimiter = max(DELIMITERS, key=lambda mark: (len(_columns(first.split(mark))), first.count(mark)))
    reader = csv.reader(opened.enter_context(closing(lines_of(path, field))), delimiter=delimiter)
    header: list[str] | None = None
    for cells in _read(str(path), reader):
        if any(cell.strip() for cell in cells):
            header = cells
            break
    if header is None:
        return TraceRows((), [])
    columns = _columns(header)
    needed: tuple[Role, ...] = ("input", "output")
    if missing := [role for role in needed if role not in columns]:
        known = names().roles[missing[0]]
        unknown = [cell.strip() for cell in header if plain(cell) not in _roles() and "char" not in plain(cell)][:64]
        near = next(((cell, name) for cell in unknown if (name := similar(plain(cell), known))), None)
        hint = "" if near is None else f"; if {cut(near[0], 40)!r} is that column, call it {near[1]}"
        accepted = f"xgpt finds no column with the {missing[0]} length: call it {known[0]} or {known[3]}{hint}"
        raise InputError(f"{path}, line {reader.line_num}", cut(delimiter.join(header)), accepted)
    return TraceRows(_cells(str(path), reader, columns, header, delimiter), [])


def _columns(header: list[str]) -> dict[Role, int]:
    known_roles, found = _roles(), dict[Role, tuple[int, int]]()
    for position, cell in enumerate(header):
        if (known := known_roles.get(plain(cell))) is not None and (
            known[1] < found.get(known[0], (len(known_roles), 0))[0]
        ):
            found[known[0]] = known[1], position
    return {role: position for role, (_, position) in found.items()}


def _cells(path: str, reader: Any, columns: dict[Role, int], header: list[str], delimiter: str) -> Iterator[Row]:
    width, fields = len(header), MappingProxyType(dict.fromkeys(map(plain, header)))
    input_, output, timestamp, status = (columns.get(role, -1) for role in ("input", "output", "timestamp", "status"))
    time_name = header[timestamp].strip() if timestamp >= 0 else ""
    of_turns = (
        {role: columns[role] for role in OF_TURNS if role in columns} if {"session", "parent"} & set(columns) else {}
    )
    delay_name = header[of_turns["delay"]].strip() if "delay" in of_turns else ""
    places = {name: position for position, name in enumerate(map(plain, header))}
    parts_of = (names().parts.get(plain(header[at]), ()) for at in (input_, output))
    beside = [(i, found) for i, parts in enumerate(parts_of) if (found := [places[p] for p in parts if p in places])]
    for cells in _read(path, reader):
        if len(cells) != width:
            if not any(cell.strip() for cell in cells):
                continue
            accepted = f"this row has {len(cells)} cells, but the header names {width} columns"
            raise InputError(f"{path}, line {reader.line_num}", cut(delimiter.join(cells)), accepted)
        if delimiter == ";":  # such files have a decimal comma
            cells = [re.sub(r"^(-?\d+),(\d+)$", r"\1.\2", cell.strip()) for cell in cells]
        time = cells[timestamp].strip() or None if timestamp >= 0 else None
        failed = status >= 0 and _is_error(cells[status].strip())
        lengths: list[object] = [cells[input_].strip(), cells[output].strip()]
        for i, parts in beside:
            lengths[i] = _with_parts(lengths[i], [cells[part].strip() for part in parts])
        turn = {role: text for role, at in of_turns.items() if (text := cells[at].strip())}
        yield Row(
            f"{path}, line {reader.line_num}", lengths[0], lengths[1], time, failed, fields, time_name, turn, delay_name
        )


def _read(path: str, reader: Any) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}", str(error), "it must be CSV: correct this line") from None


# --- JSON


def _json_rows(path: Path, field: str, first: str, opened: ExitStack) -> TraceRows:
    if is_step(first):
        numbered = enumerate(requests_of(path), start=1)
        return TraceRows((_row(f"{path}, request {i}", row) for i, row in numbered), [])
    documents = _documents(path, field, first, opened)
    try:
        where, document = next(documents)
    except StopIteration:
        return TraceRows((), [])
    if isinstance(document, list):
        documents = ((f"{path}, entry {i}", each) for i, each in enumerate(document, start=1))
        if (one := next(documents, None)) is None:
            return TraceRows((), [])
        where, document = one
    documents = chain([(where, document)], documents)
    if isinstance(document, dict):
        if "resourceSpans" in document:
            return _spans(path, documents)
        if (key := next((key for key in names().conversations if isinstance(document.get(key), list)), None)) and (
            "usage" not in document
        ):
            note = f"the file has text but no token counts: {CHARACTERS} characters are counted as one token"
            return TraceRows(
                _answers(documents, key), [note, "each answer is a request whose prompt is all previous turns"]
            )
    return TraceRows((_row(*entry) for where, document in documents for entry in _entries(where, document)), [])


def _documents(path: Path, field: str, first: str, opened: ExitStack) -> Iterator[tuple[str, Any]]:
    if not first:
        return
    check_memory(memory_of(first), path, field)
    try:
        read_json(first)
    except ValueError as error:
        with_where = f"{path}, line 1"
        try:
            yield with_where, read_json(text_of(path, field))
        except ValueError:
            raise InputError(with_where, cut(first, 80), f"it must be a JSON object: {error}") from None
        return
    longest = max(4 * len(first) + 4, MOST_LINE_BYTES)  # a file may be one long line
    lines = opened.enter_context(closing(lines_of(path, field, longest)))
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                document = read_json(line)
            except ValueError as error:
                raise InputError(where, cut(line.strip(), 80), f"it must be a JSON object: {error}") from None
            yield where, document


def _entries(where: str, document: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(document, dict):
        raise InputError(where, cut(str(document), 80), "it must be a JSON object")
    lists = {name: entries for name, entries in document.items() if isinstance(entries, list)}
    if "benchmarks" in lists:  # GuideLLM's, which states what is left out in lists of its own
        for number, benchmark in enumerate(lists["benchmarks"], start=1):
            for i, each in enumerate(benchmark["requests"]["successful"], start=1):
                yield f"{where}, benchmark {number}, request {i}", each
    elif "input_lens" in lists:  # vLLM's and SGLang's benchmarks
        keys = [name for name in ("input_lens", "output_lens", "start_times") if name in lists]
        if any(len(lists[name]) != len(lists["input_lens"]) for name in keys):
            raise InputError(where, ", ".join(keys), "these lists must have equal lengths, one value for each request")
        for i in range(len(lists["input_lens"])):
            yield f"{where}, request {i + 1}", {name: lists[name][i] for name in keys}
    elif document.get("object") == "page" or "num_model_requests" in document:
        accepted = "these are totals over many requests: give a log with one request in each row"
        raise InputError(where, "usage buckets", accepted)
    elif (inner := next((name for name in names().lists if name in lists), None)) and all(
        isinstance(each, dict) for each in lists[inner]
    ):
        known = ("arrival_time_ns", *names().roles["session"])
        begin = {key: value for key, value in document.items() if plain(key) in known}  # of a session's requests
        for i, each in enumerate(lists[inner], start=1):
            yield from _entries(f"{where}, {inner} {i}", begin | each)
    else:
        yield where, document


def _row(where: str, entry: Mapping[str, Any]) -> Row:
    found: dict[Role, tuple[int, str, object]] = {}
    others: dict[str, object] = {}
    for name, value in _fields(entry):
        known = _roles().get(plain(name))
        if known is None or isinstance(value, dict | list):
            others[plain(name)] = value
            continue
        role, rank = known
        if isinstance(value, str):
            if not _is_value(role, value):
                continue  # a text named "input" is not a length
            if role in ("input", "output"):
                rank += len(_roles())  # numbers count before texts: an answer named "output" may be the text "4"
        if role not in found or rank < found[role][0]:
            found[role] = rank, name, value
    has_failed = bool(entry.get("error")) or bool(entry.get("was_cancelled"))
    if "output" not in found and has_failed:
        found["output"] = 0, "output", 0
    for role in ("input", "output"):
        if role not in found:
            called = next((name for name in names().roles[role] if name in entry), None)
            if called is not None:
                raise InputError(f"{where}, {role}", entry[called], "give its number of tokens")
            raise InputError(where, cut(json.dumps(entry), 80), f"it has no {role} length: name it {role}_length")
    input_, output = (
        _with_parts(value, [others.get(part) for part in names().parts.get(plain(name), ())])
        for _, name, value in (found["input"], found["output"])
    )
    time = found.get("timestamp")
    is_error = "status" in found and _is_error(found["status"][2])
    at = (None, "") if time is None else (time[2], time[1])
    turn = {role: found[role][2] for role in OF_TURNS if role in found}
    delay_name = found["delay"][1] if "delay" in found else ""
    if not {"session", "parent"} & turn.keys():
        turn = {}
    return Row(where, input_, output, at[0], is_error, entry, at[1], turn, delay_name)


def _with_parts(value: object, parts: list[object]) -> object:
    """Return a count with those added that belong to it. Anything but whole numbers is left for `_length` to refuse."""
    if not parts or not re.fullmatch(r"\d{1,10}", str(value)):
        return value
    return int(str(value)) + sum(int(str(part)) for part in parts if re.fullmatch(r"\d{1,10}", str(part)))


def _is_error(status: object) -> bool:
    return bool(re.fullmatch(r"[45]\d\d(\.0)?", str(status)))


def _is_value(role: Role, text: str) -> bool:
    return role in ("timestamp", "session", "id", "parent", "end") or bool(re.fullmatch(r"\s*-?\d+(\.\d+)?\s*", text))


def _fields(entry: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of fields at any depth, outer objects first. An object with a `value` counts as this
    value.
    """
    level: list[Mapping[str, Any]] = [entry]
    while level:
        inner: list[Mapping[str, Any]] = []
        for one in level:
            for name, value in one.items():
                if isinstance(value, dict) and "value" in value:
                    yield name, value["value"]
                elif isinstance(value, dict):
                    inner.append(value)
                elif name == "attributes" and isinstance(value, list):
                    inner.append(
                        {attribute["key"]: next(iter(attribute["value"].values()), None) for attribute in value}
                    )
                else:
                    yield name, value
        level = inner


def _spans(path: Path, documents: Iterator[tuple[str, Any]]) -> TraceRows:
    """Return the spans that are requests: those with token counts whose parent span has none."""
    rows, count, known = {}, 0, names().roles
    for where, document in documents:
        for resource in document["resourceSpans"]:
            for scope in resource.get("scopeSpans", resource.get("instrumentationLibrarySpans", [])):
                for span in scope.get("spans", []):
                    count += 1
                    found = {plain(name) for name, _ in _fields(span)}
                    if all(found & set(known[role]) for role in ("input", "output")):
                        id_ = str(span.get("spanId", f"{where}, {count}"))
                        row = _row(f"{where}, span {span.get('spanId', '')}", span)._replace(fields={})
                        rows[id_] = row._replace(time_name="startTimeUnixNano"), str(span.get("parentSpanId", ""))
                    if len(rows) > MOST_SPANS:
                        raise InputError(str(path), f"{count:,} spans", f"give at most {MOST_SPANS:,} of requests")
    chosen = [row for row, parent in rows.values() if parent not in rows]
    others = count - len(chosen)
    note = f"{others} of {count} spans are left out: they are not requests, or are only parts of requests"
    return TraceRows(chosen, [note] if others else [])


def _answers(documents: Iterator[tuple[str, Any]], key: str) -> Iterator[Row]:
    answering = names().answering
    for where, document in documents:
        said = 0
        for turn in document[key]:
            length = len(str(turn.get("value", turn.get("content", ""))))
            if turn.get("from", turn.get("role")) in answering and said:
                lengths = max(1, round(said / CHARACTERS)), round(length / CHARACTERS)
                yield Row(where, *lengths, None, turn={"session": where})
            said += length
