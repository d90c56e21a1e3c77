"""Write the files that start a plan elsewhere: scripts, Kubernetes objects, deployments of Dynamo and llm-d."""
