"""Worlds in which replicas run: processes on this machine, Deployments on Kubernetes."""
