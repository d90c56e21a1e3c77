"""Define the metrics at /metrics: Prometheus counters, gauges and histograms in a separate registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from xgpt.core.schema import Account, Decision, FailedJudgement
from xgpt.core.schema.constraint import Bounds
from xgpt.observation.windows import Seen
from xrunner.channel.remote import RemoteEngine
from xrunner.server.observe.watch import Watch

NAN = float("nan")

STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
OVERHEAD_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)


class Metrics:
    """The server's metrics. Only the event loop changes them."""

    def __init__(self, engine: RemoteEngine, watch: Watch) -> None:
        self._registry = CollectorRegistry()
        self._gauges: list[tuple[Gauge, Callable[[], float]]] = []
        counter, buckets = self._counter, self._buckets
        self.requests = counter("xgpt_requests", "Requests that ended, by finish reason.", "finish_reason")
        self._answers = counter(
            "xgpt_http_answers", "HTTP answers, by status. 0 means that the client left before the answer.", "status"
        )
        self.prompt_tokens = counter("xgpt_prompt_tokens", "Prompt tokens of accepted requests.")
        self.cached_tokens = counter(
            "xgpt_prompt_tokens_cached", "Prompt tokens whose K/V an earlier request had cached."
        )
        self.output_tokens = counter("xgpt_output_tokens", "Generated output tokens.")
        self._accounts = counter(
            "xgpt_key_tokens", "Tokens of ended requests, by API key and by kind: prompt or output.", "key", "kind"
        )
        text = (
            "Completed requests, by API key and by whether they kept the key's bounds; those that did are the goodput."
        )
        self._bounds = counter("xgpt_key_bounds", text, "key", "kept")
        self._class_tokens = counter(
            "xgpt_class_tokens", "Tokens of ended requests, by class and by kind: prompt or output.", "class", "kind"
        )
        text = "Completed requests, by class and by whether they kept the class's bounds."
        self._class_bounds = counter("xgpt_class_bounds", text, "class", "kept")
        self.deadlines = counter("xgpt_deadlines", "Requests with a deadline that ended, by outcome.", "outcome")
        self.utility = counter(
            "xgpt_deadline_utility", "Sum of 1 / (number of prompt tokens) over the requests that met their deadlines."
        )
        self.step_s = buckets("xgpt_step_seconds", "Seconds that an engine step took.", STEP_BUCKETS_S)
        text = "Seconds from accepting a request to its first token."
        self.ttft_s = buckets("xgpt_time_to_first_token_seconds", text, REQUEST_BUCKETS_S)
        text = "Seconds between two tokens of a request."
        self.inter_token_s = buckets("xgpt_inter_token_latency_seconds", text, STEP_BUCKETS_S)
        text = "Seconds from accepting a request to its last token."
        self.e2e_s = buckets("xgpt_e2e_request_latency_seconds", text, REQUEST_BUCKETS_S)
        text = "Seconds from reading a request to submitting it to the engine: overhead of the server."
        self.handover_s = buckets("xgpt_handover_seconds", text, OVERHEAD_BUCKETS_S)
        text = "Seconds from the end of the step that sampled a token until it is written: overhead of the server."
        self.delivery_s = buckets("xgpt_delivery_seconds", text, OVERHEAD_BUCKETS_S)
        self._gauge("xgpt_requests_running", "Requests that are running.", lambda: len(engine.pool.running))
        self._gauge("xgpt_requests_waiting", "Requests that wait to start.", lambda: len(engine.pool.waiting))
        self._gauge(
            "xgpt_kv_blocks_used", "K/V blocks reserved for requests.", lambda: engine.pool.room.reserved_blocks
        )
        self._gauge(
            "xgpt_kv_blocks_kept", "K/V blocks cached for later requests.", lambda: engine.pool.room.kept_blocks
        )
        self._gauge("xgpt_kv_blocks", "K/V blocks in total.", lambda: engine.pool.limits.kv_blocks)
        self._gauge(
            "xgpt_preemptions",
            "Number of preemptions since the start; a preempted request loses its K/V and is encoded again.",
            lambda: engine.pool.room.num_preemptions,
        )
        self._registry.register(_Processes(engine))
        self._watch = watch
        self._observe(watch)

    def _observe(self, watch: Watch) -> None:
        text = "Decisions of re-planning, failed ones included, by outcome and cause."
        replans = self._counter("xgpt_plan_decisions", text, "action", "cause")
        text = "Seconds that re-planning took for a decision, or until it failed."
        planning_s = self._buckets("xgpt_planning_seconds", text, REQUEST_BUCKETS_S)

        unbuilt = self._counter("xgpt_plan_candidates_unbuilt", "Candidates that re-planning skipped as unusable.")
        self._gauge(
            "xgpt_plan_failures",
            "Number of judgements of the plan that have failed since the last one that did not.",
            lambda: watch.num_failures,
        )

        def count(decision: Decision | FailedJudgement) -> None:
            if isinstance(decision, Decision):
                unbuilt.inc(decision.num_unbuilt)
            replans.labels(decision.action, decision.cause).inc()
            planning_s.observe(decision.planning_s)

        watch.on_decision = count
        self._gauge(
            "xgpt_planned_throughput",
            "Requests/s that the running plan serves at saturation, as predicted.",
            lambda: watch.plan.estimate.throughput_rps,
        )
        self._gauge(
            "xgpt_planned_latency_seconds",
            "Predicted latency of the running plan, in seconds (`estimate.latency_s` in /plan).",
            lambda: watch.plan.estimate.latency_s,
        )
        bound, begin = watch.plan.constraint.latency_bound_s, watch.plan.constraint.counts_from
        if bound is not None:
            self._gauge(
                "xgpt_latency_bound_seconds",
                f"The plan's bound on the seconds from a request's {begin} to its last token.",
                lambda: bound,
            )
        self._gauge(
            "xgpt_recent_throughput",
            "Rate at which requests ended recently, in requests/s.",
            lambda: watch.recent.rate_per_s() or 0.0,
        )
        self._gauge(
            "xgpt_step_time_ratio",
            "Measured time of recent steps divided by the time that the plan predicted.",
            lambda: watch.step_ratio or NAN,
        )
        self._gauge(
            "xgpt_look_seconds_max",
            "Longest time in seconds for which a check of the lengths occupied the event loop.",
            lambda: watch.loop_s,
        )
        names = ("observed_input_tokens", "observed_output_tokens", "input_distance_tokens", "output_distance_tokens")
        texts = (
            "Mean prompt tokens of recent requests.",
            "Mean output tokens of recent requests; a running output counts as at least as long as it is now.",
            "Wasserstein distance of recent prompt lengths from the planned ones, in tokens.",
            "Wasserstein distance of recent output lengths from the planned ones, in tokens.",
        )
        self._lengths = [
            Gauge(f"xgpt_{name}", text, registry=self._registry) for name, text in zip(names, texts, strict=True)
        ]
        self._gauge(
            "xgpt_arrival_rate",
            "Arrival rate in requests/s since the 64th latest arrival, over at least a second and at most a minute.",
            lambda: watch.arrival_rate_per_s,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _buckets(self, name: str, text: str, edges: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, registry=self._registry, buckets=edges)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._gauges.append((Gauge(name, text, registry=self._registry), read))

    def families(self) -> list[Metric]:
        return sorted(self._registry.collect(), key=lambda family: family.name)

    def tell_lost_steps(self, read: Callable[[], float]) -> None:
        self._gauge(
            "xgpt_step_log_lost", "Number of steps that are missing in the step log, because writing it failed.", read
        )

    def note_answer(self, status: int) -> None:
        """Count an HTTP answer by its status. 0 means that the client left before the answer."""
        self._answers.labels(str(status)).inc()

    def note_deadline(self, *, met: bool, prompt_tokens: int) -> None:
        """Count an ended request that had a deadline. Source of the utility: TCB sec. 5.1."""
        self.deadlines.labels("met" if met else "missed").inc()
        if met:
            self.utility.inc(1 / prompt_tokens)

    def note_account(self, account: Account, seen: Seen) -> None:
        for name, tokens in ((account.key, self._accounts), (account.of_class, self._class_tokens)):
            if name:
                tokens.labels(name, "prompt").inc(seen.input_length)
                tokens.labels(name, "output").inc(seen.generated)

    def note_bounds(self, account: Account, took: tuple[float, float, float], bounds: Bounds) -> bool | None:
        """Count a complete request, and return whether it kept the bounds of its key, or None if no bounds apply.

        A key without bounds has the plan's bounds. A request of a class without bounds always counts as keeping its
        bounds. `took`: seconds to the last and to the first token, and between tokens."""
        if not (bounds.given or account.of_class):
            bounds = self._watch.plan.constraint.bounds
        if not (bounds.given or account.of_class):
            return None
        is_kept = all(bound is None or seconds <= bound for seconds, bound in zip(took, bounds, strict=True))
        kept = "yes" if is_kept else "no"
        self._bounds.labels(account.key, kept).inc()
        if account.of_class:
            self._class_bounds.labels(account.of_class, kept).inc()
        return is_kept

    def goodput(self) -> dict[str, dict[str, int]]:
        """Return, for each key, how many requests kept the key's bounds and how many did not."""
        return _goodput(self._bounds)

    def goodput_of_classes(self) -> dict[str, dict[str, int]]:
        return _goodput(self._class_bounds)

    def read(self) -> Callable[[], bytes]:
        """Read the gauges, in the event loop. The function returned makes the page, in any thread."""
        for gauge, read in self._gauges:
            gauge.set(read())
        now = self._watch.snapshot(lengths_alone=True)

        def page() -> bytes:
            observed = None if now is None else now.observation()
            if observed is not None:
                means = observed.workload.input.mean, observed.workload.output.mean
                values = (*means, observed.input_distance, observed.output_distance)
                for gauge, value in zip(self._lengths, values, strict=True):
                    gauge.set(value)
            return generate_latest(self._registry)

        return page


def _goodput(counter: Counter) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for sample in (sample for family in counter.collect() for sample in family.samples):
        if sample.name.endswith("_total"):
            name, kept = sample.labels.values()
            counts = found.setdefault(name, {"kept": 0, "broken": 0})
            counts["kept" if kept == "yes" else "broken"] = int(sample.value)
    return dict(sorted(found.items()))


class _Processes(Collector):
    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        control = CounterMetricFamily(
            "xgpt_control_bytes", "Bytes of control messages that a process has sent.", labels=["process"]
        )
        tensors = CounterMetricFamily(
            "xgpt_tensor_bytes", "Bytes of tensors that a process has sent, K/V included.", labels=["process"]
        )
        busy_s = CounterMetricFamily(
            "xgpt_busy_seconds", "Seconds for which a process executed steps.", labels=["process"]
        )
        for use in self._engine.uses():
            control.add_metric([use.process], use.control_bytes)
            tensors.add_metric([use.process], use.tensor_bytes)
            busy_s.add_metric([use.process], use.busy_s)
        yield from (control, tensors, busy_s)
