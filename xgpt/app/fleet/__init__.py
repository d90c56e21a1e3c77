"""Fleets: from a day's load to replicas in each interval, and the controller that keeps to it.

`day` reads the load, `kinds` finds replicas that may hold it, `planning` puts them together.
"""
