"""What a bench makes of a log: the machine's pace, and the model's error at that pace."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.scenarios import problem
from tests.fakes import fake_plan
from tests.rings import examples, few
from tools.demo import num_requests
from xgpt.benchmark import Load, bench, bench_plan, draw, replayed
from xgpt.cli import render
from xgpt.client import ClientResult
from xgpt.core.errors import MachineError
from xgpt.core.io import StepLogWriter
from xgpt.core.schema import SERVED, BenchReport, Capacity, Comparison, Constraint, Plan, Profile, StepRecord, UrlReport
from xgpt.core.workload import ArrivalProcess, TraceLengths
from xscheduler.objectives.arrivals import Arrivals
from xscheduler.schedule import Scheduler
from xsimulator.run import outstanding_requests, read_log, requests_to_end, run_requests

OF = problem("llama-3.1-8b", "h200x1", "azure-conv")
PACE = 1.4


@cache
def planned(kind: str, headroom: float) -> Plan:
    constraint = Constraint(objective="arrivals", latency_bound_s=20.0, ttft_s=2.0, headroom=headroom)
    return Arrivals(Scheduler(OF.under(constraint))).of_kind(kind, 1)[0][0]


def benched(
    kind: str,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    headroom: float = 0.0,
    *,
    slow_after: bool = False,
    replicas: int = 1,
    waits: bool = False,
    pace: float = PACE,
    profile: Profile = OF.profile,
) -> BenchReport:
    """A bench of a machine whose every step takes `pace` times as long as the profile says, and which is else as it is
    modelled.

    Args:
        slow_after: once the measured requests have ended, steps take ten times as long.
        waits: every 40th step waits for a core ten times as long as it computes.
    """
    plan = planned(kind, headroom).model_copy(update={"replicas": replicas})

    @contextmanager
    def server(plan: Any, directory: Path, step_log: Path) -> Iterator[str]:
        drawn = draw(plan, load, np.random.default_rng(0))
        slow = plan.model_copy(update={"profile": plan.profile.model_copy(update={"slowdown": pace})})
        with closing(StepLogWriter(step_log)) as write:
            of_each = (every(number, replicas, TraceLengths(*drawn[:3])) for number in range(replicas))
            logs = [run_requests(slow, OF.profile, requests, drawn.max_output) for requests in of_each]
            log = sorted(
                (renumbered(record, number, replicas) for number, of_one in enumerate(logs) for record in of_one),
                key=lambda record: record.end_ns,
            )
            log = list(waiting(log)) if waits else log
            measured = set(range(load.num_requests))
            last_ns = max(record.end_ns for record in log if measured & set(record.finished))
            for record in log:
                if slow_after and record.start_ns >= last_ns:
                    later = {name: 10 * getattr(record, name) - 9 * last_ns for name in ("start_ns", "end_ns")}
                    record = record._replace(**later)
                write(record)
        yield "http://127.0.0.1:1"

    async def replay(url: str, requests: list[Any], *, concurrency: int | None, **_: Any) -> list[ClientResult]:
        assert concurrency == (None if load.arrivals else replicas * outstanding_requests(plan))
        return [ClientResult(0.0, 1.0) for _ in requests]

    monkeypatch.setattr("xgpt.benchmark.replay", replay)
    return bench_plan(plan, load, np.random.default_rng(0), profile=profile, server=server)[0]


def every(number: int, replicas: int, requests: TraceLengths) -> TraceLengths:
    """The requests of a replica, where they take turns."""
    return requests.take(range(number, len(requests.input), replicas))


def renumbered(record: StepRecord, number: int, replicas: int) -> StepRecord:
    """A record with requests numbered as all replicas' are, of a replica that numbered its own."""

    def of(id_: int) -> int:
        return id_ * replicas + number

    return record._replace(
        encode=tuple((of(id_), start, length) for id_, start, length in record.encode),
        decode=tuple(map(of, record.decode)),
        finished=tuple(map(of, record.finished)),
        arrivals=tuple(arrival._replace(id=of(arrival.id)) for arrival in record.arrivals),
        preempted=tuple(map(of, record.preempted)),
        replica=number,
    )


def waiting(log: list[StepRecord]) -> Iterator[StepRecord]:
    """The steps, of which every 40th waits for a core ten times as long as it computes."""
    late_ns = 0
    for i, record in enumerate(log):
        wait_ns = 10 * (record.end_ns - record.start_ns) if i % 40 == 39 else 0
        arrivals = tuple(arrival._replace(arrival_ns=arrival.arrival_ns + late_ns) for arrival in record.arrivals)
        start_ns, end_ns = record.start_ns + late_ns, record.end_ns + late_ns + wait_ns
        yield record._replace(start_ns=start_ns, end_ns=end_ns, arrivals=arrivals, core_wait_ns=wait_ns)
        late_ns += wait_ns


