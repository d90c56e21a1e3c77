"""Run TCB's row batches. A slot contains several prompts, and a mask restricts attention to each request.

The input is a `RowBatch` (`xgpt.core.policies.tcb`). The output is tokens. `rows` runs a batch. `worker` runs a served
plan's steps (`xgpt serve --batching`). `benchmarks.tcb.row_cost` measures the cost of such batches. Only xrunner.build
and benchmarks may import this package.
"""
