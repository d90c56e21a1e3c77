"""Write the files that start a plan elsewhere: scripts, Compose files, Kubernetes objects, and deployments of Dynamo
and llm-d.
"""