@pytest.mark.parametrize("count", [1, 8, 40])
def test_batches_that_end_together_can_be_measured(count: int) -> None:
    plan = Scheduler(OF).best(["orca"])
    total = requests_to_end(plan, count) + outstanding_requests(plan)
    alike = TraceLengths(np.full(total, 100), np.full(total, 40), None)
    log, num_ended = [], 0
    for record in run_requests(plan, OF.profile, alike, 40):
        log.append(record)
        num_ended += len(record.finished)
        if num_ended >= requests_to_end(plan, count):
            break
    assert read_log(plan, plan.workload, log, count, saturated=True).num_requests >= count


@pytest.mark.long
@pytest.mark.parametrize("kind", few(["chunked", "static", "orca", "rra"]))
def test_a_slower_machine_is_no_error_of_the_model(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    load = Load(150, arrivals=ArrivalProcess.at([(2.0, 40.0), (5.0, None)]))
    report = benched(kind, load, monkeypatch)
    assert report.pace == pytest.approx(PACE, rel=1e-3)
    assert report.arrival_rate_per_s == pytest.approx(150 / (40 + 70 / 5))
    assert report.figure("tpot_p50_s").error < -0.2
    for figure in report.figures:
        assert figure.error_at_pace == pytest.approx(0.0, abs=1e-3), figure.metric
    notes = " ".join(render.bench_notes(report))
    assert "diagnosis: steps took 40% longer than in the profile" in notes and "counted from arrival" in notes
    assert len(render.bench_table(report).rows) == 6
    assert report.share_within_bound is not None and report.bound_kept == (report.share_within_bound >= 0.99)


@pytest.mark.long
@pytest.mark.parametrize(("pace", "is_outside"), few([(1.2, True), (1.0, False), (1.05, False)]))
def test_figures_of_a_machine_at_rest_lie_in_their_ranges(
    monkeypatch: pytest.MonkeyPatch, pace: float, is_outside: bool
) -> None:
    profile = OF.profile.model_copy(update={"provenance": {SERVED: "a load"}})
    load = Load(120, arrivals=ArrivalProcess.at(3.0))
    report = benched("chunked", load, monkeypatch, headroom=0.3, pace=pace, profile=profile)
    assert report.is_outside == is_outside
    for figure in report.figures:
        assert figure.low is not None and figure.high is not None
        assert figure.low <= figure.predicted <= figure.high, figure.metric
    notes = " ".join(render.bench_notes(report))
    assert ("diagnosis" in notes) == is_outside
    assert "usual range" in [column.header for column in render.bench_table(report).columns]


def test_a_range_that_no_reader_can_use_is_said_in_words() -> None:
    figure = Comparison(metric="ttft_p99_s", predicted=1.0, measured=1.0, low=0.393, high=772.657)
    assert render._range(figure) == "too uncertain for a range"


@pytest.mark.long
def test_the_pace_is_that_of_the_steps_that_measured_requests_met(monkeypatch: pytest.MonkeyPatch) -> None:
    report = benched("rra", Load(60, arrivals=ArrivalProcess.at(5.0)), monkeypatch, slow_after=True)
    assert report.pace == pytest.approx(PACE, rel=1e-3)
    assert report.figure("whole_mean_s").error_at_pace == pytest.approx(0.0, abs=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("arrivals", few([ArrivalProcess.at(5.0), None]))
def test_what_others_took_of_the_cores_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, arrivals: ArrivalProcess | None
) -> None:
    report = benched("chunked", Load(100, arrivals=arrivals), monkeypatch, waits=True)
    waits = report.core_waits
    assert waits is not None
    assert abs(report.figure("itl_p99_s").error_at_pace or 0.0) > 0.05  # no pace stands for one step in forty
    assert waits.gaps.error_at_pace == pytest.approx(0.0, abs=1e-3)
    assert waits.pace == pytest.approx(PACE, rel=1e-3)
    assert waits.share_of_steps == pytest.approx(1 / 40, rel=0.2)
    assert report.pace is not None and report.pace > 1.05 * PACE
    assert (
        f"({waits.seconds:.1f} s in all) waited for cores that other threads used, "
        "and without these waits steps would have taken 40%" in " ".join(render.bench_notes(report))
    )


def test_a_plan_is_measured_at_the_rate_that_it_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Load] = []

    def measured(plan: Plan, load: Load, *_: Any, **__: Any) -> tuple[Any, list[StepRecord]]:
        loads.append(load)
        return None, []

    monkeypatch.setattr("xgpt.benchmark.bench_plan", measured)
    plan = planned("chunked", 0.0)
    found = Capacity(rate_per_s=3.0, whole_s=9.0, share_kept=0.995, num_requests=2000, warm_up_requests=100, seed=0)
    plan = plan.with_estimate(capacity=found)
    bench(plan, Load(10), profile=OF.profile)
    bench(plan, Load(10, arrivals=ArrivalProcess.at(1.0)), profile=OF.profile)
    bench(plan, Load(10), profile=OF.profile, saturated=True)
    assert [load.arrivals for load in loads] == [ArrivalProcess.at(found.rate_per_s), ArrivalProcess.at(1.0), None]


