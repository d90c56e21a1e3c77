"""Check requests against limits, the model and the engine."""

from __future__ import annotations

from dataclasses import dataclass

from xgpt.core.errors import InputError
from xgpt.core.schema import Plan
from xrunner.server.api.allowance import Allowance, OutputRule, check_tokens
from xrunner.server.api.errors import refuse
from xrunner.server.api.protocol import GenerationRequest
from xrunner.server.api.text import ServedModel
from xrunner.server.engine_client import EngineClient


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits beyond which requests are refused.

    Attributes:
        max_waiting: largest number of outputs that may wait for their first step. Further outputs get 429, unless their
            API key has fewer waiting outputs than its share of this number.
        answer_within_s: promised seconds from a request's submission to the engine to its last token. A request that
            would take longer, according to the plan and the recent pace, gets 429. None means no promise.
        max_body_bytes: longer bodies get 413.
        all_bodies_bytes: largest number of bytes of all bodies together, from their first byte until their prompts are
            token ids. The first 64 KiB of each body do not count. An account may use half of this memory. Further
            bodies get 503.
        all_requests_bytes: the same limit for requests from then until they have ended.
        body_timeout_s: seconds in which a body must arrive. A body that takes longer gets 408."""

    max_waiting: int = 4096
    answer_within_s: float | None = None
    request_timeout_s: float | None = 600
    default_max_tokens: int | None = None
    max_max_tokens: int | None = None
    max_body_bytes: int = 16 << 20
    all_bodies_bytes: int = 256 << 20
    all_requests_bytes: int = 1 << 30
    body_timeout_s: float = 60

    def __post_init__(self) -> None:
        most = self.max_max_tokens
        if most is not None and (self.default_max_tokens or 0) > most:
            says = f"it is more than `max_max_tokens={most}`: lower it, or raise the other"
            raise InputError("default_max_tokens", self.default_max_tokens, says)

    def output_rule(self, plan: Plan) -> OutputRule:
        return OutputRule(self.default_max_tokens, self.max_max_tokens, plan.promised_output, plan.may_outgrow)


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A prompt that the model accepts, and the limits on its output's length."""

    tokens: tuple[int, ...]
    allowance: Allowance
    echo: str = ""
    """The prompt's text if the answer begins with it. Otherwise it is empty."""


def check_support(request: GenerationRequest, model: ServedModel, engine: EngineClient) -> None:
    """Refuse what the model or the engine does not support. Raises ApiError (400)."""
    if request.seed is not None and not engine.remote.takes_seeds:
        refuse("seed", "vLLM does not support seeds on CPUs; leave seed out")
    for token, _ in request.biases:
        if token >= model.spec.vocab_size:
            refuse("logit_bias", f"token {token} is outside the vocabulary; send ids below {model.spec.vocab_size}")
    if request.num_prompt_logprobs is not None and not engine.remote.scores_prompts:
        refuse("echo", "vLLM, batches in rows and encoders give no log probabilities of prompts; leave this field out")


def check_prompts(
    request: GenerationRequest, prompts: list[list[int]], model: ServedModel, engine: EngineClient, limits: Limits
) -> list[CheckedPrompt]:
    """Check prompts, and return them with the limits on their outputs. Raises ApiError (400)."""
    rule = limits.output_rule(engine.watch.plan)
    kept, memory = (request.kept_of(tokens, model.spec.max_context) for tokens in prompts), engine.remote.pool.limits
    return [CheckedPrompt(tuple(each), check_tokens(each, request, model.spec, memory, rule)) for each in kept]
