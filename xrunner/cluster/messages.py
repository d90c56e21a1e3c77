"""Define the messages between an engine and its workers. They are encoded by msgspec, so that no part of a message can
run as code.
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
    """Build the worker's part. Forward control messages to these endpoints, and report ended steps to `answers_to`."""

    deployment: bytes
    forwards_to: list[str]
    answers_to: str


class Prepare(_Message):
    """Compile a grammar, and keep it compiled until `Forget` of the same number."""

    number: int
    grammar: str


class Forget(_Message):
    """The workers may release the grammar of an earlier `Prepare`."""

    number: int


class Beginning(_Message):
    """A request that is about to be encoded or received, and its blocks on this lane."""

    generation: Generation
    blocks: Sequence[int] = ()
    cached: int = 0
    """Number of tokens whose K/V are present or will be received. If another token follows them, it is decoded next."""
    moving: Sequence[int] = ()
    """Blocks to send to, or receive from, the other lane."""


class Work(_Message):
    """Release and begin requests, then execute a step (`policies.Step`).

    Attributes:
        tokens: last generated token of each decoding request.
        grown: pairs of a request and a block that is added to its table.
        encoder_ran: whether the prompts have gone through the encoder's layers.
    """

    number: int
    release: list[int]
    begin: list[Beginning]
    encode: list[tuple[int, int, int]]
    decode: list[int]
    tokens: list[int]
    grown: list[tuple[int, int]]
    encoder_ran: bool = False


class RunEncoder(_Message):
    """Release and begin requests, then run prompts through the encoder. `Work` of the same number follows.

    Requests are begun and released by this message instead of `Work`, because another step's message may release the
    same requests before `Work` follows.

    Attributes:
        decode: the requests that the step decodes. Their number determines where the step's prompts are cut into
            slices.
        grown: pairs of a request and a block that is added to its table. The request need not be one of `decode`.
    """

    number: int
    release: list[int]
    begin: list[Beginning]
    encode: list[tuple[int, int, int]]
    decode: list[int]
    grown: list[tuple[int, int]]


class Transfer(_Message):
    """Send the K/V of these requests, or receive them."""

    number: int
    release: list[int]
    begin: list[Beginning]


class StoreAnswer(_Message):
    """The values of a `StoreCall`'s keys after the call, or None for a key that does not exist."""

    number: int
    values: list[bytes | None]


# From a worker -----------------------------------------------------------------------------------------------

StoreVerb = Literal["set", "get", "add", "compare_set", "delete"]


class StoreCall(_Message):
    """Apply `verb` to these keys of an epoch's store. With `waits`, answer once all keys exist."""

    epoch: int
    number: int
    verb: StoreVerb
    keys: list[str]
    values: list[bytes]
    waits: bool


class Hello(_Message):
    """A worker has started."""

    worker: int
    epoch: int
    pid: int
    inbox: str


class Loaded(_Message):
    """A worker has built its part or, if the message has an error and an exit code, cannot build it."""

    worker: int
    seconds: float
    error: str = ""
    exit_code: int = 0


class Prepared(_Message):
    """A worker has compiled a grammar or, if the message has an error, cannot compile it."""

    number: int
    worker: int
    error: str = ""


class WorkerAlive(_Message):
    """A worker is running. Each worker sends this regularly, with the bytes that it has sent and the seconds that it
    has spent on steps."""

    worker: int
    epoch: int
    control_bytes: int
    tensor_bytes: int
    busy_s: float


class Done(_Message):
    """A step has ended, with these tokens."""

    number: int
    ids: list[int]
    tokens: list[int]
    logprobs: dict[int, Logprobs]
    failed: dict[int, str]


class EncoderRan(_Message):
    """The last stage has run a step's prompts through the encoder's layers."""

    number: int


class Moved(_Message):
    """A decode worker has received its part of a transfer."""

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
