"""Plan under several latency bounds, and draw throughput against the bound into what_if.svg."""

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

import xgpt

BOUNDS_S = (4.0, 5.0, 6.0, 8.0, 12.0, 20.0)

throughput = {}
for bound_s in BOUNDS_S:
    try:
        plan = xgpt.plan(
            model="llama-3.1-8b",
            cluster="h200x1",
            workload="azure-conv",
            latency_bound_s=bound_s,
            objective="saturated",
        )
    except xgpt.InfeasibleError as error:
        print(f"{bound_s:g} s: {error}")
        continue
    throughput[bound_s] = plan.estimate.throughput_rps
    print(f"{bound_s:g} s: {plan.policy.kind}, {plan.estimate.throughput_rps:.2f} requests/s")

figure, axes = plt.subplots()
axes.plot(list(throughput), list(throughput.values()), marker="o")
axes.set(xlabel="latency bound, s", ylabel="throughput, requests/s", ylim=(0, None))
figure.savefig("what_if.svg")
