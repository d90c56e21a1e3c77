"""Recommend the number of a fleet's replicas from the live load, and publish the number for an autoscaler."""
