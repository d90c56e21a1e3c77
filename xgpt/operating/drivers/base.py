"""The contract of a world: say which replicas there are, start some, drain others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from prometheus_client.parser import text_string_to_metric_families

from xscheduler.fleet.controller import ReplicaState

ENDED = "xgpt_requests_total"
RUNNING, WAITING = "xgpt_requests_running", "xgpt_requests_waiting"
PROMPT, OUTPUT = "xgpt_prompt_tokens_total", "xgpt_output_tokens_total"


class Counts(NamedTuple):
    """A replica's counters since its start.

    Attributes:
        arrived: requests accepted.
        waiting: requests waiting now.
        ended: requests ended.
        prompt_tokens, output_tokens: tokens of the ended requests.
    """

    arrived: float
    waiting: float
    ended: float
    prompt_tokens: float
    output_tokens: float


class World(Protocol):
    """Where replicas run. All answers are read from there anew, so a restarted controller continues."""

    def replicas(self, now_s: float) -> Sequence[ReplicaState]:
        """Return all replicas, draining ones included.

        Args:
            now_s: time on the controller's clock.

        Raises:
            MachineError: the world does not answer.
        """

    def counts(self) -> dict[str, Counts]:
        """Return the counters of each serving replica, by name, without those that do not answer."""

    def start(self, kind: int, number: int) -> None:
        """Start further replicas of a kind.

        Raises:
            MachineError: they cannot be started.
        """

    def drain(self, names: Sequence[str]) -> None:
        """Make replicas take no further requests, and end once they have none."""


def read_counts(text: str) -> Counts | None:
    """Return a replica's counters from the text of its /metrics; None: they are not in it.

    >>> read_counts("xgpt_requests_running 2.0") is None
    True
    """
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    except ValueError:
        return None
    if RUNNING not in found or WAITING not in found:
        return None
    ended = found.get(ENDED, 0.0)
    arrived = ended + found[RUNNING] + found[WAITING]
    return Counts(arrived, found[WAITING], ended, found.get(PROMPT, 0.0), found.get(OUTPUT, 0.0))


class Traffic(NamedTuple):
    """What replicas have received between two looks.

    Attributes:
        num_requests: requests that have arrived.
        ended: number of ended requests, with the tokens of their prompts and outputs.
    """

    num_requests: int
    ended: int
    prompt_tokens: float
    output_tokens: float
    waiting: float


def traffic(before: dict[str, Counts], now: dict[str, Counts]) -> Traffic:
    """Return the traffic between two looks; a restarted replica counts from zero."""
    changes = [_change(before.get(name), counts) for name, counts in now.items()]
    sums = [sum(column) for column in zip(*changes, strict=True)] if changes else [0.0] * 5
    return Traffic(round(sums[0]), round(sums[2]), sums[3], sums[4], _waiting(now.values()))


def _change(before: Counts | None, now: Counts) -> Counts:
    if before is None or before.ended > now.ended:
        return now
    return Counts(*(max(0.0, b - a) for a, b in zip(before, now, strict=True)))


def _waiting(counts: Iterable[Counts]) -> float:
    return sum(of.waiting for of in counts)
