"""Which requests are let in: host names, API keys, and what each key has left of its minute.

Heads of requests and a file of keys enter; a `Key` and a `Quota`, or a refusal, leave. May be imported by `observe`,
`http` and the server's own modules.
"""
