"""Predictions held against measurements: what others published, and this machine's own."""
