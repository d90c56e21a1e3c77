"""Run TCB's row batches. A slot contains several prompts, and a mask restricts attention to each request.

`rows` runs a batch. `worker` runs a served plan's steps (`xgpt serve --batching`). Only xrunner.build and benchmarks
may import this package.
"""
