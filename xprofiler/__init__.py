"""Step times of a model on a device: measured through xrunner's own layers, or computed from a datasheet.

A ModelSpec and a ClusterSpec enter, a Profile leaves. Only `xprofiler.measure` loads torch.
"""
