"""Plans for other platforms: scripts, Kubernetes objects, Dynamo's and llm-d's deployments."""
