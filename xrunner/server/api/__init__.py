"""Parse requests for tokens, and write their answers.

Bodies, texts and sampled tokens enter; checked requests, token ids, and JSON or server-sent events leave. Nothing here
knows of sockets, keys or the engine. May be imported by all other packages of the server.
"""
