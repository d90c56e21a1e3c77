"""Read the rows of a trace as many tools write them: CSV, JSON or JSON lines, with or without gzip.

The table `NAMES` has all known names of columns with lengths and times. A file's format is identified by its names.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from xgpt.core.errors import InputError, reason_of, similar

Role = Literal["input", "output", "timestamp", "status"]

NAMES: dict[Role, tuple[str, ...]] = {
    "input": (
        "input", "input_length", "input_tokens", "prompt_tokens",  # ours, Mooncake, OpenAI
        "context_tokens", "contexttokens",  # Azure
        "request_tokens", "num_prefill_tokens",  # BurstGPT, Vidur
        "input_sequence_length", "isl", "input_len", "input_lens",  # AIPerf, vLLM
        "prompt_len", "prompt_length", "num_prompt_tokens", "prompt_token_count", "num_input_tokens",
        "gen_ai_usage_input_tokens", "gen_ai_usage_prompt_tokens", "llm_usage_prompt_tokens",  # OpenTelemetry
        "llm_token_count_prompt", "error_isl",
    ),
    "output": (
        "output", "output_length", "output_tokens", "completion_tokens", "generated_tokens", "generatedtokens",
        "response_tokens", "num_decode_tokens", "output_sequence_length", "osl", "output_token_count", "output_len",
        "output_lens", "completion_len", "completion_length", "response_length", "num_generation_tokens",
        "generation_tokens", "num_output_tokens", "completion_token_count",
        "gen_ai_usage_output_tokens", "gen_ai_usage_completion_tokens", "llm_usage_completion_tokens",
        "llm_token_count_completion",
    ),
    "timestamp": (
        "timestamp", "timestamp_s", "timestamp_ms", "timestamp_us", "timestamp_ns", "arrival_time", "arrival_time_s",
        "arrival_time_ms", "arrived_at", "arrival", "arrival_s", "arrival_ms", "request_start_ns",
        "start_time_unix_nano", "starttimeunixnano", "start_time", "start_times", "start_time_s", "start_time_ms",
        "created", "created_at", "time", "time_s", "time_ms", "datetime", "date", "ts", "time_iso8601", "msec",
        "received_at", "timestamp_sec", "timestamp_seconds", "timestamp_millis", "timestamp_milliseconds",
        "arrival_time_sec", "arrival_time_millis", "start_time_sec", "start_time_millis", "request_time",
        "request_time_s", "request_time_ms",
    ),
    "status": ("status", "status_code", "http_status", "http_status_code", "response_status", "response_code"),
}  # fmt: skip
"""Names of columns and fields, as `plain` spells them. If a file has several names of a role, the first in this list
counts.
"""
_ROLES: dict[str, tuple[Role, int]] = {name: (role, i) for role, all_ in NAMES.items() for i, name in enumerate(all_)}
DELIMITERS = ",;\t|"
CHARACTERS = 4
"""Mean number of characters in a token, for files that have text but no token counts."""
_METRIC = re.compile(r"^(# (HELP|TYPE) |[a-zA-Z_:][a-zA-Z0-9_:]*(\{[^}]*\})? [-+0-9])")


class Row(NamedTuple):
    """A request, with the values in its file.

    Attributes:
        where: the file, with the line or entry in it, for errors.
        timestamp: the request's time as in the file, or None.
        has_failed: whether the HTTP status is an error (400 to 599).
        fields: all fields, if the row is a JSON object.
    """

    where: str
    input: object
    output: object
    timestamp: object
    has_failed: bool = False
    fields: Mapping[str, object] = MappingProxyType({})


class TraceRows(NamedTuple):
    """The requests of a file.

    Attributes:
        rows: one row for each request, including requests without output.
        time_name: name of the column or field with times, or "".
        notes: assumptions made to read the file.
    """

    rows: Iterable[Row]
    time_name: str = ""
    notes: tuple[str, ...] = ()


def plain(name: str) -> str:
    """Return a name in the spelling of `NAMES`, such as request_tokens for "Request tokens"."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")


def read_text(path: Path, field: str) -> str:
    """Return the text of a file. A file whose name ends in .gz is decompressed.

    Raises:
        InputError: the file cannot be read, or is not text.
    """
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError(field, str(path), "it is not a complete gzip file: fetch or compress it again") from None
    except UnicodeDecodeError as error:
        raise InputError(field, str(path), f"it cannot be read: {reason_of(error)}; save it as UTF-8") from None
    except OSError as error:
        raise InputError(field, str(path), f"it cannot be read: {reason_of(error)}; give another file") from None


