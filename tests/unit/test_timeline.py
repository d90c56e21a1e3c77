"""The Chrome trace of a log: one span a step, in order, none overlapping."""

import json

from xgpt.schema.step_log import StepRecord
from xsimulator.timeline import chrome_trace


def test_spans_follow_the_steps():
    log = [
        StepRecord(1000, 5000, ((7, 0, 12),), (), (), (), ()),
        StepRecord(5000, 6000, (), (7,), (), (), ()),
        StepRecord(9000, 9500, ((8, 0, 3),), (7,), (7,), (), ()),
    ]
    events = json.loads(chrome_trace(log, "rra"))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["name"] for span in spans] == ["encode", "decode", "encode + decode"]
    assert [(span["ts"], span["dur"]) for span in spans] == [(0.0, 4.0), (4.0, 1.0), (8.0, 0.5)]
    assert spans[0]["args"]["encode tokens"] == 12 and spans[2]["args"]["finished"] == 1


def test_an_empty_log_is_an_empty_trace():
    assert json.loads(chrome_trace([], "nothing"))["traceEvents"][0]["ph"] == "M"
