"""Finds the schedule with the highest throughput under a bound, and proves how near it is to the optimum.

A profile, a model, a cluster, a workload and a constraint enter; a Plan leaves. May be imported by xgpt.
Never loads torch.
"""
