"""Export plans to other platforms: scripts, Kubernetes objects, deployments of Dynamo and llm-d."""
