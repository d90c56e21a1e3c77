"""Plan a day's fleet: group intervals, plan kinds of replicas, and choose their numbers for each interval."""
