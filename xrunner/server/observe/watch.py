"""Observe how a served plan performs. When lengths or pace change, let a planner judge the plan.

This module runs in the event loop's thread. Planning (`xgpt.core.schema.Planner`), the test for changes and the summary
of lengths run elsewhere."""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from xgpt.core.errors import XgptError
from xgpt.core.schema import Decision, FailedJudgement, Plan, Planner
from xgpt.core.schema.step_log import StepRecord
from xgpt.observation import paces
from xgpt.observation.observer import Observer, Snapshot
from xgpt.observation.windows import Seen

RECENT_S = 30.0
"""Seconds over which recent rates and latencies are computed."""
LEAST_S = 1.0
"""Shortest time, in seconds, over which rates are computed. All requests of one batch end at the same moment."""


class Ended(NamedTuple):
    """A request whose output was not cut off.

    Attributes:
        latency_s: time from the start of the request's first step to its last token.
        first_s, whole_s: times from submission to the engine to the first token, and to the last token.
        is_kept: whether the request kept its bounds, or None if it has no bounds."""

    num_tokens: int
    latency_s: float
    first_s: float
    whole_s: float
    is_kept: bool | None


class Recent:
    def __init__(self) -> None:
        self._ended: deque[tuple[float, Ended]] = deque(maxlen=8192)

    def end(self, request: Ended) -> None:
        self._ended.append((time.perf_counter(), request))

    def rate_per_s(self) -> float | None:
        seconds = self._forget()
        return (len(self._ended) - 1) / seconds if len(self._ended) > 1 else None

    def figures(self) -> dict[str, float | None]:
        """If no request has ended recently, quantiles, shares and the request rate are None."""
        seconds = self._forget()
        ended = [request for _, request in self._ended]
        kept = [request.is_kept for request in ended if request.is_kept is not None]
        return {
            "throughput_rps": self.rate_per_s(),
            "output_tokens_per_s": sum(request.num_tokens for request in ended) / seconds,
            "latency_p50_s": _quantile((request.latency_s for request in ended), 0.5),
            "latency_p99_s": _quantile((request.latency_s for request in ended), 0.99),
            "first_p99_s": _quantile((request.first_s for request in ended), 0.99),
            "whole_p99_s": _quantile((request.whole_s for request in ended), 0.99),
            "share_kept": sum(kept) / len(kept) if kept else None,
        }

    def _forget(self) -> float:
        """Return the length in seconds, at least `LEAST_S`, of the period in which the others ended."""
        now_s = time.perf_counter()
        while self._ended and self._ended[0][0] < now_s - RECENT_S:
            self._ended.popleft()
        return max(LEAST_S, min(RECENT_S, now_s - self._ended[0][0])) if self._ended else RECENT_S


def _quantile(seconds: Iterable[float], quantile: float) -> float | None:
    values = list(seconds)
    return float(np.quantile(values, quantile, method="higher")) if values else None


logger = logging.getLogger(__name__)

MAX_HISTORY = 256
RETRY_S, LONGEST_RETRY_S = 30.0, 3600.0
"""Seconds without judgements after one that failed, and the most seconds to which repeated failures double them."""
RECORD_EVERY_S = 600.0
"""Seconds between two records of the machine's pace."""


