"""Recommend a fleet's replicas from its live load, and publish the numbers for an autoscaler."""
