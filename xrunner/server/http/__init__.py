"""Handle connections and routes, and take each request from its bytes to its answer.

This package imports all other packages of the server. Only `xrunner.server` may import it."""
