"""Plan a day's fleet: group a trace's intervals, plan each kind of replica, choose how many of each run in each
interval."""
