"""The Chrome trace of a log: one span a step, in order, none overlapping."""

import json

from xgpt.core.policies import Chunk, Step
from xgpt.core.schema.step_log import StepRecord
from xsimulator.clock import Span
from xsimulator.timeline import Timeline, chrome_trace, idle_shares


def test_spans_follow_the_steps():
    log = [
        StepRecord(1000, 5000, ((7, 0, 12),), (), (), (), ()),
        StepRecord(5000, 6000, (), (7,), (), (), ()),
        StepRecord(9000, 9500, ((8, 0, 3),), (7,), (7,), (), ()),
    ]
    events = json.loads(chrome_trace(Timeline("rra", log)))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["name"] for span in spans] == ["encode", "decode", "encode + decode"]
    assert [(span["ts"], span["dur"]) for span in spans] == [(0.0, 4.0), (4.0, 1.0), (8.0, 0.5)]
    assert spans[0]["args"]["encode tokens"] == 12 and spans[2]["args"]["finished"] == 1


def test_an_empty_log_is_an_empty_trace():
    assert json.loads(chrome_trace(Timeline("nothing", [])))["traceEvents"][0]["ph"] == "M"


def test_each_stage_has_a_row_of_its_own():
    step = Step((Chunk(0, 0, 10),), (), microbatch=1)
    spans = [Span("both", 0, 0, 4000, step), Span("both", 1, 4000, 8000, step), Span("both", 0, 4000, 8000, step)]
    log = [StepRecord(0, 8000, ((0, 0, 10),), (), (), (), ())]
    events = json.loads(chrome_trace(Timeline("rra", log, spans)))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["stage 0", "stage 1"]
    drawn = [(e["tid"], e["ts"], e["dur"], e["args"]["micro-batch"]) for e in events if e["ph"] == "X"]
    assert drawn == [(0, 0.0, 4.0, 1), (1, 4.0, 4.0, 1), (0, 4.0, 4.0, 1)]
    # Between 2 and 6 us the first stage is busy throughout, the second from 4 us on.
    assert idle_shares(spans) == {("both", 0): 0.0, ("both", 1): 0.5}


def test_lanes_that_overlap_stand_beside_each_other_and_so_do_timelines():
    log = [
        StepRecord(0, 4000, ((0, 0, 10),), (), (), (), (), lane="encode"),
        StepRecord(4000, 5000, (), (), (), (), (), transfer=(0,), lane="transfer"),
        StepRecord(4000, 6000, (), (1,), (), (), (), lane="decode"),
    ]
    events = json.loads(chrome_trace(Timeline("simulated", log), Timeline("measured", log[:1])))["traceEvents"]
    drawn = [(e["pid"], e["tid"], e["name"]) for e in events if e["ph"] == "X"]
    assert drawn == [(0, 0, "encode"), (0, 1, "transfer"), (0, 2, "decode"), (1, 0, "encode")]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["simulated", "measured"]
