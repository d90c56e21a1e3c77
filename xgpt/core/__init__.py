"""The foundation: schemas, the scheduling rule, errors, files and workloads. It imports no other package of ours."""
