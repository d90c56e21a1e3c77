"""TCB's batches in rows: prompts concatenated, in slots, each request's attention masked to itself.

A `RowBatch` (`xgpt.policies.tcb`) enters, tokens leave. Runs the layers that serve, to be compared with the
flattened batch that does serve (`python -m benchmarks.tcb`); `xsimulator.tcb` says what such a batch costs. May be
imported by benchmarks.
"""
