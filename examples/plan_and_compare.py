"""Plan Llama 3.1 8B on an H200 under a bound of 8 s, and compare the plan with a deployment of vLLM."""

import xgpt

PROBLEM = {"model": "llama-3.1-8b", "cluster": "h200x1", "workload": "azure-conv", "latency_bound_s": 8.0}

plan = xgpt.plan(**PROBLEM)
print(f"{plan.policy.kind}: {plan.estimate.capacity.rate_per_s:.2f} requests/s keep {PROBLEM['latency_bound_s']} s")

found = xgpt.compare(**PROBLEM, current="vllm serve llama --max-num-seqs 128 --max-num-batched-tokens 2048")
for kind, each in {**found.plans, "as it runs now": found.current}.items():
    rate = each.estimate.capacity.rate_per_s
    print(f"{kind:>15}: {rate:6.2f} requests/s, saturated {each.estimate.throughput_rps:6.2f}")
