"""Simulate TCB on a V100 with rows of every kind and flattened batches. `benchmarks.papers` shows the results."""
