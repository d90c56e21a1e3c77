"""The properties of the served model against which requests are checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xgpt.core.schema import ModelSpec
from xrunner.grammar import Grammars
from xrunner.server.api.text import TextCodec


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of an endpoint, with its tokenizer and grammars.

    Attributes:
        names: the model's names. A request must give one of them.
        codec: the tokenizer. None means that prompts are token ids only, and answers have no text.
        eos_token_ids: tokens that end an output.
        grammars: compiler of grammars for outputs. None means that there is no tokenizer, or the engine does not
            support grammars.
        sampling_defaults: values of fields that a request leaves out (`checkpoint.sampling_defaults`).
        path: the checkpoint's directory. Empty means that the weights are drawn from a seed.
    """

    names: tuple[str, ...]
    spec: ModelSpec
    codec: TextCodec | None = None
    eos_token_ids: frozenset[int] = frozenset()
    grammars: Grammars | None = None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    path: str = ""

    @property
    def name(self) -> str:
        """The first of the names, which messages use."""
        return self.names[0]
