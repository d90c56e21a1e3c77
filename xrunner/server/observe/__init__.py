"""The server's reports on itself: metrics, logs, traces, the backlog, and how its plan performs.

Requests, steps and tokens enter; figures, log lines, spans and decisions to re-plan leave.
The engine's client and `http` may import it.
"""
