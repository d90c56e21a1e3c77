"""What the server reports of itself: metrics, logs, traces, the backlog, and how its plan performs.

Requests as they come, steps and tokens as they end, enter; figures, lines of log, spans and decisions to re-plan leave.
May be imported by the engine's thread and `http`.
"""
