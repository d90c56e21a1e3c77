"""Every figure of the papers that can be computed, with what the product predicts: `python -m benchmarks.papers`."""
