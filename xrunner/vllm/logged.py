"""Extend vLLM's own scheduler to write xgpt's step log and to report steps to `xgpt serve`."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from xgpt.core.io import StepLogWriter
from xgpt.core.schema.step_log import ANYONE, Account, Arrival, Chain, StepRecord
from xrunner.channel import ALIVE_S
from xrunner.channel.messages import Alive, Room, Stepped
from xrunner.generation import FinishReason, Logprobs, Token
from xrunner.vllm import TESTED_VERSION, installed_version
from xrunner.vllm.channel import VllmEnd

logger = logging.getLogger("vllm.xgpt")

KEY_BYTES = 16


class LoggedScheduler(Scheduler):
    """vLLM's scheduler. With `additional_config={"xgpt": {"step_log": FILE}}`, it logs the executed steps.

    With `front` (the directory of an `xgpt serve` run) and `lane`, the scheduler reports each step and its tokens to
    that run, and requests have the numbers that `xgpt serve` has given them. Otherwise requests are counted from 0 in
    the order of arrival. If the K/V of a prompt's first tokens were computed elsewhere, the log has only the prompt's
    later tokens.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if (found := installed_version()) != TESTED_VERSION:
            logger.warning("xgpt is tested with vLLM %s, and this is vLLM %s", TESTED_VERSION, found)
        self.config: dict[str, Any] = dict(self.vllm_config.additional_config.get("xgpt", {}))
        log = self.config.get("step_log")
        self._log = None if log is None else StepLogWriter(Path(log))
        self._front: VllmEnd | None = None
        if "front" in self.config:
            self._front = VllmEnd(self.config["front"], self.config["lane"], plans="plan" in self.config)
            threading.Thread(target=self._report, args=(self._front,), daemon=True).start()
        self._settled: list[StepRecord] = []
        self._number: dict[str, int] = {}
        self._num_seen = self._num_scheduled = self._num_settled = self._now_ns = 0
        self._encoding: set[str] = set()
        self._under_way: deque[StepRecord] = deque()
        """Steps that were scheduled but not executed. It is not known yet which requests end in them."""
        self._arrivals: list[Arrival] = []
        self._cancelled: list[int] = []

    @staticmethod
    def _report(front: VllmEnd) -> None:
        """Report regularly that this process runs, since its host would not notice if this process were suspended."""
        while True:
            front.send(Alive([]))
            time.sleep(ALIVE_S)

    def add_request(self, request: Request) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if not known:
            number = self._number[request.request_id] = extra_of(request).get("id", self._num_seen)
            self._num_seen += 1
            self._arrivals.append(arrival_of(number, request))

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._now_ns = time.perf_counter_ns()
        output = self._schedule(throttle_prefills)
        self._under_way.append(self._begun(self._now_ns, output))
        return output

    def _schedule(self, throttle_prefills: bool) -> SchedulerOutput:
        return super().schedule(throttle_prefills)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, Any]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        tokens, transfers = ([], {}) if self._front is None else self._told(outputs)
        # A request that was aborted meanwhile has lost its number, and is recorded as cancelled.
        gone = [i for i in scheduler_output.num_scheduled_tokens if i in self._number and self._has_ended(i)]
        finished = tuple(self._number[id_] for id_ in gone)
        for id_ in gone:
            self._forget(id_)
        self._settle(self._under_way.popleft()._replace(end_ns=time.perf_counter_ns(), finished=finished))
        if self._front is not None and (tokens or self._settled):
            self._front.send(Stepped(tokens, self._settled, self._room_taken(), transfers))
            self._settled = []
        return outputs

    def _told(self, outputs: dict[int, Any]) -> tuple[list[Token], dict[int, dict[str, Any]]]:
        tokens: list[Token] = []
        transfers: dict[int, dict[str, Any]] = {}
        for of_client in outputs.values():
            for out in of_client.outputs:
                if (number := self._number.get(out.request_id)) is not None:
                    tokens += tokens_of(number, out)
                    if out.kv_transfer_params is not None:
                        transfers[number] = out.kv_transfer_params
        return tokens, transfers

    def _room_taken(self) -> Room | None:
        return None

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Process results in the same way as vLLM. In benchmarks, also end a request after its
        `output_length`. The host sends this length, and the schedule does not know it.
        """
        tokens, stopped = super()._update_request_with_output(request, new_token_ids, is_stale)
        if not stopped and 0 < extra_of(request).get("output_length", 0) <= request.num_output_tokens:
            request.status = RequestStatus.FINISHED_STOPPED
            stopped = True
        return tokens, stopped

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        ended = super().finish_requests(request_ids, finished_status)
        for request in ended:
            self._cancel(self._number[request.request_id])
            self._forget(request.request_id)
        return ended

    def shutdown(self) -> None:
        if self._log is not None:
            self._log.close()
        if self._front is not None:
            self._front.close()
        super().shutdown()

    def _begun(self, start_ns: int, output: SchedulerOutput) -> StepRecord:
        """vLLM's own records may change before the step ends."""
        self._encoding.update(request.req_id for request in output.scheduled_new_reqs)
        self._encoding.update(output.scheduled_cached_reqs.resumed_req_ids)
        encode, decode = [], []
        for id_, count in output.num_scheduled_tokens.items():
            request = self.requests[id_]
            if id_ in self._encoding:
                encode.append((self._number[id_], request.num_computed_tokens - count, count))
                if not request.is_prefill_chunk:
                    self._encoding.discard(id_)
            else:
                decode.append(self._number[id_])
        record = StepRecord(
            start_ns,
            start_ns,
            tuple(encode),
            tuple(decode),
            (),
            tuple(self._arrivals),
            tuple(self._cancelled),
            tuple(self._number[id_] for id_ in output.preempted_req_ids or () if id_ in self._number),
            number=self._num_scheduled,
            settled=self._num_settled,
        )
        if encode or decode:
            self._num_scheduled += 1
            self._arrivals.clear()
            self._cancelled.clear()
        return record

    def _settle(self, step: StepRecord) -> None:
        if step.encode or step.decode:
            self._num_settled += 1
            if self._front is not None:
                self._settled.append(step._replace(lane=self.config["lane"]))
            if self._log is not None:
                self._log(step)
                # The log is flushed at each step, because vLLM may be killed before it shuts down the scheduler.
                # Flushing takes a thousand times as long as writing.
                self._log.flush()

    def _cancel(self, number: int) -> None:
        self._cancelled.append(number)

    def _has_ended(self, id_: str) -> bool:
        request = self.requests.get(id_)
        return request is None or request.is_finished()

    def _forget(self, id_: str) -> None:
        del self._number[id_]
        self._encoding.discard(id_)