def test_the_announced_time_ends_with_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 requests at 4 a second took longer than 5 s: further requests keep the load steady, and the last one runs."""

    @contextmanager
    def server(*_: object) -> Iterator[str]:
        yield "http://127.0.0.1:1"

    async def replay(url: str, requests: list[Any], **_: object) -> list[ClientResult]:
        return [ClientResult(0.0, 1.0) for _ in requests]

    monkeypatch.setattr("xgpt.benchmark.replay", replay)
    monkeypatch.setattr("xgpt.benchmark.read_step_log", lambda path: [])
    told: list[str] = []
    plan, load = planned("chunked", 0.0), Load(20, arrivals=ArrivalProcess.at(4.0))
    rng = np.random.default_rng(0)
    drawn = replayed(plan, load, rng, server=server, progress=lambda done, total, what: told.append(what)).drawn
    seconds = drawn.arrivals_s[-1] + plan.estimate.latency_s
    assert seconds > 20 / 4 + plan.estimate.latency_s
    assert told == [f"serving 20 requests at 4 a second, which takes about {seconds:.0f} s"]


@pytest.mark.long
def test_where_waits_are_not_known_none_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert benched("chunked", Load(60), monkeypatch).core_waits is None


@pytest.mark.long
@pytest.mark.parametrize("kind", few(["chunked", "rra"]))
def test_saturated_the_drawn_requests_are_no_error_of_the_model(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Few requests draw other lengths than a long run has, which is neither the plan's fault nor the machine's."""
    report = benched(kind, Load(60), monkeypatch)
    for figure in report.figures:
        assert figure.error_at_pace == pytest.approx(0.0, abs=1e-3), figure.metric
    throughput = report.figure("throughput_rps")
    drawn = PACE * throughput.measured / throughput.predicted - 1
    assert f"change throughput by {100 * drawn:+.1f}%" in " ".join(render.bench_notes(report))
    assert report.bound_kept is None  # it is one on requests that arrive


@pytest.mark.long
def test_saturated_the_prediction_is_what_the_plan_states(monkeypatch: pytest.MonkeyPatch) -> None:
    throughput = benched("chunked", Load(examples(1500, 700)), monkeypatch).figure("throughput_rps")
    assert throughput.error == pytest.approx(PACE - 1, abs=0.06)


