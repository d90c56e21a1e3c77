"""`xgpt watch`: which assumption of a plan an engine's metrics refute, and that none falls while nothing happens."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import ClassVar

import numpy as np
import pytest

import xgpt
from tests.rings import examples
from xgpt.core.errors import InputError, MachineError
from xgpt.core.schema import Histogram, Plan, Workload
from xgpt.core.schema.tuning import WatchAlarm
from xgpt.metrics_pages import samples_of
from xgpt.tuning.metrics import KNOWN, Page, page_of
from xgpt.tuning.watch import roll
from xgpt.tuning.watching import Watcher

EDGES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, float("inf"))
SECONDS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.5, float("inf"))
SHORT = Workload(
    name="short",
    input=Histogram(lengths=(100, 300, 600), probabilities=(0.3, 0.4, 0.3)),
    output=Histogram(lengths=(20, 60, 150), probabilities=(0.3, 0.4, 0.3)),
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    asked = {"model": "llama-3.1-8b", "cluster": "h200x1", "workload": SHORT, "policy": "chunked"}
    return xgpt.plan(**asked, latency_bound_s=30.0, engine="vllm", objective="saturated")


class Engine:
    """Counters that grow as requests end."""

    NAMES: ClassVar = {
        "vllm": ("vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:inter_token_latency_seconds"),
        "sglang": (
            "sglang:prompt_tokens_histogram",
            "sglang:generation_tokens_histogram",
            "sglang:inter_token_latency_seconds",
        ),
        "dynamo": (
            "dynamo_frontend_input_sequence_tokens",
            "dynamo_frontend_output_sequence_tokens",
            "dynamo_frontend_inter_token_latency_seconds",
        ),
    }
    ENDED: ClassVar = {
        "vllm": "vllm:request_success",
        "sglang": "sglang:num_requests",
        "dynamo": "dynamo_frontend_requests",
    }

    def __init__(self, kind: str = "vllm", seed: int = 0) -> None:
        self.kind, self.rng = kind, np.random.default_rng(seed)
        self.seen: list[list[float]] = [[], [], []]
        self.queries = self.hits = 0.0

    def serve(self, count: int, scale: float = 1.0, gap_s: float = 0.03, reused: float = 0.0) -> None:
        for values, lengths in zip(self.seen, (SHORT.input, SHORT.output), strict=False):
            values += (scale * self.rng.choice(lengths.lengths, count, p=lengths.probabilities)).tolist()
        self.seen[2] += (gap_s * np.exp(0.05 * self.rng.standard_normal(count))).tolist()
        self.queries, self.hits = self.queries + 300 * count, self.hits + 300 * reused * count

    def page(self) -> str:
        lines = []
        for name, values, edges in zip(self.NAMES[self.kind], self.seen, (EDGES, EDGES, SECONDS), strict=True):
            lines.append(f"# TYPE {name} histogram")
            found = np.sort(values)
            for edge in edges:
                shown = "+Inf" if edge == float("inf") else f"{edge:g}"
                lines.append(f'{name}_bucket{{le="{shown}"}} {np.searchsorted(found, edge, "right")}')
            lines += [f"{name}_count {len(values)}", f"{name}_sum {sum(values)}"]
        lines += [f"# TYPE {self.ENDED[self.kind]} counter", f"{self.ENDED[self.kind]}_total {len(self.seen[0])}"]
        if self.kind == "vllm":
            for name, value in (("queries", self.queries), ("hits", self.hits)):
                lines += [f"# TYPE vllm:prefix_cache_{name} counter", f"vllm:prefix_cache_{name}_total {value}"]
        return "\n".join(lines) + "\n"


def parse_page(text: str) -> Page | None:
    return page_of(samples_of(text, KNOWN) or ())


def watched(plan: Plan, engine: Engine, readings: int, start: int = 0, watcher: Watcher | None = None, **load: float):
    """The watcher after some readings, and the first alarm with the number of readings until it."""
    watcher = watcher or Watcher(plan)
    for number in range(1, readings + 1):
        engine.serve(10, **load)  # type: ignore[arg-type]
        page = parse_page(engine.page())
        assert page is not None
        alarm = watcher.note(5.0 * (start + number), page)
        if alarm is not None:
            return watcher, alarm, number
    return watcher, None, readings


def test_an_hour_in_which_nothing_happens_has_no_alarm(plan: Plan) -> None:
    assert watched(plan, Engine(), examples(720, 120))[1] is None


@pytest.mark.parametrize("kind", ["vllm", "sglang", "dynamo"])
def test_other_lengths_are_seen_within_minutes_on_each_engines_page(plan: Plan, kind: str) -> None:
    engine = Engine(kind)
    watcher, alarm, _ = watched(plan, engine, 60)
    assert alarm is None
    watcher, alarm, number = watched(plan, engine, 60, 60, watcher, scale=4.0)
    assert alarm is not None and alarm.cause == "input lengths" and number <= 24
    assert alarm.observed > 1.4 * alarm.planned and "prompts have" in alarm.text
    assert watcher.observed().input.mean > 1.4 * SHORT.input.mean


def test_slower_steps_and_repeated_prompts_are_told_apart(plan: Plan) -> None:
    engine = Engine()
    watcher, alarm, _ = watched(plan, engine, 60)
    _, alarm, number = watched(plan, engine, 60, 60, watcher, gap_s=0.042)
    assert alarm is not None and alarm.cause == "step times" and number <= 8
    engine = Engine()
    watcher, alarm, _ = watched(plan, engine, 60)
    watcher, alarm, number = watched(plan, engine, 60, 60, watcher, reused=0.5)
    assert alarm is not None and alarm.cause == "reuse" and number <= 12
    assert watched(plan, engine, 60, 60 + number, watcher, reused=0.5)[1] is None, "the same change alarms once"


def test_a_restarted_engine_is_no_change(plan: Plan) -> None:
    watcher, alarm, _ = watched(plan, Engine(), 60)
    _, alarm, _ = watched(plan, Engine(seed=1), 60, 60, watcher)
    assert alarm is None


@pytest.mark.parametrize("name", ["$(touch {})", "`touch {}`", "a; touch {};", '"; touch {}; "', "a\ntouch {}"])
def test_words_of_a_plan_are_no_commands(name: str, tmp_path: Path) -> None:
    """Between the user's double quotes, the name of a draft model was run."""
    word = shlex.quote(name.format(tmp_path / "run"))
    with pytest.raises(MachineError, match="to no shell"):
        roll('echo "{flags}"', f"vllm serve m --speculative-model {word}", ["http://127.0.0.1:1"])
    assert not (tmp_path / "run").exists()


