"""Worlds that hold replicas: processes on this machine, Deployments on Kubernetes."""