class Watch:
    """Tracks a served plan: its predictions, observations, and decisions to change it.

    Args:
        planner: judges plans. None means that lengths are observed but the plan never changes.

    Attributes:
        history: decisions and failed judgements, the latest last.
        judging_since: time (ISO 8601, UTC) at which the present judgement of the plan began."""

    def __init__(self, plan: Plan, planner: Planner | None = None) -> None:
        self.history: deque[Decision | FailedJudgement] = deque(maxlen=MAX_HISTORY)
        self.judging_since: str | None = None
        self.num_failures = 0
        self._retry_s = 0.0
        """Time before which no judgement begins."""
        self.recent = Recent()
        self.loop_s = 0.0
        """Longest time for which a check has blocked the event loop."""
        self._observer = Observer(plan)
        self._recorded_s = time.perf_counter()
        """Time at which the pace was last recorded or, before that, at which the watch started."""
        self._recording: asyncio.Task[None] | None = None
        self._planner = planner
        self._apply: Callable[[Plan], None] | None = None
        self._before: Plan | None = None
        """The previous plan, which runs again if the running plan cannot be deployed."""
        self._refused: list[tuple[object, object]] = []
        self._judging: asyncio.Task[None] | None = None
        self._asking = asyncio.Lock()
        """Locked while the planner answers a question, since the planner can answer only one at a time."""
        self._would: asyncio.Task[Decision | None] | None = None
        self._is_draining: Callable[[], bool] = lambda: False
        self.on_decision: Callable[[Decision | FailedJudgement], None] = lambda decision: None

    def start(self, apply: Callable[[Plan], None], is_draining: Callable[[], bool] = lambda: False) -> None:
        """Begin to watch. `is_draining`: returns whether the server is draining. If so, the plan does not change."""
        self._apply, self._is_draining = apply, is_draining

    async def stop(self) -> None:
        await self._record_pace()
        if self._judging is not None:
            self._judging.cancel()
            await asyncio.gather(self._judging, return_exceptions=True)
        if self._planner is not None:
            await self._planner.close()

    @property
    def plan(self) -> Plan:
        return self._observer.plan

    @property
    def planned_under_s(self) -> float | None:
        """The wider latency bound, in seconds, under which re-planning found the running plan. None means the plan's
        own bound."""
        for decision in reversed(self.history):
            if isinstance(decision, Decision) and decision.action != "keep" and decision.best is not None:
                return decision.planned_under_s if decision.best.policy == self.plan.policy else None
        return None

    @property
    def can_replan(self) -> bool:
        return self._planner is not None

    @property
    def step_ratio(self) -> float | None:
        """Ratio of measured to predicted time of recent steps, or None if there is no prediction."""
        return self._observer.pace.ratio

    @property
    def arrival_rate_per_s(self) -> float:
        return self._observer.window.arrival_rate_per_s(time.perf_counter())

    def arrive(self, input_length: int, max_output: int) -> Seen:
        """Note a request's arrival. The caller must count the request's tokens in the returned object."""
        return self._observer.window.arrive(time.perf_counter(), input_length, max_output)

    def note(self, record: StepRecord) -> None:
        """Note an executed step. Its record shows which blocks requests shared."""
        if self._planner is not None:
            self._observer.reuse.note(record)

    def end(self, seen: Seen, request: Ended) -> None:
        self._observer.end(seen)
        if request.is_kept is not None:
            self._observer.goodput.note(is_kept=request.is_kept)
        self.recent.end(request)
        self._look()

    def wants_step(self, record: StepRecord) -> bool:
        return self._planner is not None and self._observer.pace.wants_step((record.end_ns - record.start_ns) / 1e9)

    def judge_step(self, record: StepRecord, running: dict[int, Seen]) -> None:
        """Compare a step with its prediction. `running` has the step's requests in their state before the step."""
        assert self._planner is not None
        if any(id_ not in running for id_ in (*record.decode, *(chunk[0] for chunk in record.encode))):
            return  # some requests were cancelled, or their tokens are held back
        has_encoder = self.plan.model.is_encoder_decoder  # an encoder reads only the prompt and no output
        ends = {id_: seen.input_length + (0 if has_encoder else seen.generated) for id_, seen in running.items()}
        encode = [(start, start + length, int(start + length == ends[id_])) for id_, start, length in record.encode]
        decodes = [(running[id_].input_length, running[id_].generated) for id_ in record.decode]
        predicted_s = self._planner.predict_s(self.plan, encode, decodes)
        if predicted_s is None:
            return
        self._observer.pace.note(record.end_ns / 1e9, (record.end_ns - record.start_ns) / 1e9, predicted_s)
        if time.perf_counter() - self._recorded_s >= RECORD_EVERY_S:
            self._recording = asyncio.create_task(self._record_pace())
        self._look()

    async def _record_pace(self) -> None:
        self._recorded_s, slowdown = time.perf_counter(), self._observer.slowdown
        if slowdown is not None and self._observer.pace.is_known:
            await asyncio.to_thread(paces.record, self.plan, slowdown)

    def snapshot(self, *, lengths_alone: bool = False) -> Snapshot | None:
        """Return what the recent observation is computed from, or None if no request has ended yet. `lengths_alone`:
        whether to leave out prefix reuse, which takes a tenth of a second to compute."""
        now = self._observer.snapshot()
        return now._replace(common=[]) if now is not None and lengths_alone else now

    async def would_decide(self) -> Decision | None:
        """Return the decision that re-planning would make now, without carrying it out. Return None if re-planning is
        off or nothing was observed. Simultaneous calls share one answer. Raises MachineError: planning failed."""
        if self._planner is None:
            return None
        if self._would is None or self._would.done():
            self._would = asyncio.create_task(self._decision(self._planner))
        return await asyncio.shield(self._would)

    async def _decision(self, planner: Planner) -> Decision | None:
        now = self.snapshot()
        observation = None if now is None else await asyncio.to_thread(now.observation)
        if observation is None:
            return None
        async with self._asking:
            return (await planner.propose(self.plan, observation)).decision

    def go_over_to(self, plan: Plan) -> None:
        self._observer.go_over_to(plan)

    def go_back(self, reason: str) -> None:
        before, refused = self._before, self.plan
        if before is None or self._apply is None:
            return
        self._before = None
        self._refused.append((refused.policy, refused.stages))
        self._observer.go_over_to(before)
        self._apply(before)  # replicas that have already changed also return
        logger.error(
            "the new plan could not be deployed, so the previous plan continues", extra={"fields": {"reason": reason}}
        )

    def _look(self) -> None:
        if (
            self._planner is None
            or self._apply is None
            or self._is_draining()
            or (self._judging is not None and not self._judging.done())
        ):
            return
        now_s = time.perf_counter()
        if now_s < self._retry_s or not self._observer.is_due(now_s):
            return
        now = self._observer.snapshot()
        if now is not None:
            self._judging = asyncio.create_task(self._judge(self._planner, now))
        self.loop_s = max(self.loop_s, time.perf_counter() - now_s)

    async def _judge(self, planner: Planner, now: Snapshot) -> None:
        observation, begin_s = None, time.perf_counter()
        try:
            observation = await asyncio.to_thread(self._observer.look, now)
            if observation is None:
                return
            self.judging_since = _utc_now()
            async with self._asking:
                decision, plan = await planner.propose(self.plan, observation)
            if self._is_draining():
                return
            if plan is not None and (plan.policy, plan.stages) in self._refused:
                logger.warning("re-planning chose a plan whose deployment failed before, so the running plan stays")
                return
            if plan is not None:
                self._go_over(plan)
        except Exception as error:
            # Whatever the error is, serving continues.
            reason = (str(error) if isinstance(error, XgptError) else repr(error)) or type(error).__name__
            logger.error("re-planning failed", extra={"fields": {"reason": reason}})
            cause = "asked" if observation is None else observation.cause
            took_s = time.perf_counter() - begin_s
            failed = FailedJudgement(at=_utc_now(), cause=cause, reason=reason, planning_s=took_s)
            self.history.append(failed)
            self._retry_s = time.perf_counter() + min(RETRY_S * 2.0**self.num_failures, LONGEST_RETRY_S)
            self.num_failures += 1
            self.on_decision(failed)
            return
        finally:
            self.judging_since = None
        self.num_failures = 0
        self.history.append(decision)
        self.on_decision(decision)
        fields = decision.model_dump(mode="json") | {"settings": self.plan.policy.model_dump(mode="json")}
        logger.info("re-planned" if plan is not None else "plan kept", extra={"fields": fields})

    def _go_over(self, plan: Plan) -> None:
        assert self._apply is not None
        self._apply(plan)
        self._before = self.plan
        self.go_over_to(plan)


def _utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
