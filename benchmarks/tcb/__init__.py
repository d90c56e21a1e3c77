"""TCB on a simulated V100: rows of every kind and the flattened batch; `benchmarks.papers` shows the results."""
