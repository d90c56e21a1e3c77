"""Traces of public tools are read with the right lengths and the right unit of time, and bad ones are refused."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from tests.traces import METRICS, PUBLIC, SAID, lines, lmsys, over_time, share_gpt, write
from xgpt.core import trace_files, traces
from xgpt.core.errors import InputError
from xgpt.core.traces import read_lengths, read_workload
from xgpt.core.workload import quantile
from xgpt.resolve import load_trace, load_workload


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain.csv", "input,output\n10,2\n30,4\n"),
        ("dos.csv", "\ufeffinput,output\r\n10,2\r\n\r\n30,4"),
        ("more.csv", 'id,output, Input\n"a,b",2, 10\nc,4,30\n'),
        ("azure.csv", "ContextTokens,GeneratedTokens\n10,2\n30,4\n"),
        ("failed.csv", "input,output,status_code\n10,2,200\n99,99,500\n30,4,200\n99,99,429\n"),
        (
            "failed.jsonl",
            '{"input": 10, "output": 2}\n{"input": 9, "output": 9, "status": 503}\n{"input": 30, "output": 4}',
        ),
        ("float.csv", "input,output,status\n10,2,200.0\n99,99,500.0\n30,4,\n"),
        (
            "answers.jsonl",
            '{"input": "one", "output": "7", "input_tokens": 10, "output_tokens": 2}\n'
            '{"input": "2", "output": "5", "input_tokens": 30, "output_tokens": 4}',
        ),
        ("requests.log", '{"input_length": 10, "output_length": 2}\n{"input_length": 30, "output_length": 4}'),
        ("rows.jsonl", '{"input_length": 10, "output_length": 2}\n\n{"output_length": 4, "input_length": 30}'),
    ],
)
def test_reads_traces_without_times(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path, text, name)
    lengths = read_lengths(path)
    assert load_trace(str(path)) is not None
    assert lengths.input.tolist() == [10, 30]
    assert lengths.output.tolist() == [2, 4]
    assert lengths.timestamp_s is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n"
         "2023-11-16 18:17:03.9799600,10,2\n2023-11-16 18:17:04.2299600,30,4\n"),
        ("zone.csv", "input,output,timestamp\n10,2,2023-11-16T18:00:00Z\n30,4,2023-11-16T19:00:00.25+01:00\n"),
        ("ms.csv", "input,output,arrived_at\n10,2,1732600000000\n30,4,1732600000250\n"),
        ("late.csv", "input,output,timestamp\n30,4,8.5\n10,2,8.25\n"),
        (
            "rows.jsonl",
            '{"input_length":10,"output_length":2,"timestamp_s":5}\n{"input_length":30,"output_length":4,"timestamp_s":5.25}',
        ),
    ],
)  # fmt: skip
def test_reads_times_in_order_from_zero(tmp_path: Path, name: str, text: str) -> None:
    lengths = read_lengths(write(tmp_path, text, name))
    assert lengths.input.tolist() == [10, 30]
    assert lengths.timestamp_s is not None
    np.testing.assert_allclose(lengths.timestamp_s, [0, 0.25], atol=1e-6)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no requests"),
        ("\n \n", "no requests"),
        ("input,output\n", "no requests"),
        ("12,30\n", "line 1: '12,30'"),
        ("input,length\n1,2\n", "line 1: 'input,length'"),
        ("input,output\n5,2\n-4,2\n", "line 3, input: '-4'"),
        ("input,output\n5,0\n", "none of its 1 rows is a successful request with input and output tokens"),
        ("input,output\n5,two\n", "line 2, output: 'two'"),
        ("input,output\r5,6\r", "line 1: 'new-line character seen in unquoted field"),
        ("input,output\n5.5,2\n", "line 2, input: '5.5'"),
        ("input,output\n5,\n", "none of its 1 rows"),
        ("input,output\n5\n", "line 2: '5'"),
        ("input,output\n5,1,7\n", "line 2: '5,1,7'"),
        ("input,output\n99999999999999999999,7\n", "line 2, input"),
        ("input,output,timestamp\n5,1,noon\n", "line 2, timestamp: 'noon'"),
        ("input,output,timestamp\n5,1,nan\n", "line 2, timestamp: 'nan'"),
    ],
)
def test_bad_csv_names_line_and_value(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        read_lengths(write(tmp_path, text))
    assert says in str(caught.value)
    assert "trace.csv" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no requests"),
        ("[1, 2]", "entry 1: '1'"),
        ('{"input_length": 1,', "line 1"),
        ('{"input_length": 1}', "it has no output length"),
        ('{"input_length": 1, "output_length": true}', "line 1, output: True"),
        ('{"input_length": 1.5, "output_length": 2}', "line 1, input: 1.5"),
        ('{"input_length": null, "output_length": 2}', "none of its 1 rows"),
        ('{"input_length": 1, "output_length": 2, "timestamp": true}', "line 1, timestamp: True"),
        ('{"input_length": 1, "output_length": ' + "9" * 5000 + "}", "line 1"),
        (
            '{"input_length":1,"output_length":2}\n{"input_length":1,"output_length":2,"timestamp":1}',
            "line 2: 1 is not accepted; either all requests must have",
        ),
    ],
)
def test_bad_json_lines_name_line_and_value(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        read_lengths(write(tmp_path, text, "trace.jsonl"))
    assert says in str(caught.value)


def test_unreadable_traces_are_input_errors(tmp_path: Path) -> None:
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (binary, tmp_path, tmp_path / "missing.csv"):
        with pytest.raises(InputError):
            read_lengths(path)


def test_a_trace_says_what_requests_have_in_common(tmp_path: Path) -> None:
    lines = (
        '{"timestamp": 2000, "input_length": 40, "output_length": 9, "block_size": 16, "hash_ids": [1, 2, 7],'
        ' "output_hash_ids": [3, 4]}\n'
        '{"timestamp": 0, "input_length": 33, "output_length": 1, "block_size": 16, "hash_ids": [1, 2, 8]}\n'
    )
    trace = read_lengths(write(tmp_path, lines, "trace.jsonl"))
    assert trace.timestamp_s is not None and trace.timestamp_s.tolist() == [0.0, 2.0], "milliseconds, in order"
    prefixes = trace.prefixes
    assert prefixes is not None
    first, second = prefixes.chain(0, 33, 16), prefixes.chain(1, 40, 16)
    assert len(first) == 2 and first == second, "whole blocks alone"
    assert len(prefixes.chain(1, 40, 4)) == 10 and prefixes.chain(1, 40, 4)[:8] == prefixes.chain(0, 33, 4)
    assert len(prefixes.output_chain(1, 40, 9, 16)) == 1, "its last token is never fed"
    assert prefixes.output_chain(0, 33, 1, 16) == ()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ('"hash_ids": [1]', "hash_ids"),
        ('"hash_ids": [1, 2, "x"]', "hash_ids"),
        ('"hash_ids": [1, 2, 3], "block_size": 0', "block_size"),
        ('"hash_ids": [1, 2, 3], "output_hash_ids": [4]', "output_hash_ids"),
    ],
)
def test_ids_that_do_not_go_with_the_lengths(tmp_path: Path, fields: str, field: str) -> None:
    size = "" if "block_size" in fields else ', "block_size": 16'
    line = f'{{"input_length": 40, "output_length": 9{size}, {fields}}}\n'
    with pytest.raises(InputError, match=field):
        read_lengths(write(tmp_path, line, "trace.jsonl"))


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("packed", [False, True], ids=["", "gz"])
def test_public_formats(tmp_path: Path, name: str, packed: bool) -> None:
    path = tmp_path / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(PUBLIC[name].encode()) if packed else PUBLIC[name].encode())
    trace = load_trace(str(path))
    assert trace is not None and trace.timestamp_s is not None
    assert (trace.input.tolist(), trace.output.tolist()) == ([10, 30], [2, 4])
    np.testing.assert_allclose(trace.timestamp_s, [0, 2], atol=1e-6)
    workload = load_workload(str(path))
    assert workload.input.lengths == (10, 30) and workload.name == name.partition(".")[0]


@pytest.mark.parametrize(("name", "says"), SAID.items())
def test_what_is_assumed_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, says: list[str]
) -> None:
    path = write(tmp_path, PUBLIC[name], name)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            read_lengths(path)
    assert len(caplog.messages) == len(says)
    for message, part in zip(caplog.messages, says, strict=True):
        assert part in message and message.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("half.jsonl", lines({"timestamp": 0.5, "input_length": 1, "output_length": 2}), "name them timestamp_s"),
        ("usage.json", json.dumps({"object": "page", "data": [{"object": "bucket"}]}), "totals over many requests"),
        ("bucket.jsonl", lines({"num_model_requests": 5, "input_tokens": 9, "output_tokens": 5}), "totals over many"),
        ("mixed.csv", "input,output,time\n1,2,3\n1,2,2026-01-01\n", "a number in every row, or a date in every row"),
        ("header.csv", "prompt_token,completion_tokens\n1,2\n", "call it input or prompt_tokens"),
        ("cut.csv.gz", "input,output", "it is not a complete gzip file"),
        ("text.jsonl", lines({"input": "hello", "output": "you"}), "line 1, input: 'hello' is not accepted; give"),
        ("lists.json", json.dumps({"input_lens": [1, 2], "output_lens": [1]}), "one value for each request"),
        ("names.jsonl", lines({"isl": 1, "osl": 2, "time_s": 1}, {"isl": 1, "osl": 2, "time_ms": 1}), "are all times"),
        ("odd.json", json.dumps([{"conversations": [1]}]), "xgpt does not know its format"),
    ],
)  # fmt: skip
def test_what_cannot_be_known_is_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_lengths(write(tmp_path, text, name))


@pytest.mark.parametrize(
    ("name", "unit_s"), [("arrival_time_ms", 1e-3), ("timestamp_millis", 1e-3), ("start_time_sec", 1)]
)
def test_a_unit_in_the_name_of_times_is_read(tmp_path: Path, name: str, unit_s: float) -> None:
    read = read_lengths(write(tmp_path, f"{name},input,output\n1000,10,2\n3000,30,4\n"))
    assert read.timestamp_s is not None and read.timestamp_s.tolist() == [0.0, 2000 * unit_s]


def test_a_duration_is_no_time_of_arrival(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """nginx's $request_time is the number of seconds that a request took."""
    rows = [{"request_time": took, "input_tokens": 10, "output_tokens": 2} for took in ("0.512", "7.031")]
    dates = [{"time_iso8601": f"2026-11-27T07:00:0{i}+00:00", **row} for i, row in enumerate(rows)]
    numbers = [{"msec": f"179576280{i}.250", **row} for i, row in enumerate(rows)]
    for named in (dates, numbers):
        read = read_lengths(write(tmp_path, lines(*named), "access.jsonl"))
        assert read.timestamp_s is not None and read.timestamp_s.tolist() == [0.0, 1.0]
    assert read_lengths(write(tmp_path, lines(*rows), "durations.jsonl")).timestamp_s is None
    assert any("`request_time` is read as a duration" in message for message in caplog.messages)


