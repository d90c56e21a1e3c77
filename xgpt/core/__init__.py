"""Define schemas, scheduling rules, errors, files and workloads. This package imports no other package of xgpt."""
