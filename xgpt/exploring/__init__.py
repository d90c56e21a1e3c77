"""The local planning page of `xgpt ui`."""
