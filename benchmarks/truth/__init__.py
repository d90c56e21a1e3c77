"""Compare predictions with published measurements and with this machine's own."""
