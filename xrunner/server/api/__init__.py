"""Parse requests for tokens, and write their answers.

The input is bodies, texts and sampled tokens. The output is checked requests, token ids, and JSON or server-sent
events. Nothing here depends on sockets, keys or the engine. May be imported by all other packages of the server.
"""
