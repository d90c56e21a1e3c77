"""Find the best settings of a running engine with few measurements."""
