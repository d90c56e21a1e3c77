"""Serve a plan on this machine: check the plan, start its engine, and open its endpoint."""
