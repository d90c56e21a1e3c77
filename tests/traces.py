"""Traces as public tools write them, each of the same two requests: 10 and 2 tokens, and 2 s later 30 and 4."""

from __future__ import annotations

import json
from pathlib import Path


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def otlp(*spans: dict[str, object]) -> dict[str, object]:
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {"name": "vllm"}, "spans": list(spans)}]}]}


def span(span_id: str, parent: str, start_ns: int, *, new: bool = True, **tokens: int) -> dict[str, object]:
    names = {"i": "gen_ai.usage.input_tokens" if new else "gen_ai.usage.prompt_tokens"}
    names |= {"o": "gen_ai.usage.output_tokens" if new else "gen_ai.usage.completion_tokens"}
    attributes = [{"key": names[name], "value": {"intValue": str(count)}} for name, count in tokens.items()]
    fields = {"spanId": span_id, "parentSpanId": parent, "name": "llm_request", "startTimeUnixNano": str(start_ns)}
    return fields | {"attributes": attributes}


def usage(created: int, prompt: int, completion: int) -> dict[str, object]:
    tokens = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": created, "usage": tokens}


def aiperf(start_ns: int, input_: int, output: int | None) -> dict[str, object]:
    metrics = {
        "input_sequence_length": {"value": input_, "unit": "tokens"},
        "request_latency": {"value": 297.5, "unit": "ms"},
        "output_token_count": {"value": output, "unit": "tokens"},
        "output_sequence_length": {"value": output, "unit": "tokens"},
    }
    failed = {
        "metrics": {"error_isl": {"value": input_, "unit": "tokens"}},
        "error": {"code": 499, "type": "Cancelled"},
    }
    record = {"metadata": {"session_num": 45, "request_start_ns": start_ns, "request_end_ns": start_ns + 10**8}}
    return record | ({"metrics": metrics, "error": None} if output is not None else failed)


