"""Predict the performance of a schedule: step costs from a profile, closed forms, and a simulated engine.

The input is a Profile, a Workload and policy settings. The output is an Estimate or a log of simulated steps.
xscheduler and xgpt may import this package. It never loads torch.
"""

from xgpt.core.compiled_code import set_directory

set_directory()
