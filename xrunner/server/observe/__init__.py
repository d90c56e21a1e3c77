"""What the server knows of its own work: metrics, logs, traces, the backlog, and how its plan fares.

Requests as they come, steps and tokens as they end, enter; figures, lines of log, spans and decisions to re-plan leave.
May be imported by the engine's thread and `http`.
"""
