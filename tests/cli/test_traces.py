"""Traces of public tools through the command line: the lengths that are planned, and what is said of each file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.cli.commands import Ran, Xgpt
from tests.rings import few
from tests.traces import METRICS, PUBLIC, SAID, share_gpt

KINDS = {**PUBLIC, "ShareGPT_V3.json": share_gpt(), "azure.csv.gz": PUBLIC["azure.csv"]}


def planned(xgpt: Xgpt, name: str, text: str) -> Ran:
    path = Path(name)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    asked = ("--model", "opt-125m", "--cluster", "v100x1", "--policy", "static", "--latency-bound", "60")
    return xgpt("plan", *asked, "--workload", name, "--json")


@pytest.mark.parametrize("name", few(list(KINDS)))
def test_every_kind_of_trace_is_planned_with_its_lengths(
    xgpt: Xgpt, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    ran = planned(xgpt, name, KINDS[name])
    assert ran.code == 0, ran.err
    workload = json.loads(ran.out)["workload"]
    assert workload["input"]["lengths"] == [10, 30] and workload["output"]["lengths"] == [2, 4]
    for part in SAID.get(name, []):
        assert caplog.text.count(part) == 1
    if name == "ShareGPT_V3.json":
        assert "4 characters are counted as one token" in caplog.text


def test_a_page_of_metrics_is_planned_with_its_buckets(xgpt: Xgpt, caplog: pytest.LogCaptureFixture) -> None:
    ran = planned(xgpt, "metrics.prom", METRICS)
    assert ran.code == 0 and "spread evenly over each bucket" in caplog.text
    assert json.loads(ran.out)["workload"]["input"]["lengths"][-1] == 200


@pytest.mark.parametrize(
    ("name", "unit"), [("mooncake.jsonl", "ms"), ("dynamo.jsonl", "ms"), ("burstgpt.csv", "s"), ("millis.csv", "ms")]
)
def test_times_have_the_unit_of_their_format(
    xgpt: Xgpt, caplog: pytest.LogCaptureFixture, name: str, unit: str
) -> None:
    """A day's fleet spans the trace: two requests 2 s apart are two seconds of a day, whatever the file counts in."""
    Path(name).write_text(PUBLIC[name])
    asked = ("--model", "opt-125m", "--cluster", "v100x1", "--latency-bound", "5", "--interval", "1")
    asked += ("--policy", "chunked")
    ran = xgpt("fleet", "--trace", name, *asked, "--json")
    assert ran.code == 0, ran.err
    assert len(json.loads(ran.out)["intervals"]) in (2, 3)
    said = {"ms": "milliseconds", "s": "seconds"}[unit]
    assert f"is read as {said}" in caplog.text
