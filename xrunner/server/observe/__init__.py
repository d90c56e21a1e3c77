"""Report on the server: metrics, logs, traces, the backlog, and how its plan performs.

The engine's client and `http` may import it."""
