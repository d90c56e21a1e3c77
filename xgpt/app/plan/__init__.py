"""Turn a request into a plan: find or make a profile, search the policies, check the figures by simulation."""
