"""The use cases behind `xgpt.api`: one folder or file each; they connect profiler, simulator, scheduler and runner.

Imports of the heavy packages stand inside the functions.
"""
