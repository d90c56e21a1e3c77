"""TCB's batches in rows: prompts concatenated, in slots, each request's attention masked to itself.

A `RowBatch` (`xgpt.core.policies.tcb`) enters, tokens leave, through the layers that serve the flattened batch.
`rows` runs a batch, `worker` the steps of a served plan (`xgpt serve --batching`); `benchmarks.tcb.row_cost` says what
such a batch costs. May be imported by xrunner.build and benchmarks.
"""
