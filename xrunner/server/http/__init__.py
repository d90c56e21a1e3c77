"""Everything between a socket and the engine's thread: connections, routes, and a request on its way to its answer.

Bytes of clients enter; bytes for them leave. Imports all other rooms; may be imported by `xrunner.server` alone.
"""
