"""Report on the server: metrics, logs, traces, the backlog, and how its plan performs.

The input is requests, steps and tokens. The output is figures, log lines, spans and decisions to re-plan. The engine's
client and `http` may import it.
"""