class PiecesScheduler(LoggedScheduler):
    """vLLM's scheduler for profiles. A request with the extra argument `step_tokens` limits the tokens of later steps.

    Prompts are then cut as with such a token budget. Decodes also count towards the budget.
    """

    max_num_scheduled_tokens: int  # vLLM's own

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        most = self.scheduler_config.max_num_batched_tokens
        self.max_num_scheduled_tokens = min(most, extra_of(request).get("step_tokens", most))


def extra_of(request: Request) -> dict[str, Any]:
    return (request.sampling_params.extra_args if request.sampling_params else None) or {}


def arrival_of(number: int, request: Request) -> Arrival:
    """Return a request as an arrival at this moment. Deadlines are on the clock of `time.perf_counter_ns`, which all
    processes share.
    """
    extra, size = extra_of(request), (request.num_prompt_tokens, request.max_tokens)
    account = Account(*extra["account"]) if "account" in extra else ANYONE
    deadline_ns, promised = extra.get("deadline_ns"), extra.get("promised_output")
    return Arrival(number, *size, time.perf_counter_ns(), deadline_ns, promised, account, chain_of(request))


def chain_of(request: Request) -> Chain:
    return tuple(bytes(key[:KEY_BYTES]) for key in request.block_hashes)


def tokens_of(number: int, output: Any) -> list[Token]:
    finish: FinishReason | None = None
    if output.finish_reason is not None:
        reason = str(output.finish_reason)
        finish = "stop" if reason == "stop" else "length" if reason == "length" else "error"
        if finish == "error" or not output.new_token_ids:
            return [Token(number, 0, "error")]
    tokens = [Token(number, token, None) for token in output.new_token_ids]
    if output.new_logprobs is not None:
        given = output.new_logprobs
        # each row has the token itself, then the most probable tokens
        rows = zip(given.logprob_token_ids.tolist(), given.logprobs.tolist(), strict=True)
        scores = [Logprobs(row[0], tuple(zip(ids[1:], row[1:], strict=True))) for ids, row in rows]
        tokens = [token._replace(logprobs=score) for token, score in zip(tokens, scores, strict=True)]
    if tokens:
        tokens[-1] = tokens[-1]._replace(finish=finish)
    return tokens
