"""Every figure of the papers that can be computed, beside what the product predicts: `python -m benchmarks.papers`."""
