"""Write plans for other platforms: scripts, Kubernetes objects, deployments of Dynamo and llm-d."""
