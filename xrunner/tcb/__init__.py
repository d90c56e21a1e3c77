"""Run TCB's batches in rows: prompts are concatenated in slots, and a mask restricts attention to each request.

The input is a `RowBatch` (`xgpt.core.policies.tcb`). The output is tokens. The layers are those of ordinary serving.
`rows` runs a batch, and `worker` the steps of a served plan (`xgpt serve --batching`). `benchmarks.tcb.row_cost`
measures the cost of such batches. May be imported by xrunner.build and benchmarks.
"""
