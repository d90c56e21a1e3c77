"""Send tensors to a device, and fetch them, while it computes.

A GPU copies at the host's pace from page-locked memory alone. It is kept here: to lock pages takes up to milliseconds.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

NUM_STAGED = 8
"""Tensors that may be under way from one thread at a time; the next waits for the oldest."""
LEAST_BYTES = 2**20


class _Buffer:
    """Page-locked memory for one tensor at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def for_tensor(self, tensor: Tensor) -> Tensor:
        """Room for a tensor like this one, once what lay there has been copied."""
        self.wait()
        if len(self._memory) < tensor.nbytes:
            size = max(LEAST_BYTES, 1 << (tensor.nbytes - 1).bit_length())
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def note_copy(self) -> None:
        """A copy to or from it has been launched."""
        if self._copied is None:
            self._copied = torch.cuda.Event()
        self._copied.record()

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()


class _Ring(threading.local):
    """Buffers of one thread, in turns."""

    def __init__(self) -> None:
        self._buffers = [_Buffer() for _ in range(NUM_STAGED)]
        self._number = 0

    def next(self) -> _Buffer:
        self._number = (self._number + 1) % NUM_STAGED
        return self._buffers[self._number]


_ring = _Ring()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Without waiting for what the device computes."""
    if device.type == "cpu":
        return tensor
    buffer = _ring.next()
    sent = buffer.for_tensor(tensor).copy_(tensor).to(device, non_blocking=True)
    buffer.note_copy()
    return sent


class Arriving:
    """A tensor on its way to the host; what is launched later does not delay it.

    It must be waited for, and read, before `NUM_STAGED` further ones are under way.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._buffer: _Buffer | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._buffer = _ring.next()
            self._host = self._buffer.for_tensor(tensor)
            self._host.copy_(tensor, non_blocking=True)
            self._buffer.note_copy()

    def wait(self) -> np.ndarray:
        if self._buffer is not None:
            self._buffer.wait()
        return self._host.numpy()
