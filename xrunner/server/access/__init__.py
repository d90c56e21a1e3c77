"""Decide which requests are accepted: by host name, by API key, and by the key's limits per minute.

Its input is the headers of requests and a file of keys. Its output is a `Key` and a `Quota`, or a refusal. May be
imported by `observe`, `http` and the server's own modules.
"""
