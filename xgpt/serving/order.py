"""Say which engine a process runs, and on which machines."""

from __future__ import annotations

import os
from dataclasses import dataclass

from xgpt.core.errors import InputError
from xgpt.core.schema import Batching, Frozen, Plan

MIN_SECRET = 16
"""Least length of the secret that machines share."""


def check_rank(rank: int, count: int) -> None:
    """Refuse a number of this machine that is not one of `count` machines.

    Raises:
        InputError: it is too large.
    """
    if rank >= count:
        raise InputError("node_rank", rank, f"machines are numbered from 0 to {count - 1}")


@dataclass(frozen=True)
class Nodes:
    """The machines that run a plan together, and which of them this one is.

    Args:
        rendezvous: address and port of the first machine.
        passphrase: the secret that all machines share.
    """

    count: int
    rank: int
    rendezvous: str
    passphrase: str

    @classmethod
    def of(cls, count: int, rank: int, rendezvous: str | None) -> Nodes | None:
        """Return the machines that arguments name; None: there is one machine.

        Raises:
            InputError: an argument is missing, or has no effect.
        """
        if count == 1:
            if rank or rendezvous:
                raise InputError("nnodes", 1, "`node_rank` and `rendezvous` need `nnodes` of 2 or more")
            return None
        check_rank(rank, count)
        host, _, port = (rendezvous or "").rpartition(":")
        if not host or not port.isdecimal():
            raise InputError("rendezvous", rendezvous, "give machine 0's address and a free port: HOST:PORT")
        passphrase = os.environ.get("XGPT_CLUSTER_SECRET", "")
        if len(passphrase) < MIN_SECRET:
            accepted = f"set it to the same {MIN_SECRET} or more characters on every machine"
            raise InputError("XGPT_CLUSTER_SECRET", "*" * len(passphrase), accepted)
        return cls(count, rank, f"{host}:{port}", passphrase)

    @property
    def port(self) -> int:
        """Port of the rendezvous."""
        return int(self.rendezvous.rpartition(":")[2])

    @property
    def address(self) -> str:
        """Address of the first machine."""
        return self.rendezvous.rpartition(":")[0]


class EngineOrder(Frozen):
    """What to run.

    Attributes:
        nodes: machines that run the plan together: their number, this one's, and the rendezvous; None: this one only.
        core_waits: note in the records of steps how long threads waited for a core.
    """

    plan: Plan
    batching: Batching
    reuse: bool
    log_level: str
    nodes: tuple[int, int, str] | None = None
    core_waits: bool = False
