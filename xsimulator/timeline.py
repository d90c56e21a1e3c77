"""Draw the work of stages over time as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from xgpt.core.schema.step_log import StepRecord
from xsimulator.clock import Span

StageKey = tuple[str, int]


class Timeline(NamedTuple):
    title: str
    log: Sequence[StepRecord]
    spans: Sequence[Span] = ()


def chrome_trace(*timelines: Timeline) -> str:
    """Return a Chrome trace that shows steps as spans, and running requests as a counter.

    Times are in microseconds. Source: ExeGPT Figure 4.
    """
    events: list[dict[str, Any]] = []
    for pid, timeline in enumerate(timelines):
        events += [event | {"pid": pid} for event in _events(timeline)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    title, log, spans = timeline
    yield {"name": "process_name", "ph": "M", "args": {"name": title}}
    start_ns = log[0].start_ns if log else 0
    if spans:
        rows = stages(spans)
        names = [f"stage {stage}" if lane == "both" else f"{lane} {stage}" for lane, stage in rows]
    else:
        rows = _in_order({(record.lane, record.microbatch) for record in log})
        names = [f"{'steps' if lane == 'both' else lane} of micro-batch {number}" for lane, number in rows]
    for row, name in enumerate(names):
        yield {"name": "thread_name", "ph": "M", "tid": row, "args": {"name": name}}
    for span in spans:
        event = _span(span.start_ns - start_ns, span.end_ns - start_ns, rows.index((span.lane, span.stage)), span.step)
        event["args"]["micro-batch"] = span.step.microbatch
        yield event
    for record in log:
        if not spans:
            row = rows.index((record.lane, record.microbatch))
            event = _span(record.start_ns - start_ns, record.end_ns - start_ns, row, record)
            event["args"] |= {"finished": len(record.finished), "preempted": len(record.preempted)}
            yield event
        running = {"requests": len(record.encode) + len(record.decode)}
        yield {"name": "running", "ph": "C", "ts": (record.start_ns - start_ns) / 1e3, "args": running}


def stages(spans: Sequence[Span]) -> list[StageKey]:
    return _in_order({(span.lane, span.stage) for span in spans})


def _in_order(rows: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(rows, key=lambda row: (("both", "encode", "transfer", "decode").index(row[0]), row[1]))


def idle_shares(spans: Sequence[Span]) -> dict[StageKey, float]:
    """Return each stage's idle share of time. Only the middle half of the time that the spans cover counts."""
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
        "tid": row,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": {
            "encode requests": len(step.encode),
            "encode tokens": sum(length for _, _, length in step.encode),
            "decode requests": len(step.decode),
        },
    }
