"""One replica of a plan on many devices: a process for each, a control plane and a tensor plane between them.

A Deployment and steps enter; tokens leave. Tensors travel in torch.distributed groups; control messages travel
over ZeroMQ, and each worker hands them on before its device has done anything. Source: ORCA sec. 4.1.

- `deployment`: which worker holds what; `messages`, `sockets`: the control plane; `tensors`: the tensor plane
- `process`: what a worker runs; `launcher`: what starts the workers of a machine, and starts them anew
- `fleet`: the workers seen from the engine's process; `executor`: the same as one `xrunner.executor.Executor`
"""