@pytest.mark.long
@pytest.mark.parametrize("kind", few(["rra", "orca"]))
def test_two_replicas_are_measured_as_one_is(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Twice the throughput, and the latencies of one: their steps, mixed in one log, are not those of one engine."""
    one = benched(kind, Load(800), monkeypatch)
    two = benched(kind, Load(1600), monkeypatch, replicas=2)
    assert two.pace == pytest.approx(PACE, rel=1e-3)
    for metric, times in (("throughput_rps", 2), ("latency_s", 1), ("ttft_s", 1), ("itl_p99_s", 1)):
        assert two.figure(metric).measured == pytest.approx(times * one.figure(metric).measured, rel=0.15), metric


@pytest.mark.long
def test_arrivals_at_two_replicas_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    report = benched("chunked", Load(600, arrivals=ArrivalProcess.at(20.0)), monkeypatch, replicas=2)
    for metric in ("throughput_rps", "whole_mean_s", "ttft_mean_s"):
        assert report.figure(metric).error_at_pace == pytest.approx(0.0, abs=0.05), metric


@pytest.mark.parametrize(("rate_per_s", "count"), [(2.7, 120), (0.5, 60), (0.0544, 24)])
def test_the_demo_measures_for_two_minutes_or_for_a_few_requests(rate_per_s: float, count: int) -> None:
    """120 requests at the rate of a plan for a busy machine, 0.054 a second, took 37 minutes."""
    found = Capacity(rate_per_s=rate_per_s, whole_s=9.0, share_kept=0.99, num_requests=2000, warm_up_requests=128)
    assert num_requests(fake_plan().with_estimate(capacity=found)) == count


class Elsewhere(BaseHTTPRequestHandler):
    """The endpoint of another engine: it answers every prompt with the server's `events`, each of which ends with its
    `end`.
    """

    server: Any
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.say(json.dumps({"data": [{"id": "m", "owned_by": self.server.owner}]}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(asked)
        events = [*map(json.dumps, self.server.events), "[DONE]"]
        self.say(b"".join(b"data: %s%s" % (event.encode(), self.server.end) for event in events))

    def say(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def benched_at_url(
    events: list[dict[str, Any]],
    end: bytes = b"\n\n",
    owner: str = "sglang",
    load: Load | None = None,
    handler: type[Elsewhere] = Elsewhere,
) -> tuple[UrlReport, list[dict[str, Any]]]:
    """Return the report, and the requests that the endpoint got."""
    asked: list[dict[str, Any]] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.events, server.end, server.owner, server.asked = events, end, owner, asked  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            report = bench(f"http://127.0.0.1:{server.server_port}", load or Load(2, concurrency=1)).report
        finally:
            server.shutdown()
    assert isinstance(report, UrlReport)
    return report, asked


CHUNKS = [{"choices": [{"text": text}]} for text in ("", "a ", "b c", "d", "")]
USAGE = {"choices": [], "usage": {"completion_tokens": 7}}


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize(
    ("events", "tokens_from", "tokens", "note"),
    [
        ([{"choices": [{"text": "ab", "token_ids": [1, 2]}]}], "token_ids", 2, ""),
        (CHUNKS, "chunks", 3, "neither token ids nor usage"),
        ([*CHUNKS, USAGE], "usage", 7, "no token ids"),
    ],
)
def test_without_token_ids_chunks_of_text_count(
    events: list[dict[str, Any]], tokens_from: str, tokens: int, note: str, end: bytes
) -> None:
    """Servers other than vLLM and xgpt send no token ids, and some end lines with CR LF: both failed."""
    report, asked = benched_at_url(events, end)
    assert all(body["stream_options"] == {"include_usage": True} for body in asked)
    assert (report.num_requests, report.num_failed, report.tokens_from) == (2, 0, tokens_from)
    assert report.output_tokens_per_s / report.throughput_rps == pytest.approx(tokens)
    assert note in " ".join(map(str, render.url_report(report)[1:]))


def test_figures_of_a_url_have_the_names_of_a_plan_s(capsys: pytest.CaptureFixture[str]) -> None:
    """`xgpt bench URL` called `end_to_end_p99_s` what `xgpt bench PLAN` calls whole time p99."""
    render.show(*render.url_report(benched_at_url([*CHUNKS, USAGE])[0]))
    out = capsys.readouterr().out
    names = ("throughput_rps", "ttft_p50_s", "ttft_p99_s", "whole_p50_s", "whole_p99_s", "itl_p99_s")
    assert [name for name in names if render.METRICS[name] not in out] == []
    assert "_s " not in out and "failed requests: 0" in out


class Silent(Elsewhere):
    """Takes every request, and never answers."""

    def do_POST(self) -> None:
        while self.rfile.read(1):
            pass


def test_a_server_that_stops_answering_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """`xgpt bench URL` waited for ever."""
    monkeypatch.setattr("xgpt.connection.READ_TIMEOUT_S", 0.2)
    failure = r"^all 2 requests to .* failed: TimeoutError: the server sent nothing within 0\.2 s$"
    with pytest.raises(MachineError, match=failure):
        benched_at_url([], load=Load(20, concurrency=2), handler=Silent)


@pytest.mark.parametrize("owner", ["sglang", "vllm"])
def test_an_engine_of_others_ends_each_output_where_the_workload_does(owner: str) -> None:
    """A vLLM under its own scheduler was told only the longest output, so every output had that length."""
    load = Load(24, concurrency=4)
    _, asked = benched_at_url([{"choices": [{"text": "a", "token_ids": [1]}]}], owner=owner, load=load)
    lengths = {body["max_tokens"] for body in asked}
    assert len(lengths) > 8
    assert all(body.get("ignore_eos", False) == (owner == "vllm") for body in asked)


def test_an_answer_without_tokens_has_failed() -> None:
    with pytest.raises(MachineError, match=r"all 2 requests to .* failed: the answer has no tokens"):
        benched_at_url([{"choices": [{"text": "", "finish_reason": "stop"}]}])
