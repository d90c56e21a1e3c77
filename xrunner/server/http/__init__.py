"""Everything between a socket and the engine's client: connections, routes, and the way of a request to its answer.

Clients' bytes enter, answers' bytes leave. Imports all other rooms; only `xrunner.server` may import it.
"""
