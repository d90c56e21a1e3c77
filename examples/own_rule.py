"""Write a scheduling rule of your own, check it, and compare it with the plan's: shortest prompts first, with aging."""

import xgpt
from xgpt.testing import check_rule


class ShortestFirst(xgpt.Rule):
    """The shortest prompt enters next. A second of waiting counts as much as `tokens_per_s` tokens less."""

    def __init__(self, tokens_per_s: float = 1000.0) -> None:
        self.tokens_per_s = tokens_per_s

    def key(self, request):
        # Its order among waiting requests is that of length - tokens_per_s * age at any time.
        return request.input_length + self.tokens_per_s * request.arrival_ns / 1e9


class PrefillFirst(ShortestFirst):
    """A step with prompts decodes nothing."""

    def next_step(self, pool, batch, *, may_encode=True):
        step = super().next_step(pool, batch, may_encode=may_encode)
        return step._replace(decode=()) if step is not None and step.encode else step


if __name__ == "__main__":
    plan = xgpt.plan(
        model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", latency_bound_s=8.0, policy="chunked"
    )
    for rule in (xgpt.Rule(), ShortestFirst(), PrefillFirst()):
        check_rule(rule)
        figures = xgpt.simulate(plan, num_requests=1000, arrival_rate_per_s=24, rule=rule).figures
        print(f"{type(rule).__name__}: TTFT p50 {figures['ttft_p50_s']:.2f} s, p99 {figures['ttft_p99_s']:.2f} s")