def test_a_webhook_that_is_no_url_is_refused_before(plan: Plan) -> None:
    """The first alarm ended the watch."""
    with pytest.raises(InputError, match="webhook: 'file:///x' is not accepted; write it as"):
        xgpt.watch(plan, engine=("http://127.0.0.1:1",), webhook="file:///x", on_alarm=print)


def test_a_page_of_no_engine_is_refused() -> None:
    assert parse_page("up 1\n") is None and parse_page("<html>") is None


@contextmanager
def replica(engine: Engine, shift_after: int, hooks: list[dict[str, object]]) -> Iterator[str]:
    """The URL of an engine whose requests become four times as long after some readings, and of a webhook."""

    class Handler(BaseHTTPRequestHandler):
        readings = 0

        def do_GET(self) -> None:
            if self.path == "/metrics":
                Handler.readings += 1
                engine.serve(10, 4.0 if Handler.readings > shift_after else 1.0)
                body = engine.page()
            else:
                body = json.dumps({"object": "list", "data": [{"id": "llama", "object": "model"}]})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_POST(self) -> None:
            hooks.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_other_lengths_are_planned_for_posted_and_rolled_replica_by_replica(plan: Plan, tmp_path: Path) -> None:
    hooks: list[dict[str, object]] = []
    alarms: list[WatchAlarm] = []
    rolled, stop = tmp_path / "rolled", Event()

    def on_alarm(alarm: WatchAlarm) -> None:
        alarms.append(alarm)
        if alarm.command:
            stop.set()

    with replica(Engine(seed=1), 30, hooks) as first, replica(Engine(seed=2), 30, hooks) as second:
        asked = {"engine": (first, second), "look_s": 0.005, "webhook": f"{first}/hook"}
        xgpt.watch(plan, **asked, apply=f"echo {{url}} {{flags}} >> {rolled}", on_alarm=on_alarm, stop=stop)
    assert alarms[-1].command.startswith("vllm serve") and alarms[-1].gain
    assert len({alarm.cause for alarm in alarms}) == len(alarms), "the same shift on two replicas is one alarm"
    assert [hook["cause"] for hook in hooks] == [alarm.cause for alarm in alarms]
    lines = rolled.read_text(encoding="utf-8").splitlines()
    assert [line.split()[0] for line in lines] == [first, second]
    assert all("--max-num-batched-tokens" in line and "vllm serve" not in line for line in lines)


def test_a_failed_restart_leaves_the_other_replicas_alone(plan: Plan) -> None:
    with replica(Engine(seed=1), 30, []) as first, replica(Engine(seed=2), 30, []) as second:
        asked = {"engine": (first, second), "look_s": 0.005, "apply": ": {flags}; echo no room >&2; exit 3"}
        with pytest.raises(MachineError, match=r"could not be restarted \(exit code 3\): no room; no other was"):
            xgpt.watch(plan, **asked, on_alarm=lambda alarm: None)


def test_a_webhook_that_takes_nothing_is_said_with_the_alarm(plan: Plan) -> None:
    stop, alarms = Event(), list[WatchAlarm]()

    def on_alarm(alarm: WatchAlarm) -> None:
        alarms.append(alarm)
        stop.set()

    with replica(Engine(), 0, []) as url:
        xgpt.watch(plan, engine=(url,), look_s=0.005, webhook="http://127.0.0.1:9/", on_alarm=on_alarm, stop=stop)
    assert "the webhook took no alarm" in alarms[0].action
