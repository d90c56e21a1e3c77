"""Compute every figure of the papers that can be computed, next to xgpt's prediction: `python -m benchmarks.papers`."""
