"""Compare predictions with published measurements."""
