"""Serve the local planning page of `xgpt ui`."""
