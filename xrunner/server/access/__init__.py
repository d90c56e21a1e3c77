"""Decide which requests are let in: host names, API keys, and each key's limits a minute.

Heads of requests and a file of keys enter; a `Key` and a `Quota`, or a refusal, leave. May be imported by `observe`,
`http` and the server's own modules.
"""
