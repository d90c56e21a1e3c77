"""Observe the lengths of served requests, and detect when these lengths change."""