def read_rows(path: Path, field: str) -> TraceRows:
    """Return the requests of a trace, after identifying its format.

    Raises:
        InputError: the trace is in no known format. The message names the file, and the line if possible.
    """
    text = read_text(path, field)
    if path.with_suffix("" if path.suffix == ".gz" else path.suffix).suffix in (".json", ".jsonl", ".ndjson") or (
        text.lstrip()[:1] == "{"
    ):
        try:
            return _json_rows(path, text)
        except (KeyError, TypeError, AttributeError):
            accepted = "xgpt does not know its format: give CSV with the header input,output"
            raise InputError(field, str(path), accepted) from None
    if is_metrics(text):
        accepted = "it has histograms, not requests: give it as --workload of `xgpt plan`"
        raise InputError(field, str(path), accepted)
    return _csv_rows(path, text)


def is_metrics(text: str) -> bool:
    """Return whether a text is a page of Prometheus metrics."""
    return bool(_METRIC.match(text.lstrip()))


# --- CSV


def _csv_rows(path: Path, text: str) -> TraceRows:
    first = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = max(DELIMITERS, key=lambda mark: (len(_columns(first.split(mark))), first.count(mark)))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    header: list[str] | None = None
    for cells in reader:
        if any(cell.strip() for cell in cells):
            header = cells
            break
    if header is None:
        return TraceRows(())
    columns = _columns(header)
    needed: tuple[Role, ...] = ("input", "output")
    if missing := [role for role in needed if role not in columns]:
        known = NAMES[missing[0]]
        unknown = [cell.strip() for cell in header if plain(cell) not in _ROLES and "char" not in plain(cell)]
        near = next(((cell, name) for cell in unknown if (name := similar(plain(cell), known))), None)
        hint = "" if near is None else f"; if {near[0]!r} is that column, call it {near[1]}"
        accepted = f"xgpt finds no column with the {missing[0]} length: call it {known[0]} or {known[3]}{hint}"
        raise InputError(f"{path}, line {reader.line_num}", delimiter.join(header), accepted)
    time = header[columns["timestamp"]].strip() if "timestamp" in columns else ""
    return TraceRows(_cells(path, reader, columns, len(header), delimiter), time)


def _columns(header: list[str]) -> dict[Role, int]:
    """Return the position of each role's column."""
    found: dict[Role, tuple[int, int]] = {}
    for position, cell in enumerate(header):
        if (known := _ROLES.get(plain(cell))) is not None and known[1] < found.get(known[0], (len(_ROLES), 0))[0]:
            found[known[0]] = known[1], position
    return {role: position for role, (_, position) in found.items()}


def _cells(path: Path, reader: Any, columns: dict[Role, int], width: int, delimiter: str) -> Iterator[Row]:
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            where = f"{path}, line {reader.line_num}"
            if len(cells) != width:
                raise InputError(
                    where,
                    delimiter.join(cells),
                    f"this row has {len(cells)} cells, but the header names {width} columns",
                )
            if delimiter == ";":  # such files have a decimal comma
                cells = [re.sub(r"^(-?\d+),(\d+)$", r"\1.\2", cell.strip()) for cell in cells]
            time, status = (cells[columns[role]].strip() if role in columns else "" for role in ("timestamp", "status"))
            lengths = cells[columns["input"]].strip(), cells[columns["output"]].strip()
            yield Row(where, *lengths, time or None, _is_error(status))
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}", str(error), "it must be CSV: correct this line") from None


# --- JSON


def _json_rows(path: Path, text: str) -> TraceRows:
    documents = list(_documents(path, text))
    if len(documents) == 1 and isinstance(documents[0][1], list):
        documents = [(f"{path}, entry {i}", each) for i, each in enumerate(documents[0][1], start=1)]
    if documents and all(isinstance(document, dict) and "conversations" in document for _, document in documents):
        return _conversations(documents)
    entries = [entry for where, document in documents for entry in _entries(where, document)]
    if any("resourceSpans" in document for _, document in documents):
        return _spans(entries)
    rows, names = [], set()
    for where, entry in entries:
        row, name = _row(where, entry)
        rows.append(row)
        names |= {name} - {""}
    if len(names) > 1:
        accepted = "these fields are all times: keep one of them in every row"
        raise InputError(str(path), " and ".join(sorted(names)), accepted)
    return TraceRows(rows, names.pop() if names else "")


