"""Predict the performance of a schedule: step costs from a profile, closed forms, and a simulated engine.

xscheduler and xgpt may import this package. It never loads torch.
"""

from xgpt.core.compiled_code import set_directory

set_directory()
