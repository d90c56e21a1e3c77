"""Decide which requests are accepted: by host name, by API key, and by the key's limits per minute.

May be imported by `observe`, `http` and the server's own modules."""
