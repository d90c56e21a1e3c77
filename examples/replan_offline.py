"""Outputs have become half as long: print the plan for them, its gain, and the cost of the switch."""

from pathlib import Path

import xgpt

plan = xgpt.plan(
    model="llama-3.1-8b", cluster="h200x1", workload="azure-conv", latency_bound_s=8.0, objective="saturated"
)
today = Path("today.csv")
today.write_text("input,output\n" + "900,40\n1500,110\n400,150\n" * 400)

found = xgpt.replan(plan, today, horizon_s=600.0)
print(f"{found.decision.action}: {found.decision.reason}")
print(f"gain {found.decision.gain:+.1%}, pause {found.decision.pause_s:.1f} s")
print(f"from now on {found.plan.policy.kind}")
