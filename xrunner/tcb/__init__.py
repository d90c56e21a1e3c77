"""TCB's batches in rows: prompts concatenated, in slots, each request's attention masked to itself.

A `RowBatch` (`xgpt.core.policies.tcb`) enters and tokens leave, computed by the same layers as the flattened batch.
`rows` runs a batch, and `worker` the steps of a served plan (`xgpt serve --batching`); `benchmarks.tcb.row_cost`
measures the cost of such batches. May be imported by xrunner.build and benchmarks.
"""