@pytest.mark.parametrize(("name", "text"), [("ShareGPT_V3.json", share_gpt()), ("lmsys.jsonl", lmsys())])
def test_conversations_are_counted_by_their_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, text: str
) -> None:
    trace = read_lengths(write(tmp_path, text, name))
    assert (trace.input.tolist(), trace.output.tolist()) == ([10, 30], [2, 4])
    assert any("4 characters are counted as one token" in message for message in caplog.messages)


def test_a_page_of_metrics_gives_lengths_without_pairs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, METRICS, "metrics.prom")
    workload = read_workload(path)
    assert workload.input.mean == pytest.approx(100, rel=0.01) and workload.input.lengths[-1] == 200
    assert workload.output.lengths[-1] == 20 and workload.output.probabilities[-1] == pytest.approx(0.1)
    assert "a mean of 100 tokens (the page's own sum gives 90)" in caplog.messages[0]
    assert load_trace(str(path)) is None
    with pytest.raises(InputError, match="it has histograms, not requests"):
        read_lengths(path)
    with pytest.raises(InputError, match="no request is counted in a histogram of output lengths"):
        read_workload(write(tmp_path, METRICS.replace("generation", "other"), "part.prom"))
    grown = read_workload(write(tmp_path, over_time(METRICS), "range.json"))
    assert (grown.input, grown.output) == (workload.input, workload.output)
    with pytest.raises(InputError, match="give the answer to a query for the buckets"):
        read_workload(write(tmp_path, '{"data": {"resultType": "matrix", "result": [1]}}', "range.json"))


