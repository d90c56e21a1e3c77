"""What /metrics shows: Prometheus counters, gauges and histograms in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from xgpt.policies import Pool

STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
OVERHEAD_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)


class Metrics:
    """Changed from the event loop alone; the gauges read the pool when asked."""

    def __init__(self, pool: Pool) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("xgpt_requests", "Requests that ended, by how.", ["finish_reason"], registry=registry)
        self.prompt_tokens = Counter("xgpt_prompt_tokens", "Prompt tokens taken in.", registry=registry)
        self.output_tokens = Counter("xgpt_output_tokens", "Tokens generated.", registry=registry)
        self.deadlines = Counter(
            "xgpt_deadlines",
            "Requests with a deadline that ended, by whether they met it.",
            ["outcome"],
            registry=registry,
        )
        self.utility = Counter(
            "xgpt_deadline_utility",
            "What the met deadlines were worth: one over the prompt's tokens each.",
            registry=registry,
        )
        self.step_s = Histogram(
            "xgpt_step_seconds", "Duration of an engine step.", buckets=STEP_BUCKETS_S, registry=registry
        )
        self.ttft_s = Histogram(
            "xgpt_time_to_first_token_seconds",
            "From taking a request in to its first token.",
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
        self.inter_token_s = Histogram(
            "xgpt_inter_token_latency_seconds",
            "Between two tokens of a request.",
            buckets=STEP_BUCKETS_S,
            registry=registry,
        )
        self.e2e_s = Histogram(
            "xgpt_e2e_request_latency_seconds",
            "From taking a request in to its last token.",
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
        self.handover_s = Histogram(
            "xgpt_handover_seconds",
            "Own overhead: from a request's head to its hand-over to the engine, its body's way included.",
            buckets=OVERHEAD_BUCKETS_S,
            registry=registry,
        )
        self.delivery_s = Histogram(
            "xgpt_delivery_seconds",
            "Own overhead: from the end of the step that sampled a token to the writing of its bytes.",
            buckets=OVERHEAD_BUCKETS_S,
            registry=registry,
        )
        running = Gauge("xgpt_requests_running", "Requests that hold a slot.", registry=registry)
        running.set_function(lambda: pool.num_running)
        waiting = Gauge("xgpt_requests_waiting", "Requests that wait for a slot.", registry=registry)
        waiting.set_function(lambda: len(pool.waiting))

    def note_deadline(self, *, met: bool, prompt_tokens: int) -> None:
        """A request with a deadline has ended. Source of the utility: TCB sec. 5.1."""
        self.deadlines.labels("met" if met else "missed").inc()
        if met:
            self.utility.inc(1 / prompt_tokens)

    def render(self) -> bytes:
        return generate_latest(self._registry)
