"""Everything between a socket and the engine's client: connections, routes, and a request's path to its answer.

Clients' bytes enter, answers' bytes leave. This package imports all other packages of the server; only `xrunner.server`
may import it.
"""
