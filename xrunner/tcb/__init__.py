"""TCB's batches in rows: prompts concatenated, in slots, each request's attention masked to itself.

The input is a `RowBatch` (`xgpt.core.policies.tcb`), the output is tokens. The layers are those of the flattened batch.
`rows` runs a batch, and `worker` the steps of a served plan (`xgpt serve --batching`); `benchmarks.tcb.row_cost`
measures the cost of such batches. May be imported by xrunner.build and benchmarks.
"""
