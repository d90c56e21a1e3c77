"""What stages did when, as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from xgpt.schema.step_log import StepRecord
from xsimulator.clock import Span

Stage = tuple[str, int]
"""Lane, and place in it."""


def chrome_trace(log: Sequence[StepRecord], title: str, spans: Sequence[Span] = ()) -> str:
    """Steps as spans of the stages that execute them, and the requests inside as a counter. Times in microseconds.

    Args:
        spans: of each stage; without them the steps stand on one line, from when they were scheduled to their end.

    Source: ExeGPT Figure 4.
    """
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": title}}]
    start_ns = log[0].start_ns if log else 0
    rows = {stage: number for number, stage in enumerate(stages(spans))}
    for (lane, stage), row in rows.items():
        name = f"stage {stage}" if lane == "both" else f"{lane} {stage}"
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": name}})
    for span in spans:
        event = _span(span.start_ns - start_ns, span.end_ns - start_ns, rows[span.lane, span.stage], span.step)
        event["args"]["micro-batch"] = span.step.microbatch
        events.append(event)
    for record in log:
        if not spans:
            event = _span(record.start_ns - start_ns, record.end_ns - start_ns, 0, record)
            event["args"] |= {"finished": len(record.finished), "preempted": len(record.preempted)}
            events.append(event)
        running = {"requests": len(record.encode) + len(record.decode)}
        events.append(
            {"name": "running", "ph": "C", "pid": 0, "ts": (record.start_ns - start_ns) / 1e3, "args": running}
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def stages(spans: Sequence[Span]) -> list[Stage]:
    """The stages that spans tell of, encode lane first."""
    order = {"both": 0, "encode": 0, "decode": 1}
    return sorted({(span.lane, span.stage) for span in spans}, key=lambda stage: (order[stage[0]], stage[1]))


def idle_shares(spans: Sequence[Span]) -> dict[Stage, float]:
    """Share of the time in which each stage does nothing, between the middle halves of what they tell of."""
    if not spans:
        return {}
    first, last = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    opens, closes = first + (last - first) // 4, last - (last - first) // 4
    busy_ns = dict.fromkeys(stages(spans), 0)
    for span in spans:
        busy_ns[span.lane, span.stage] += max(0, min(span.end_ns, closes) - max(span.start_ns, opens))
    return {stage: 1 - ns / max(closes - opens, 1) for stage, ns in busy_ns.items()}


def _span(start_ns: int, end_ns: int, row: int, step: Any) -> dict[str, Any]:
    kinds = [kind for kind, part in (("encode", step.encode), ("decode", step.decode)) if part]
    return {
        "name": " + ".join(kinds) or "transfer",
        "cat": "step",
        "ph": "X",
        "pid": 0,
        "tid": row,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": {
            "encode requests": len(step.encode),
            "encode tokens": sum(length for _, _, length in step.encode),
            "decode requests": len(step.decode),
        },
    }