def _documents(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield the JSON documents of a file (the whole file, or one for each line), each after its position."""
    try:
        yield f"{path}, line 1", json.loads(text)
        return
    except (ValueError, RecursionError):
        pass  # either each line is a document, or the loop below finds the invalid line
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(where, line.strip()[:80], f"it must be a JSON object: {error}") from None


def _entries(where: str, document: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the requests of a document, each after its position. The document is a request or contains requests."""
    if not isinstance(document, dict):
        raise InputError(where, str(document)[:80], "it must be a JSON object")
    lists = {name: entries for name, entries in document.items() if isinstance(entries, list)}
    if "resourceSpans" in document:
        for resource in document["resourceSpans"]:
            for scope in resource.get("scopeSpans", resource.get("instrumentationLibrarySpans", [])):
                yield from ((f"{where}, span {span.get('spanId', '')}", span) for span in scope.get("spans", []))
    elif "input_lens" in lists:  # vLLM's and SGLang's benchmarks
        names = [name for name in ("input_lens", "output_lens", "start_times") if name in lists]
        if any(len(lists[name]) != len(lists["input_lens"]) for name in names):
            raise InputError(where, ", ".join(names), "these lists must have equal lengths, one value for each request")
        for i in range(len(lists["input_lens"])):
            yield f"{where}, request {i + 1}", {name: lists[name][i] for name in names}
    elif document.get("object") == "page" or "num_model_requests" in document:
        accepted = "these are totals over many requests: give a log with one request in each row"
        raise InputError(where, "usage buckets", accepted)
    elif (inner := next((name for name in ("data", "requests", "records", "results") if name in lists), None)) and all(
        isinstance(each, dict) for each in lists[inner]
    ):
        for i, each in enumerate(lists[inner], start=1):
            yield from _entries(f"{where}, {inner} {i}", each)
    else:
        yield where, document


def _row(where: str, entry: Mapping[str, Any]) -> tuple[Row, str]:
    """Return a request, and the name of the field with its time."""
    found: dict[Role, tuple[int, str, object]] = {}
    for name, value in _fields(entry):
        known = _ROLES.get(plain(name))
        if known is None or isinstance(value, dict | list):
            continue
        role, rank = known
        if isinstance(value, str):
            if not _is_value(role, value):
                continue  # a text named "input" is not a length
            if role in ("input", "output"):
                rank += len(_ROLES)  # numbers count before texts: an answer named "output" may be the text "4"
        if role not in found or rank < found[role][0]:
            found[role] = rank, name, value
    has_failed = bool(entry.get("error")) or bool(entry.get("was_cancelled"))
    if "output" not in found and has_failed:
        found["output"] = 0, "output", 0
    for role in ("input", "output"):
        if role not in found:
            called = next((name for name in NAMES[role] if name in entry), None)
            if called is not None:
                raise InputError(f"{where}, {role}", entry[called], "give its number of tokens")
            raise InputError(where, json.dumps(entry)[:80], f"it has no {role} length: name it {role}_length")
    time = found.get("timestamp")
    is_error = "status" in found and _is_error(found["status"][2])
    row = Row(where, found["input"][2], found["output"][2], None if time is None else time[2], is_error, entry)
    return row, "" if time is None else time[1]


def _is_error(status: object) -> bool:
    """Return whether an HTTP status is an error."""
    return bool(re.fullmatch(r"[45]\d\d(\.0)?", str(status)))


def _is_value(role: Role, text: str) -> bool:
    return role == "timestamp" or bool(re.fullmatch(r"\s*-?\d+(\.\d+)?\s*", text))


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


def _spans(entries: list[tuple[str, Mapping[str, Any]]]) -> TraceRows:
    """Return the spans that are requests: those with token counts whose parent span has none."""
    rows = {}
    for where, span in entries:
        names = {plain(name) for name, _ in _fields(span)}
        if all(names & set(NAMES[role]) for role in ("input", "output")):
            rows[str(span.get("spanId", where))] = _row(where, span)[0], str(span.get("parentSpanId", ""))
    chosen = [row for row, parent in rows.values() if parent not in rows]
    others = len(entries) - len(chosen)
    notes = (
        (f"{others} of {len(entries)} spans are left out: they are not requests, or are only parts of requests",)
        if others
        else ()
    )
    return TraceRows(chosen, "startTimeUnixNano" if chosen and chosen[0].timestamp is not None else "", notes)


def _conversations(documents: list[tuple[str, Any]]) -> TraceRows:
    """Return one request for each answer in ShareGPT's conversations, with all previous turns as the prompt."""
    rows = []
    for where, document in documents:
        said = 0
        for turn in document["conversations"]:
            length = len(str(turn.get("value", turn.get("content", ""))))
            if turn.get("from", turn.get("role")) in ("gpt", "assistant", "chatgpt", "bing", "bard") and said:
                rows.append(Row(where, max(1, round(said / CHARACTERS)), round(length / CHARACTERS), None))
            said += length
    note = f"the file has text but no token counts: {CHARACTERS} characters are counted as one token"
    return TraceRows(rows, "", (note, "each answer is a request whose prompt is all previous turns"))
