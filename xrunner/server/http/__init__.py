"""Handle connections and routes, and take each request from its bytes to its answer.

Its input is the bytes of clients, its output the bytes of answers. This package imports all other packages of the
server. Only `xrunner.server` may import it.
"""
