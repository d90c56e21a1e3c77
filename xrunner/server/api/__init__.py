"""Parse requests for tokens, and write their answers.

Nothing here depends on sockets, keys or the engine. May be imported by all other packages of the server."""
