"""Compute every figure of the papers that can be computed, beside the product's prediction: `python -m
benchmarks.papers`."""
