"""Simulate arriving requests by counts, with the same steps as in `xsimulator.events`, but compiled and much faster.

The scheduling rules are implemented a second time here, because this saves much time. A run by counts takes 2 to 3 ms,
and a run of the simulated engine takes 230 to 600 ms (Zen 4). `tests/contract/test_counts.py` checks that every request
has the same times in both.
"""
