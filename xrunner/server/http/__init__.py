"""Everything between a socket and the engine's client: connections, routes, and a request's path to its answer.

Its input is the bytes of clients, its output the bytes of answers. This package imports all other packages of the
server. Only `xrunner.server` may import it.
"""
