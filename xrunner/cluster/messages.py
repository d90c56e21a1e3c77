"""Define the messages between an engine and its workers. msgspec encodes them. Unlike pickles, they cannot contain
code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from xrunner.generation import Generation, Logprobs


class _Message(msgspec.Struct, tag=True, array_like=True):
    pass


# From the engine ---------------------------------------------------------------------------------------------


class Deploy(_Message):
    """Build the worker's part of `deployment` (JSON). From then on, forward control messages to `forwards_to`, and
    report ended steps to `answers_to`. Meet workers of other machines at `links`.
    """

    deployment: bytes
    forwards_to: list[str]
    answers_to: str
    links: list[str] = []


class Prepare(_Message):
    number: int
    grammar: str


class Forget(_Message):
    number: int


class Beginning(_Message):
    generation: Generation
    blocks: Sequence[int] = ()
    cached: int = 0
    """Number of the request's tokens whose K/V are present or will be received. The token after them, if any, is
    decoded next.
    """
    moving: Sequence[int] = ()


class Work(_Message):
    """Release and begin requests. Then execute a step (`policies.Step`)."""

    number: int
    release: list[int]
    begin: list[Beginning]
    encode: list[tuple[int, int, int]]
    decode: list[int]
    tokens: list[int]
    grown: list[tuple[int, int]]
    encoder_ran: bool = False


class RunEncoder(_Message):
    """Release and begin requests. Then run prompts through the encoder. `Work` with the same number follows later.

    Requests are released and begun here, since another step's message may release them before that `Work` comes.

    Attributes:
        decode: the requests that the step decodes. Their number determines how the step is cut into slices.
        grown: pairs of a request and a block to add to its table. The request need not be one of `decode`.
    """

    number: int
    release: list[int]
    begin: list[Beginning]
    encode: list[tuple[int, int, int]]
    decode: list[int]
    grown: list[tuple[int, int]]


class Transfer(_Message):
    number: int
    release: list[int]
    begin: list[Beginning]


class StoreAnswer(_Message):
    """The answer to a `StoreCall`: each key's value after the call (for "delete", before it), or None for a missing
    key.
    """

    number: int
    values: list[bytes | None]


# From a worker -----------------------------------------------------------------------------------------------

StoreVerb = Literal["set", "get", "add", "compare_set", "delete"]


class StoreCall(_Message):
    """Apply `verb` to these keys of the epoch's store. With `waits`, the answer comes once all keys exist."""

    epoch: int
    number: int
    verb: StoreVerb
    keys: list[str]
    values: list[bytes]
    waits: bool


class Hello(_Message):
    """A worker has started. It receives forwarded messages at `inbox`, and meets workers of other machines at
    `address`.
    """

    worker: int
    epoch: int
    pid: int
    inbox: str
    address: str = ""


class Loaded(_Message):
    worker: int
    seconds: float
    error: str = ""
    exit_code: int = 0


class Prepared(_Message):
    number: int
    worker: int
    error: str = ""


class WorkerAlive(_Message):
    """A worker's regular report: bytes sent since its start, and seconds spent on steps since its last deployment."""

    worker: int
    epoch: int
    control_bytes: int
    tensor_bytes: int
    busy_s: float


class Done(_Message):
    number: int
    ids: list[int]
    tokens: list[int]
    logprobs: dict[int, Logprobs]
    failed: dict[int, str]


class EncoderRan(_Message):
    number: int


class Moved(_Message):
    number: int
    worker: int


ToWorker = Deploy | Prepare | Forget | Work | RunEncoder | Transfer
ToEngine = Hello | Loaded | Prepared | WorkerAlive | StoreCall
WorkerAnswer = Done | EncoderRan | Moved

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_store_answer = msgspec.msgpack.Decoder(StoreAnswer).decode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_answer = msgspec.msgpack.Decoder(WorkerAnswer).decode
