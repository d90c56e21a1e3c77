"""Run xgpt's scheduling rule inside vLLM: a scheduler class for `--scheduler-cls`.

xgpt.core.policies decides which requests each step encodes and which it decodes. vLLM's own scheduler sees only these
requests, and does all other work (batches, outputs). A `Pool` has the same requests as vLLM, and reserves K/V memory at
least as carefully, so that vLLM never preempts a request by itself. With vLLM's prefix caching, the pool also finds,
shares and evicts blocks, and vLLM follows (`Mirror`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import Request, RequestStatus

from xgpt.core import policies
from xgpt.core.errors import InputError
from xgpt.core.io import load_json
from xgpt.core.policies import BlockTable, OneLane, Step
from xgpt.core.schema import Plan
from xgpt.core.schema.step_log import Chain, StepRecord
from xrunner.channel.messages import Began, Followed, Refused, Rested, Room
from xrunner.vllm.lane import PlannedLane, VllmRoom
from xrunner.vllm.logged import LoggedScheduler, arrival_of, chain_of, logger


@dataclass(slots=True, eq=False)
class _Execution:
    """The execution of a step of the rule, in several vLLM steps if vLLM executes fewer tokens in one step.

    Attributes:
        missing: requests that vLLM has not yet completely scheduled for this step. For each, the number of its tokens
            that will be computed when the step ends.
        number, settled: as in the step log, where these vLLM steps count as one step.
    """

    step: Step
    missing: dict[int, int]
    number: int
    settled: int
    pieces: int = 0
    record: StepRecord | None = None


class XgptScheduler(LoggedScheduler):
    """Runs the schedule of a plan: `additional_config={"xgpt": {"plan": FILE, "front": ADDRESS, "lane": "both"}}`.

    With `front`, it also follows new plans that come through the channel (see `channel`).
    """

    # Attributes of vLLM's own scheduler.
    running: list[Request]
    waiting: FCFSRequestQueue
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refuse_what_breaks_the_rule()
        plan = load_json(Path(self.config["plan"]), Plan, "plan")
        num_blocks = self.kv_cache_manager.block_pool.num_gpu_blocks - 1  # vLLM reserves one block
        room = VllmRoom(num_blocks, self.block_size, self.max_num_running_reqs)
        self._planned = PlannedLane(plan, room, self._tell_front)
        capacity = self._lane.pool.kv_blocks * self.block_size
        if self.max_model_len > capacity:
            says = f"the plan's K/V memory holds only {capacity} tokens: give at most this number"
            raise InputError("--max-model-len", self.max_model_len, says)
        caches = self.cache_config.enable_prefix_caching
        self._mirror = Mirror(self.kv_cache_manager, self._table_of) if caches else None
        self._most_tokens: int = self.max_num_scheduled_tokens
        self._ended: dict[int, Chain] = {}
        self._untold: list[Request] = []
        """Requests that have not been submitted to the rule, including those that arrive while a plan waits."""
        self._name: dict[int, str] = {}
        self._expired: set[int] = set()
        self._num_begun = 0
        self._open: _Execution | None = None
        self._until: dict[str, int] = {}
        """For each request that vLLM sees, by vLLM's name, the number of its tokens that will have been computed when
        this step ends."""
        self._pieces: deque[_Execution | None] = deque()

    @property
    def _lane(self) -> OneLane:
        return self._planned.lane

    def add_request(self, request: Request) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if not known:
            self._name[self._number[request.request_id]] = request.request_id
            self._untold.append(request)

    # Schedule ------------------------------------------------------------------------------------------------

    def _schedule(self, throttle_prefills: bool) -> SchedulerOutput:
        for plan in () if self._front is None else self._front.plans():
            self._planned.go_over_to(plan)
        self._tell_the_rule()
        self._expired = set(self._lane.expire(self._now_ns))
        if self._expired:  # `xgpt serve` answers expired requests at their deadline, and cancels them in vLLM
            self.finish_requests([self._name[number] for number in self._expired], RequestStatus.FINISHED_ABORTED)
        if self._pause_state == PauseState.UNPAUSED and self._open is None:
            step = self._lane.next_step("both")
            self._open = None if step is None else self._begin(step)
        execution = self._open if self._pause_state == PauseState.UNPAUSED else None
        with self._nothing_in_sight_but({} if execution is None else execution.missing):
            output = super()._schedule(throttle_prefills)
        self._pieces.append(execution)
        if execution is not None:
            execution.pieces += 1
            for number, computed in list(execution.missing.items()):
                if self.requests[self._name[number]].num_computed_tokens >= computed:
                    del execution.missing[number]
            if not execution.missing:
                self._open = None
        return output

    def _begin(self, step: Step) -> _Execution:
        running = self._lane.pool.running
        for number in step.preempted:
            request = self.requests[self._name[number]]
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
        missing = {number: running[number].context for number in step.decode}
        missing |= {chunk.id: chunk.start + chunk.length for chunk in step.encode}
        execution = _Execution(step, missing, self._num_begun, self._num_settled)
        self._num_begun += 1
        if step.encode:
            self._tell_front(Began([chunk.id for chunk in step.encode]))
        return execution

    @contextmanager
    def _nothing_in_sight_but(self, missing: dict[int, int]) -> Iterator[None]:
        """Show vLLM only these requests and only their tokens of this step, since vLLM schedules all that it sees."""
        self._until = {self._name[number]: until for number, until in missing.items()}
        wanted = self._until.keys()
        running, waiting = self.running, list(self.waiting)
        seen = [request for request in running if request.request_id in wanted]
        self.running = list(seen)
        self.waiting = FCFSRequestQueue(request for request in waiting if request.request_id in wanted)
        # If a request enters, vLLM has computed none of its tokens, and will find the same cached blocks as the rule.
        cached = {self._name[number]: self._lane.pool.running[number].cached for number in missing}
        computed = {id_: self.requests[id_].num_computed_tokens or cached[id_] for id_ in wanted}
        tokens = sum(until - computed[self._name[number]] for number, until in missing.items())
        self.max_num_scheduled_tokens = min(self._most_tokens, tokens)
        try:
            yield
        finally:
            self.max_num_scheduled_tokens = self._most_tokens
            stayed, was_seen = set(self.running), set(seen)
            entered = [request for request in self.running if request not in was_seen]
            self.running = [r for r in running if r not in was_seen or r in stayed] + entered
            has_entered = set(entered)
            left = [request for request in self.waiting if request not in waiting]  # preempted by vLLM itself
            self.waiting = FCFSRequestQueue(left + [request for request in waiting if request not in has_entered])

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """The rule may cut any prompt, whereas vLLM by default cuts only the last one."""
        length: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return min(length, self._until.get(request.request_id, num_computed_tokens) - num_computed_tokens)

    def _table_of(self, request: Request) -> BlockTable:
        table = self._lane.pool.running[self._number[request.request_id]].table
        assert table is not None
        return table

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        if self._mirror is None:
            return super()._get_local_prefix_cache_hit(request)
        return *self._mirror.found(request), 0, False

    def _tell_the_rule(self) -> None:
        """Submit requests to the rule when they are ready. A grammar must be compiled before its request is ready."""
        if not self._untold or self._planned.is_emptying:
            return
        still_untold = []
        for request in self._untold:
            number = self._number.get(request.request_id)
            if number is None:
                continue  # the request was aborted before it was ready
            if not self._is_blocked_waiting_status(request.status) or self._handle_blocked_waiting_request(request):
                self._lane.submit(policies.Request(*arrival_of(number, request)))
            else:
                still_untold.append(request)
        self._untold = still_untold

    # Settle --------------------------------------------------------------------------------------------------

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        tokens, stopped = super()._update_request_with_output(request, new_token_ids, is_stale)
        if stopped:  # vLLM forgets the request before the step is settled
            self._ended[self._number[request.request_id]] = chain_of(request)
        return tokens, stopped

    def _settle(self, step: StepRecord) -> None:
        execution = self._pieces.popleft()
        if execution is not None:
            execution.pieces -= 1
            execution.record = step if execution.record is None else _joined(execution.record, step)
            self._settle_execution(execution)

    def _settle_execution(self, execution: _Execution) -> None:
        if execution.missing or execution.pieces:
            return
        record = execution.record
        if record is None:  # all requests of the step were cancelled when the step began
            self._lane.settle(execution.step, ())
            return
        ended = [self._lane.pool.running[number] for number in record.finished]
        outputs = {request.id: self._ended.pop(request.id, ())[len(request.chain) :] for request in ended}
        super()._settle(_in_order_of(execution, record)._replace(outputs=tuple(outputs.items())))
        self._lane.settle(execution.step, record.finished, outputs)
        for request in ended:
            del self._name[request.id]
        self._planned.go_on_if_empty()

    def _cancel(self, number: int) -> None:
        del self._name[number]
        if number in self._expired:  # the schedule has released the request, as will a replay of the log
            return
        super()._cancel(number)
        self._lane.cancel(number)
        if (execution := self._open) is not None and number in execution.missing:
            del execution.missing[number]
            if not execution.missing:
                self._open = None
                self._settle_execution(execution)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        ended = super().finish_requests(request_ids, finished_status)
        self._planned.go_on_if_empty()
        self._tell_front(Rested(self._planned.taken))  # there may be no later step to report this
        return ended

    def _tell_front(self, message: Began | Followed | Refused | Rested) -> None:
        if self._front is not None:
            self._front.send(message)

    def _room_taken(self) -> Room:
        return self._planned.taken

    def _refuse_what_breaks_the_rule(self) -> None:
        """Refuse options with which vLLM's steps would differ from the rule's steps."""
        config = self.vllm_config
        settings = config.scheduler_config
        if settings.async_scheduling:
            accepted = "the plan's schedule needs it off: give --no-async-scheduling"
            raise InputError("--async-scheduling", "on", accepted)
        for flag, value, needed in (
            ("--speculative-config", config.speculative_config and config.speculative_config.method, None),
            ("--scheduling-policy", settings.policy, "fcfs"),
            ("--long-prefill-token-threshold", settings.long_prefill_token_threshold, 0),
            ("--watermark", settings.watermark, 0),
        ):
            if value != needed:
                raise InputError(flag, value, "the plan's schedule needs vLLM's default: leave the flag out")
        if not config.scheduler_config.enable_chunked_prefill:
            says = "the plan decides where prompts are cut, so it must be on: leave --no-enable-chunked-prefill out"
            raise InputError("--enable-chunked-prefill", "off", says)
        logger.info("scheduling by %s", self.config["plan"])


def _in_order_of(execution: _Execution, record: StepRecord) -> StepRecord:
    """Return the executed step with its requests in the order of the rule's step, since vLLM's order is that of
    arrival."""
    step = execution.step
    place = {id_: n for n, id_ in enumerate((*(chunk.id for chunk in step.encode), *step.decode))}
    return record._replace(
        number=execution.number,
        settled=execution.settled,
        encode=tuple(sorted(record.encode, key=lambda piece: place[piece[0]])),
        decode=tuple(sorted(record.decode, key=place.__getitem__)),
    )


def _joined(first: StepRecord, second: StepRecord) -> StepRecord:
    encode = {id_: (start, length) for id_, start, length in first.encode}
    for id_, start, length in second.encode:
        begun, so_far = encode.get(id_, (start, 0))
        encode[id_] = (begun, so_far + length)
    return first._replace(
        end_ns=second.end_ns,
        encode=tuple((id_, *piece) for id_, piece in encode.items()),
        decode=first.decode + second.decode,
        finished=first.finished + second.finished,
        arrivals=first.arrivals + second.arrivals,
        cancelled=first.cancelled + second.cancelled,
    )


class Mirror:
    """Makes vLLM's K/V manager allocate the blocks that the rule's pool has chosen. Block b of the pool is vLLM's block
    b + 1.

    vLLM keeps its own tables, hashes and reference counts. The rule decides which cached blocks a request finds when it
    enters, and which block it gets next. So a block stays cached as long as the rule's pool keeps it, even if vLLM by
    itself would evict it.

    Raises:
        InputError: vLLM keeps several kinds of blocks, for example because some layers attend in windows.
    """

    def __init__(self, manager: KVCacheManager, table_of: Callable[[Request], BlockTable]) -> None:
        groups = manager.coordinator.single_type_managers
        if len(groups) > 1:
            accepted = "vLLM has several kinds of K/V blocks for this model; leave it off"
            raise InputError("--enable-prefix-caching", "on", accepted)
        self._group = groups[0]
        self._manager = manager
        self._blocks = manager.block_pool
        self._table_of = table_of
        self._asking: Request | None = None
        self._allocate_slots = manager.allocate_slots
        self._take_next = self._blocks.get_new_blocks
        manager.allocate_slots = self._allocate
        self._blocks.get_new_blocks = self._take_given

    def found(self, request: Request) -> tuple[KVCacheBlocks, int]:
        table = self._table_of(request)
        blocks = tuple(self._block(number) for number in table.blocks[: table.found])
        return self._manager.create_kv_cache_blocks((blocks,)), table.found * self._group.block_size

    def _allocate(self, request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        self._asking = request
        try:
            return self._allocate_slots(request, *args, **kwargs)
        finally:
            self._asking = None

    def _take_given(self, count: int) -> list[KVCacheBlock]:
        request, queue = self._asking, self._blocks.free_block_queue
        assert request is not None
        has = len(self._group.req_to_blocks[request.request_id])
        given = [self._block(number) for number in self._table_of(request).blocks[has : has + count]]
        assert len(given) == count, "vLLM takes more blocks than the rule has given"
        for block in given:
            queue.remove(block)
        queue.prepend_n(given)
        return self._take_next(count)

    def _block(self, number: int) -> KVCacheBlock:
        """Return vLLM's block for a block number of the rule's pool. vLLM reserves its first block."""
        return self._blocks.blocks[number + 1]
