"""Serve a tiny model with seeded weights on this machine, request tokens, and compare measurement with prediction."""

import httpx

import xgpt
from xgpt.core.schema import Histogram, Workload
from xgpt.resolve import load_model

SPEC, _ = load_model("opt-125m")
TINY = SPEC.model_copy(
    update={
        "name": "tiny",
        "num_layers": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 16,
        "ffn_size": 256,
        "vocab_size": 512,
    }
)
LENGTHS = Workload(
    name="short",
    input=Histogram(lengths=(8, 32), probabilities=(0.5, 0.5)),
    output=Histogram(lengths=(4, 16), probabilities=(0.5, 0.5)),
)

plan = xgpt.plan(model=TINY, workload=LENGTHS, latency_bound_s=None, policy="orca", headroom=0.1)
with xgpt.served(plan) as url:
    body = {"model": "tiny", "prompt": [2, 100, 200], "max_tokens": 8}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    print(answer["usage"])

for figure in xgpt.bench(plan, num_requests=50).report.figures:
    print(f"{figure.metric}: predicted {figure.predicted:.4g}, measured {figure.measured:.4g}")
