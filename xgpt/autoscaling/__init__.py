"""Recommend from the live load how many replicas a fleet needs, and publish this number for an autoscaler."""
