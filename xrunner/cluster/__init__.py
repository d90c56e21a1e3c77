"""Run one replica of a plan on many devices, with one process for each device. A control plane and a tensor plane
connect the processes.

The input is a Deployment and steps. The output is tokens. Tensors travel in torch.distributed groups, control messages
over ZeroMQ. A worker forwards a control message before its device executes the message. Source: ORCA sec. 4.1.

- `deployment`: which part of the model each worker has; `messages`, `sockets`: the control plane; `tensors`: the tensor
  plane
- `process`: a worker's main loop; `launcher`: starts the workers of a machine; `on_ray`: starts launchers on other
  machines
- `workers`: starts and watches all workers, from the engine's process; `executor`: the interface of an
  `xrunner.executor.Executor` to them
"""
