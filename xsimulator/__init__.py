"""Predict what a schedule does: step costs from a profile, closed forms, and a simulated engine.

A Profile, a Workload and policy settings enter; an Estimate, or a log of simulated steps, leaves. May be imported
by xscheduler and xgpt. Never loads torch.
"""

from xgpt.core.compiled_code import set_directory

set_directory()
