"""The messages between an engine and its workers, in msgspec: nothing in a message can run as code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from xrunner.generation import Generation, Logprobs, SamplingParams

T = TypeVar("T")


class _Message(msgspec.Struct, tag=True, array_like=True):
    pass


# From the engine ---------------------------------------------------------------------------------------------


class Deploy(_Message):
    """Build your part; hand on control messages to these endpoints, and tell this one how steps end."""

    deployment: bytes
    hands_on_to: list[str]
    answers_to: str


class Beginning(_Message):
    """A request that is about to be encoded or received (`engine.Generation`), and its blocks there."""

    id: int
    prompt: list[int]
    max_output: int
    sampling: list[Any]
    num_resumed: int
    blocks: list[int]
    cached: int = 0
    """Tokens whose K/V is there, or will be received; the token behind them, if any, is decoded next."""
    moving: list[int] = []
    """Blocks to be sent, or received, between the lanes."""

    @classmethod
    def of(
        cls, generation: Generation, blocks: Sequence[int] = (), cached: int = 0, moving: Sequence[int] = ()
    ) -> Beginning:
        sampling = generation.sampling
        return cls(
            generation.id,
            list(generation.prompt),
            generation.max_output,
            [getattr(sampling, name) for name in SamplingParams.__slots__],
            generation.num_resumed,
            list(blocks),
            cached,
            list(moving),
        )

    def generation(self) -> Generation:
        given = dict(zip(SamplingParams.__slots__, self.sampling, strict=True))
        given["logit_bias"] = tuple(map(tuple, given["logit_bias"]))
        return Generation(
            self.id,
            tuple(self.prompt),
            self.max_output,
            sampling=SamplingParams(**given),
            num_resumed=self.num_resumed,
        )


class Work(_Message):
    """Release, begin, then execute a step (`policies.Step`).

    `tokens` are what the decoding ones generated last, `grown` the blocks that requests have been given.

    `has_read`: its prompts have been run through the encoder's layers.
    """

    number: int
    release: list[int]
    begin: list[Beginning]
    encode: list[tuple[int, int, int]]
    decode: list[int]
    tokens: list[int]
    grown: list[tuple[int, int]]
    has_read: bool = False


class Read(_Message):
    """Release, begin, then run prompts through the encoder's layers; `Work` of the same number comes later.

    `decode` is that of the step: what a step decodes decides where its prompts are cut into slices.
    """

    number: int
    release: list[int]
    begin: list[Beginning]
    encode: list[tuple[int, int, int]]
    decode: list[int]


class Transfer(_Message):
    """Send these requests' K/V, or receive it."""

    number: int
    release: list[int]
    begin: list[Beginning]


class Start(_Message):
    """To another machine: replace its workers by these (`launching.StartWorkers`)."""

    epoch: int
    first: int
    count: int
    total: int


class Heard(_Message):
    """To another machine: the engine is there."""


class Occupied(_Message):
    """To another machine: its number is that of one that is there already."""


class Stop(_Message):
    """To another machine: the first machine ends in good order, and it is to."""


class StoreAnswer(_Message):
    """The values of the keys that a `StoreCall` names, after it; None: there is no such key."""

    number: int
    values: list[bytes | None]


# From another machine ----------------------------------------------------------------------------------------


class Join(_Message):
    """Machine `node` is there; said now and then. `incarnation` is drawn at random, and no other process's."""

    node: int
    incarnation: int


class Gone(_Message):
    """A worker of that machine has ended."""

    epoch: int
    worker: int


class Goodbye(_Message):
    """It knows that the first machine ends."""

    node: int


# From a worker -----------------------------------------------------------------------------------------------

StoreVerb = Literal["set", "get", "add", "compare_set", "delete"]


class StoreCall(_Message):
    """Do something to these keys of an epoch's store; `waits`: answer once there are all of them."""

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
    """Its part is built; or, with an error and its exit code, cannot be."""

    worker: int
    seconds: float
    error: str = ""
    exit_code: int = 0


class Alive(_Message):
    """Sent now and then: bytes that the worker has sent so far, and seconds that it has executed steps."""

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


class HasRead(_Message):
    """The last stage has run a step's prompts through the encoder's layers."""

    number: int


class Moved(_Message):
    """A decode worker has received what a transfer brings it."""

    number: int
    worker: int


ToWorker = Deploy | Work | Read | Transfer
ToNode = Start | Heard | Occupied | Stop
ToEngine = Hello | Loaded | Alive | StoreCall | Join | Gone | Goodbye
WorkerAnswer = Done | HasRead | Moved

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_to_node = msgspec.msgpack.Decoder(ToNode).decode
decode_store_answer = msgspec.msgpack.Decoder(StoreAnswer).decode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_answer = msgspec.msgpack.Decoder(WorkerAnswer).decode
