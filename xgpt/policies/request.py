"""What passes between engines and rules: requests in, steps out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class Request:
    """What the rule may see of a request: its maximum, never its true output length."""

    id: int
    input_length: int
    max_output: int
    arrival_ns: int = 0
    deadline_ns: int | None = None
    """When it must have entered at the latest, on the clock of `arrival_ns`; None: whenever there is room."""
    encoded: int = 0
    """Tokens whose K/V the encoding has made so far."""
    generated: int = 0
    """Output tokens computed; the step that ends the encoding computes one."""
    blocks: int = 0
    """K/V blocks set aside for it now."""

    @property
    def context(self) -> int:
        """Prompt and output tokens so far: what encoding must cover, and what the next decode attends to."""
        return self.input_length + self.generated


class Chunk(NamedTuple):
    """Tokens [start, start + length) of a request's prompt, and after a preemption of its output, too."""

    id: int
    start: int
    length: int


class Step(NamedTuple):
    """One iteration: the pieces to encode, the requests to decode by one token, and those that lost their K/V."""

    encode: tuple[Chunk, ...]
    decode: tuple[int, ...]
    preempted: tuple[int, ...] = ()