T = 1_759_813_207
"""Seconds since 1970."""
TWO = ((0, 10, 2), (2, 30, 4))
PUBLIC: dict[str, str] = {
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,10,2\n"
    "2023-11-16 18:17:05.9799600,30,4\n",
    "burstgpt.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,10,2,12,API log\n"
    "6,GPT-4,417,0,417,API log\n7,ChatGPT,30,4,34,Conversation log\n",
    "vidur.csv": "arrived_at,num_prefill_tokens,num_decode_tokens,pd_ratio\n0.5,10,2,5.0\n2.5,30,4,7.5\n",
    "mooncake.jsonl": lines(
        {"timestamp": 27482, "input_length": 10, "output_length": 2, "hash_ids": [1]},
        {"timestamp": 29482, "input_length": 30, "output_length": 4, "hash_ids": [1]},
    ),
    "dynamo.jsonl": lines(
        {"timestamp": 0, "input_length": 10, "output_length": 2},
        {"timestamp": 2000, "input_length": 30, "output_length": 4},
    ),
    "vllm.json": json.dumps(
        {
            "date": "20260101-120000", "backend": "vllm", "num_prompts": 3, "duration": 12.5, "completed": 2,
            "input_lens": [10, 77, 30], "start_times": [812.5, 813.0, 814.5], "output_lens": [2, 0, 4],
            "ttfts": [0.1, 0.0, 0.1], "itls": [[0.01], [], [0.01]], "errors": ["", "refused", ""],
        }
    ),
    "aiperf.jsonl": lines(
        aiperf(T * 10**9, 10, 2), aiperf(T * 10**9 + 5, 550, None), aiperf((T + 2) * 10**9, 30, 4)
    ),
    "openai.jsonl": lines(usage(T, 10, 2), usage(T + 2, 30, 4)),
    "batch.jsonl": lines(
        *(
            {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "body": usage(*r)}, "error": None}
            for r in ((T, 10, 2), (T + 2, 30, 4))
        )
    ),
    "responses.jsonl": lines(
        *(
            {"object": "response", "created_at": T + s, "input": "text",
             "usage": {"input_tokens": i, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": o}}
            for s, i, o in TWO
        )
    ),
    "spans.json": json.dumps(
        otlp(
            span("a", "", T * 10**9, i=10, o=2),
            span("b", "a", T * 10**9 + 7, new=False, i=10, o=2),
            span("c", "", (T + 2) * 10**9, new=False, i=30, o=4),
            span("d", "", (T + 3) * 10**9),
        )
    ),
    "spans.jsonl": lines(
        otlp(span("a", "", T * 10**9, i=10, o=2)), otlp(span("c", "", (T + 2) * 10**9, i=30, o=4))
    ),
    "proxy.csv": "request_id,prompt_tokens,completion_tokens,created_at\nx,10,2,2026-01-01 00:00:00 UTC\n"
    "y,30,4,2026-01-01 00:00:02 UTC\n",
    "millis.csv": f"timestamp,prompt_tokens,completion_tokens\n{T}000,10,2\n{T + 2}000,30,4\n",
    "excel.csv": "time_s;isl;osl\n0,5;10;2\n2,5;30;4\n",
    "pandas.tsv": "timestamp_ms\tinput_tokens\toutput_tokens\n0.0\t10.0\t2.0\n2000.0\t30.0\t4.0\n1.0\t0\t0\n",
    "bailian.jsonl": lines(
        *(
            {"chat_id": chat, "parent_chat_id": -1, "timestamp": at_s, "input_length": i, "output_length": o,
             "type": "text", "turn": 1, "hash_ids": list(range(-(-i // 16)))}
            for chat, at_s, i, o in ((0, 0.072, 10, 2), (1, 2.072, 30, 4))
        )
    ),
    "splitwise.csv": "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
    "0,2,0,0.5,1,10,2\n1,2,0,2.5,1,30,4\n",
    "llmservingsim.jsonl": lines(
        {"input_toks": 10, "output_toks": 2, "arrival_time_ns": 1, "input_tok_ids": [1]},
        {"input_toks": 30, "output_toks": 4, "arrival_time_ns": 2 * 10**9 + 1, "input_tok_ids": [1]},
    ),
    "sessions.jsonl": lines(
        {"session_id": "a", "arrival_time_ns": 0, "sub_requests": [{"input_toks": 10, "output_toks": 2}]},
        {"session_id": "b", "arrival_time_ns": 2 * 10**9, "sub_requests": [{"input_toks": 30, "output_toks": 4}]},
    ),
    "guidellm.json": json.dumps(
        {"benchmarks": [{"config": {"strategy": {"rate": 0.5}}, "requests": {
            "successful": [
                {"request_id": "x", "output": "text", "request_start_time": T + s, "prompt_tokens": i,
                 "output_tokens": o, "input_metrics": {"text_tokens": i}} for s, i, o in TWO],
            "errored": [{"prompt_tokens": 99}], "incomplete": []}}]}
    ),
    "anthropic.jsonl": lines(
        *(
            {"created_at": f"2026-11-29T07:00:0{s}Z", "type": "message", "usage": {"input_tokens": i - 3,
             "cache_read_input_tokens": 2, "cache_creation_input_tokens": 1, "output_tokens": o}} for s, i, o in TWO
        )
    ),
    "anthropic.csv": "time_s,input_tokens,cache_read_input_tokens,output_tokens\n0,7,3,2\n2,30,0,4\n",
    "bedrock.jsonl": lines(
        *(
            {"schemaType": "ModelInvocationLog", "timestamp": f"2026-11-29T07:00:0{s}Z",
             "input": {"inputTokenCount": i - 3, "cacheReadInputTokenCount": 2, "cacheWriteInputTokenCount": 1},
             "output": {"outputTokenCount": o}} for s, i, o in TWO
        )
    ),
    "gemini.jsonl": lines(
        *(
            {"createTime": f"2026-11-29T07:00:0{s}Z", "usageMetadata": {"promptTokenCount": i,
             "candidatesTokenCount": o - 1, "thoughtsTokenCount": 1}} for s, i, o in TWO
        )
    ),
    "ollama.jsonl": lines(
        *(
            {"created_at": f"2026-11-29T07:00:0{s}.5Z", "done": True, "prompt_eval_count": i, "prompt_eval_duration": 5,
             "eval_count": o, "eval_duration": 7} for s, i, o in TWO
        )
    ),
    "llamacpp.jsonl": lines(
        *({"created": T + s, "tokens_evaluated": i, "tokens_predicted": o, "timings": {}} for s, i, o in TWO)
    ),
    "sglang.jsonl": lines(
        *({"prompt_tokens": i, "completion_tokens": o, "request_received_ts": T + s + 0.5} for s, i, o in TWO)
    ),
    "inference_perf.json": json.dumps(
        [{"scheduled_time": 5.0 + s, "start_time": 5.01 + s, "end_time": 6.0 + s, "request": "{}", "error": None,
          "info": {"input_tokens": i, "output_tokens": o, "output_token_times": [1.0]}} for s, i, o in TWO]
    ),
    "litellm.json": json.dumps(
        [{"startTime": f"2026-11-29T07:00:0{s}Z", "prompt_tokens": i, "completion_tokens": o} for s, i, o in TWO]
    ),
    "openrouter.csv": "created_at,tokens_prompt,tokens_completion,tokens_reasoning\n2026-11-29 07:00:00.5,10,2,0\n"
    "2026-11-29 07:00:02.5,30,4,0\n",
    "blis.csv": "request_id,input_tokens,output_tokens,server_input_tokens,arrival_time_us,send_time_us,status\n"
    "0,10,2,12,500000,500100,ok\n1,30,4,31,2500000,2500100,ok\n",
    "phoenix.csv": "start_time,attributes.llm.token_count.prompt,attributes.llm.token_count.completion\n"
    "2026-11-29T07:00:00Z,10,2\n2026-11-29T07:00:02Z,30,4\n",
    "helicone.csv": "request_created_at,prompt_tokens,completion_tokens\n2026-11-29T07:00:00Z,10,2\n"
    "2026-11-29T07:00:02Z,30,4\n",
    "azure_gateway.csv": "TimeGenerated,PromptTokens,CompletionTokens\n2026-11-29T07:00:00Z,10,2\n"
    "2026-11-29T07:00:02Z,30,4\n",
    "list.json": json.dumps([{"isl": 10, "osl": 2, "arrival_s": 1}, {"isl": 30, "osl": 4, "arrival_s": 3}]),
}  # fmt: skip
SAID: dict[str, list[str]] = {
    "burstgpt.csv": ["1 of 3 rows have no input or no output tokens", "`Timestamp` is read as seconds"],
    "dynamo.jsonl": ["`timestamp` is read as milliseconds: 2 requests in 2 s, 0.5 a second"],
    "millis.csv": ["`timestamp` is read as milliseconds: 2 requests in 2 s"],
    "responses.jsonl": ["`created_at` is read as seconds"],
    "spans.json": ["2 of 4 spans are left out: they are not requests, or are only parts of requests"],
    "vllm.json": ["1 of 3 rows"],
    "vidur.csv": [],
    "azure.csv": [],
    "mooncake.jsonl": ["`timestamp` is read as milliseconds: 2 requests in 2 s"],
    "openai.jsonl": [],
    "bailian.jsonl": [],
    "splitwise.csv": [],
    "guidellm.json": [],
    "excel.csv": [],
}
"""What is assumed to read some of them, as standard error says it once."""


def share_gpt() -> str:
    """Return a conversation of two answers, and an empty one."""
    talk = [("human", "a" * 40), ("gpt", "b" * 8), ("human", "c" * 72), ("gpt", "d" * 16), ("gpt", "")]
    turns = [{"from": from_, "value": value} for from_, value in talk]
    return json.dumps([{"id": "x", "conversations": turns}, {"id": "y", "conversations": []}])


def lmsys() -> str:
    """Return the same conversation as `share_gpt`, as LMSYS-Chat-1M has it."""
    talk = [("user", "a" * 40), ("assistant", "b" * 8), ("user", "c" * 72), ("assistant", "d" * 16)]
    turns = [{"role": role, "content": content} for role, content in talk]
    return lines({"conversation_id": "x", "model": "vicuna-13b", "conversation": turns, "turn": 2, "redacted": False})


def over_time(page: str) -> str:
    """Return a page of metrics as Prometheus answers a query over time: each counter grows from 7 by the page's value,
    and its process restarts halfway.
    """
    result = []
    for line in page.splitlines():
        if line[:1] != "#":
            name, _, rest = line.partition("{")
            written, _, value = rest.rpartition("} ")
            labels = dict(part.replace('"', "").split("=") for part in written.split(","))
            half = float(value) / 2
            values = [[T, "7"], [T + 60, str(7 + half)], [T + 120, str(half)]]
            result.append({"metric": {"__name__": name, **labels}, "values": values})
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}})


METRICS = """# HELP vllm:request_prompt_tokens Number of prefill tokens processed.
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_bucket{engine="0",le="100.0",model_name="m"} 50.0
vllm:request_prompt_tokens_bucket{engine="1",le="100.0",model_name="m"} 0.0
vllm:request_prompt_tokens_bucket{engine="0",le="200.0",model_name="m"} 100.0
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf",model_name="m"} 100.0
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 9000.0
vllm:request_prompt_tokens_count{engine="0",model_name="m"} 100.0
vllm:request_generation_tokens_bucket{engine="0",le="10.0",model_name="m"} 90.0
vllm:request_generation_tokens_bucket{engine="0",le="20.0",model_name="m"} 90.0
vllm:request_generation_tokens_bucket{engine="0",le="+Inf",model_name="m"} 100.0
"""


def write(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path
