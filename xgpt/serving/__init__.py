"""Serve a plan on this machine: check it, start its engine, open its endpoint."""
