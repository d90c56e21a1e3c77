"""Shared code of several benchmarks: servers of small models and of plans, and requests whose lengths change.

Every other file of `benchmarks` is a command: `python -m benchmarks.<name> --help` describes the measurement.
"""
