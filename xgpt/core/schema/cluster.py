"""Define devices and the links between them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from xgpt.core.schema.base import Frozen
from xgpt.core.schema.model import DType

MOST = 1024
"""Largest number of nodes, and of devices in a node. A larger number is rejected as a typing error."""


class Efficiency(Frozen):
    """The shares of a datasheet's rates that kernels achieve on a kind of device.

    Profiles computed from a datasheet use these figures, for all models.
    """

    matrix: float = Field(gt=0, le=1)
    """Share of the FLOP/s that large matrix products achieve."""
    attention: float = Field(gt=0, le=1)
    """Share of the FLOP/s that prefill attention achieves."""
    weights: float = Field(gt=0, le=1)
    """Share of the memory bandwidth that small matrix products achieve, which mainly read weights."""
    kv: float = Field(gt=0, le=1)
    """Share of the memory bandwidth that decode attention achieves, which mainly reads K/V."""
    bus: float = Field(gt=0, le=1)
    """Share of a link's bandwidth that all-reduces achieve."""
    links: float = Field(gt=0, le=1)
    """Share of a link's bandwidth that copies between devices or hosts achieve."""
    attention_half_length: float = Field(default=0.0, ge=0)
    """Prompt length, in tokens, at which attention achieves half of its highest rate."""
    product_s: float = Field(default=0.0, ge=0)
    """Least seconds of a matrix product."""
    attention_s: float = Field(default=0.0, ge=0)
    """Least seconds of an attention call."""
    experts: float = Field(default=1.0, gt=0, le=1, exclude_if=lambda share: share == 1.0)
    """Share of `matrix` and `weights` that the products of routed experts achieve."""
    experts_s: float | None = Field(default=None, ge=0, exclude_if=lambda seconds: seconds is None)
    """Least seconds of a layer's routed experts, including routing. None means twice `product_s`."""
    all_reduce_s: float | None = Field(default=None, ge=0)
    """Least seconds of an all-reduce over any number of devices. None means that it is computed from the hops of a
    ring.
    """
    layer_s: float = Field(ge=0)
    """Seconds for each layer of small kernels and of kernel launches not counted above."""
    step_s: float = Field(ge=0)
    """Seconds of the serving loop for each step."""
    like: str | None = None
    """Name of the similar device on which the figures were fitted. Plans then warn and state wider ranges. None means
    that they were fitted on this device.
    """
    source: str
    """Source of these figures."""


class DeviceKind(Frozen):
    """A kind of accelerator or CPU, as its datasheet or the machine describes it."""

    name: str
    """Name of the device."""
    type: Literal["cpu", "gpu"]
    """Whether the device is a CPU or a GPU."""
    memory_bytes: PositiveInt
    """Bytes of memory of one device."""
    flops_per_s: dict[DType, PositiveFloat] = Field(default_factory=dict)
    """The datasheet's FLOP/s for each data type."""
    memory_bandwidth_bytes_per_s: PositiveFloat | None = None
    """The datasheet's memory bandwidth, in bytes a second."""
    efficiency: Efficiency | None = None
    """Shares of these rates that kernels achieve. None means that the shares of an A40 are assumed."""
    efficiency_float8: Efficiency | None = None
    """The same shares with eight-bit weights. None means the same as `efficiency`, which always applies to the output
    head and all-reduces, since they stay in half precision.
    """
    usable_memory: float = Field(default=0.9, gt=0, le=1)
    """Largest share of the memory that weights, K/V and workspace together may use."""


class Link(Frozen):
    """A point-to-point connection, in one direction."""

    bandwidth_bytes_per_s: PositiveFloat
    """Bandwidth in one direction, in bytes a second."""
    latency_s: float = Field(ge=0)
    """Seconds of an empty message."""


class ClusterSpec(Frozen):
    """A cluster of `num_nodes` equal machines with `devices_per_node` equal devices each."""

    name: str
    """Name of the cluster."""
    device: DeviceKind
    """The kind of device in the cluster."""
    num_nodes: PositiveInt = Field(default=1, le=MOST)
    """Number of machines."""
    devices_per_node: PositiveInt = Field(default=1, le=MOST)
    """Number of devices of each machine."""
    intra_node: Link | None = None
    """Link between devices of a machine."""
    inter_node: Link | None = None
    """Link between machines."""
    host: Link | None = None
    """Link between a device's memory and its host's memory. Under waa, K/V moves over it."""
    price_per_device_hour: PositiveFloat | None = None
    """Price of one device for an hour, in any currency."""

    @property
    def is_local(self) -> bool:
        """Whether the cluster is this machine (`local`, `local:N`)."""
        return self.name.partition(":")[0] == "local"

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node
