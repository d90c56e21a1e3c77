"""Run one replica of a plan on several devices, with one worker process per device.

Tensors travel through `links` (between GPUs through NCCL), control messages through ZeroMQ. A worker forwards each
control message to the next workers before it executes it. Source: ORCA sec. 4.1.

- `deployment`: which part of the model each worker has; `messages`, `sockets`: the control plane; `tensors`: the tensor
  plane; `links`, `meeting`: what carries tensors
- `process`: a worker's main loop; `launcher`: starts the workers of a machine; `on_ray`: starts launchers on other
  machines
- `workers`: starts and watches all workers, from the engine's process; `executor`: an `xrunner.executor.Executor` that
  uses them
"""
