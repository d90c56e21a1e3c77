"""One replica of a plan on many devices: a process for each, a control plane and a tensor plane between them.

The input is a Deployment and steps. The output is tokens. Tensors travel in torch.distributed groups, control messages
over ZeroMQ; a worker forwards a control message before its device starts on it. Source: ORCA sec. 4.1.

- `deployment`: which worker holds what; `messages`, `sockets`: the control plane; `tensors`: the tensor plane
- `process`: what a worker runs; `launcher`: what starts the workers of a machine; `on_ray`: starts it on other machines
- `workers`: starts and watches all workers, from the engine's process; `executor`: the same as one
  `xrunner.executor.Executor`
"""
