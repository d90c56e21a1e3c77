"""Offer an engine as a gRPC service.

Its input is token ids and sampling parameters, its output is token ids and log probabilities.

The messages are those of `vllm_engine.proto` (package `smg-grpc-proto`), so a gateway that can talk to vLLM can also
talk to this engine. The gateway has the text: it renders chats, tokenises, detokenises, ends outputs at stop strings
and parses calls of functions. The engine has the tokens: it never sees a template, and reads a tokenizer only if an
output must follow a grammar.

Contract of `Generate`:
    input           `tokenized.input_ids` only. `text`, media and K/V transfers are refused.
    sampling        temperature, top_p, top_k, min_p, penalties, seed, logit_bias, max_tokens, stop_token_ids,
                    ignore_eos, n, logprobs, prompt_logprobs (up to 20), truncate_prompt_tokens: as in vLLM.
    constraint      json_schema, json_object, regex, choice and grammar (Lark) from the first token on.
    for the gateway stop, include_stop_str_in_output, skip_special_tokens, spaces_between_special_tokens.
    refused         a field that would change the output, but is not supported, gives INVALID_ARGUMENT with its name.
    answer          a stream: a chunk for each step, and `complete` for each output with all of its tokens; without
                    `stream`, only `complete`. The token that ends an output is included in the output, and is also its
                    `matched_token_id`.

Schedules need some values for which the messages have no fields. A call's metadata has these values (keys: `METADATA`).
A request is removed when its caller disconnects, or by `Abort`. Too many waiting requests end with RESOURCE_EXHAUSTED,
a passed deadline with DEADLINE_EXCEEDED, a failed engine with UNAVAILABLE.
"""

from typing import NamedTuple


class Metadata(NamedTuple):
    """Keys of a call's metadata.

    Attributes:
        deadline_s: seconds from the call's arrival after which an incomplete request ends.
        class_name: one of the plan's classes of requests.
        account: the name of the request's account.
        output_length: exact number of output tokens, for benchmarks. The schedule knows only max_tokens.
    """

    deadline_s: str = "xgpt-deadline-s"
    class_name: str = "xgpt-class"
    account: str = "xgpt-account"
    output_length: str = "xgpt-output-length"


METADATA = Metadata()
