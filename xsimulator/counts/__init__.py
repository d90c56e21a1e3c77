"""Simulate arrivals by counts: the steps of `xsimulator.events` at a fraction of their cost, compiled.

This is a second copy of the rule, and kept for a measured reason. A search for the highest arrival rate on 48 devices
makes 5 to 25 runs for each policy, some 60 for a plan. By counts a run takes 2 to 3 ms, by the engine 230 to 600 ms
(`python -m benchmarks.simulator`, Zen 4): a plan would take some 20 s instead of 2. `tests/contract/test_counts.py`
keeps the copy honest: for random settings, placements and lengths, every request has the times that the engine gives
it, to the nanosecond.
"""
