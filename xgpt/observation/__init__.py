"""Observe the lengths of served requests, and detect changes in them."""
