"""Simulate arrivals by counts: the same steps as in `xsimulator.events`, compiled and much faster.

This is a second implementation of the policies' rule, kept for a measured reason. A search for the highest arrival rate
on 48 devices makes 5 to 25 runs for each policy, about 60 for a plan. A run by counts takes 2 to 3 ms, a run of the
simulated engine 230 to 600 ms (`python -m benchmarks.simulator`, Zen 4), so a plan would take about 20 s instead of 2.
`tests/contract/test_counts.py` checks that the two agree: for random settings, placements and lengths, every request
has the same times in both, to the nanosecond.
"""
