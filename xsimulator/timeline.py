"""A log of steps as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from xgpt.schema.step_log import StepRecord


def chrome_trace(log: Sequence[StepRecord], title: str) -> str:
    """The steps as spans of one device, and the requests inside as a counter. Times in microseconds.

    Source: ExeGPT Figure 4, for one device.
    """
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": title}}]
    start_ns = log[0].start_ns if log else 0
    for record in log:
        tokens = sum(length for _, _, length in record.encode)
        kinds = [kind for kind, part in (("encode", record.encode), ("decode", record.decode)) if part]
        begin_us = (record.start_ns - start_ns) / 1e3
        args = {
            "encode requests": len(record.encode),
            "encode tokens": tokens,
            "decode requests": len(record.decode),
            "finished": len(record.finished),
            "preempted": len(record.preempted),
        }
        duration_us = (record.end_ns - record.start_ns) / 1e3
        span = {"name": " + ".join(kinds), "cat": "step", "ph": "X", "pid": 0, "tid": 0}
        events.append(span | {"ts": begin_us, "dur": duration_us, "args": args})
        running = {"requests": len(record.encode) + len(record.decode)}
        events.append({"name": "running", "ph": "C", "pid": 0, "ts": begin_us, "args": running})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
