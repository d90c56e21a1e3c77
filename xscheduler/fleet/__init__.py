"""Plan a day's fleet: group a trace's intervals, plan each kind of replica, and choose how many replicas of each kind
run in each interval.
"""
