"""Replay a trace on the simulated engine: at its own times, and at a rate with bursts."""

import random
from pathlib import Path

import xgpt

trace = Path("trace.csv")
draw = random.Random(0)
lines, now_s = ["input,output,timestamp_s"], 0.0
for _ in range(1500):
    now_s += draw.expovariate(4.0)
    lines.append(f"{draw.randint(50, 900)},{draw.randint(5, 300)},{now_s:.3f}")
trace.write_text("\n".join(lines) + "\n")

plan = xgpt.plan(model="llama-3.1-8b", cluster="h200x1", workload=trace, latency_bound_s=8.0, objective="saturated")
replayed = xgpt.simulate(plan, workload=trace, num_requests=300, own_times=True)
bursts = xgpt.simulate(plan, num_requests=300, arrival_rate_per_s=4.0, burstiness=3.0)
for name, run in (("the trace as it was", replayed), ("in bursts", bursts)):
    print(f"{name}: p99 {run.figures['whole_p99_s']:.2f} s, {run.figures['goodput']:.1%} within the bound")
Path("timeline.json").write_text(replayed.chrome_trace())
