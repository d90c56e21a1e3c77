"""Find the schedule with the highest throughput under a bound, and prove how close it is to the optimum.

The input is a profile, a model, a cluster, a workload and a constraint. The output is a Plan. xgpt may import this
package. It never loads torch.
"""