def zipped(path: Path, *parts: tuple[bytes, int]) -> Path:
    with gzip.open(path, "wb") as file:
        for part, count in parts:
            file.write(part * count)
    return path


@pytest.mark.parametrize(
    ("name", "parts", "says"),
    [
        ("rows.csv.gz", ((b"input,output\n", 1), (b"1,1\n", 9000)), "it has more than 5,000 lines"),
        ("blank.csv.gz", ((b"input,output\n", 1), (b"\n", 9000)), "it has more than 5,000 lines"),
        ("line.csv.gz", ((b"input,output\n", 1), (b"1", 1 << 21)), "line 2: 'more than 2,000,000 bytes'"),
        ("line.jsonl", ((b'{"a": "', 1), (b"1", 1 << 21)), "more than 2,000,000 bytes"),
        ("nest.json", ((b"[", 1), (b"[],", 99_999), (b"[]]", 1)), "too large for one document"),
        ("quote.csv", ((b'input,output\n"', 1), (b"1,1\n", 4000)), "this row has 1 cells"),
        ("names.csv", ((b"name,", 300_000), (b"\n1,2", 1)), "'300001 columns' is not accepted"),
        ("header.csv", ((b"name,", 4000), (b"x\n1,2", 1)), "finds no column with the input length"),
        ("late.csv", ((b"input,output,timestamp\n1,2,1e308\n", 1),), "it must be a number of at most 1e"),
        ("ids.jsonl", ((b'{"input_length": 2048, "output_length": 1, "hash_ids": [1, 2, 3, 4]}\n', 30),), "100 ids"),
    ],
)  # fmt: skip
def test_a_hostile_file_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, parts: tuple[tuple[bytes, int], ...], says: str
) -> None:
    """1.1 MB of gzip took 6.5 GiB, a time of 1e308 was an internal error, and an error listed 300,000 columns."""
    monkeypatch.setattr(trace_files, "MOST_LINES", 5000)
    monkeypatch.setattr(trace_files, "MOST_MEMORY", 6_000_000)
    monkeypatch.setattr(traces, "MOST_IDS", 100)
    path = tmp_path / name
    if path.suffix == ".gz":
        zipped(path, *parts)
    else:
        path.write_bytes(b"".join(part * count for part, count in parts))
    with pytest.raises(InputError, match=says) as caught:
        read_lengths(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("counts", ["NaN", "Inf", "1.x", "-3"])
@pytest.mark.parametrize("limit", ["10", "1e300", "-5", "x"])
def test_a_page_of_nonsense_is_refused(tmp_path: Path, counts: str, limit: str) -> None:
    (tmp_path / "page.prom").write_text(
        "# TYPE vllm:request_prompt_tokens histogram\n"
        + "".join(f'vllm:request_{role}_tokens_bucket{{le="{limit}"}} {counts}\n' for role in ("prompt", "generation"))
    )
    with pytest.raises(InputError, match="finite counts"):
        read_workload(tmp_path / "page.prom")


def test_a_unit_that_gives_an_absurd_rate_is_refused(tmp_path: Path) -> None:
    rows = [{"timestamp": i, "input_length": 10, "output_length": 2} for i in range(30)]
    with pytest.raises(InputError, match=r"30 requests span 29 s in seconds, 0\.029 s in milliseconds"):
        read_lengths(write(tmp_path, lines(*rows), "seconds.jsonl"))
    named = [{"timestamp_s": i, "input_length": 10, "output_length": 2} for i in range(30)]
    assert read_lengths(write(tmp_path, lines(*named), "named.jsonl")).timestamp_s is not None


def test_a_long_log_is_binned(tmp_path: Path) -> None:
    """A plan of a real log had 423,891 bytes."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6, 1, (20_000, 2)).astype(int), 1, 30_000)
    path = write(tmp_path, "input,output\n" + "".join(f"{i},{o}\n" for i, o in lengths.tolist()))
    workload = read_workload(path)
    for found, exact in zip((workload.input, workload.output), lengths.T, strict=True):
        assert len(found.lengths) <= 101 and found.lengths[-1] == exact.max()
        assert found.mean == pytest.approx(exact.mean(), rel=2e-3)
        for q in (0.5, 0.9, 0.99):
            assert quantile(found, q) == pytest.approx(np.quantile(exact, q), rel=0.05)
    assert len(workload.model_dump_json()) < 8000
