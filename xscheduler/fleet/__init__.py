"""Plan a fleet for a day: group intervals by lengths, plan kinds of replicas, and choose their numbers by interval."""
