"""One file a use of the product; wires profiler, simulator, scheduler and runner together.

Imports of the heavy packages stand inside the functions.
"""
