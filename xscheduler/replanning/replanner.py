"""Compare a running plan with the best plan for observed lengths, offline or for a server.

python -m xscheduler.replanning.replanner     # a server's planning process: JSON lines in, JSON lines out
"""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xgpt.connection import Failure, answer_of, own_api_key
from xgpt.core.documents import read_json
from xgpt.core.errors import InputError, MachineError, XgptError, reason_of
from xgpt.core.io import parse
from xgpt.core.load import LogLoad
from xgpt.core.processes import run_module
from xgpt.core.reuse_distances import ReuseCurve
from xgpt.core.schema import Decision, Observation, Plan, Profile, Proposal
from xgpt.core.schema.plan import rate_of
from xgpt.observation.observer import slowdown_to_plan_with
from xgpt.observation.reuse import most_kept, summary_of
from xgpt.observation.windows import observe_lengths
from xsimulator.costs.step_cost import LaneCost, StepCounts
from xsimulator.stages import whole

if TYPE_CHECKING:
    from xscheduler.replanning.decide import Verdict
    from xscheduler.replanning.judge import Terms

logger = logging.getLogger(__name__)

NICENESS = 10
"""Niceness of the planning process, so that serving has priority."""
PATIENCE_S = 120.0
"""The replanner gives up once planning has used this much CPU time, or has used none for this long. On a busy machine
planning may take much longer.
"""
LOOK_S = 1.0
ANSWER_S = 30.0


@dataclass(frozen=True)
class Replanned:
    """A judgement of a running plan, and the plan that should run."""

    judged: Plan
    observation: Observation
    decision: Decision
    plan: Plan


def propose(plan: Plan, profile: Profile, observation: Observation, terms: Terms | None = None) -> Proposal:
    """Compare a running plan with the best plan. Return the decision and the new plan, if any. See `judged`."""
    from xscheduler.replanning.decide import judged

    started = time.perf_counter()
    slowdown = slowdown_to_plan_with(plan.profile, observation.slowdown)
    return concluded(plan, observation, judged(plan, profile, observation, terms, slowdown), slowdown, started)


def concluded(plan: Plan, observation: Observation, verdict: Verdict, slowdown: float, started: float) -> Proposal:
    """Return a verdict as a decision, and the new plan, if any."""
    then, lengths = verdict.plan if verdict.switch else None, observation.workload
    decision = Decision(
        at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        action="keep" if then is None else "swap" if verdict.change.is_swap else "redeploy",
        cause=observation.cause,
        cause_detail=in_numbers(plan, observation),
        reason=verdict.reason,
        num_requests=observation.num_requests,
        lengths=observation.lengths,
        input_mean=lengths.input.mean,
        output_mean=lengths.output.mean,
        observed_input_mean=observation.recent_input_mean or lengths.input.mean,
        observed_output_mean=observation.recent_output_mean or lengths.output.mean,
        arrival_rate_per_s=observation.arrival_rate_per_s,
        running=verdict.running,
        best=verdict.best,
        planned_under_s=verdict.planned_under_s,
        slowdown=slowdown,
        gain=verdict.gain,
        pause_s=0.0 if then is None else verdict.change.pause_s,
        start_s=0.0 if then is None else verdict.change.start_s,
        plan_sha256=(then or plan).digest,
        planning_s=time.perf_counter() - started,
        num_unbuilt=verdict.num_unbuilt,
    )
    return Proposal(decision, then)


def in_numbers(plan: Plan, observation: Observation) -> str:
    if observation.cause == "lengths":
        planned, now = plan.workload, observation.workload
        inputs = f"mean lengths went from {planned.input.mean:.0f} to {now.input.mean:.0f} input tokens"
        return f"{inputs}, and from {planned.output.mean:.0f} to {now.output.mean:.0f} output tokens"
    if observation.cause == "pace" and observation.slowdown is not None:
        planned_for = "" if plan.profile.slowdown == 1 else f"; the plan assumes {plan.profile.slowdown:.2f} times"
        return f"steps take {observation.slowdown:.2f} times as long as in the profile{planned_for}"
    if observation.cause == "goodput" and observation.goodput is not None:
        kept = f"{observation.goodput:.1%} of recent requests kept their bounds"
        return f"{kept}, but {plan.constraint.quantile:.1%} should"
    if observation.cause == "arrivals" and observation.arrival_rate_per_s is not None:
        arriving = f"{observation.arrival_rate_per_s:.3g} requests/s arrive"
        return f"{arriving}, but the plan keeps its bounds only up to {rate_of(plan):.3g}"
    if observation.cause == "reuse" and observation.reuse is not None:
        planned_share = 0.0 if plan.estimate.reuse is None else plan.estimate.reuse.share
        return f"{observation.reuse.share:.0%} of prompt tokens were cached, but the plan assumes {planned_share:.0%}"
    return f"a user asked for a decision, after {observation.num_requests} requests"


def observe_log(plan: Plan, log: LogLoad) -> Observation:
    """Return what a log shows of a plan's requests: their lengths, the rate of the busiest window, shared prefixes."""
    lengths, busiest = log.requests, log.busiest
    observation = observe_lengths(lengths.input, lengths.output, plan.workload)
    if busiest is not None:
        observation = observation.but(arrival_rate_per_s=busiest.rate_per_s)
    if lengths.prefixes is not None:
        curve, estimated = ReuseCurve(lengths, plan.block_size), plan.estimate.reuse
        kept = most_kept(plan) if estimated is None else estimated.kept_blocks
        observation = observation.but(reuse=summary_of(curve, curve.share(kept * plan.block_size)))
    return observation


def observe_server(plan: Plan, source: str) -> tuple[Plan, Observation]:
    """Return the plan that a server runs, and what it has observed of its requests.

    Args:
        source: the URL of a server (without /plan).

    Raises:
        InputError: the server runs another model or version.
        MachineError: the server does not respond, or has served too few requests.
    """
    says = ""
    try:
        status, body = answer_of(f"{source.rstrip('/')}/plan", seconds=ANSWER_S, api_key=own_api_key())
        says = "" if status == 200 else f"HTTP {status}"
        answer = read_json(body)
        running, observed = answer["plan"], answer["observed"]
    except (*Failure, ValueError, KeyError, TypeError) as error:
        says = says or (reason_of(error) if isinstance(error, OSError) else str(error))
        raise MachineError(
            f"{source}/plan does not answer with a plan and observed lengths: {says}; give the URL of a server that "
            "`xgpt serve` started"
        ) from None
    if observed is None:
        raise MachineError(f"too few requests have ended at {source}; try again later")
    running = parse(running, Plan, "plan")
    if running.model != plan.model:
        raise InputError(
            "lengths",
            source,
            f"it serves {running.model.name}, but the plan is for {plan.model.name}: give a plan for the same model",
        )
    return running, parse(observed, Observation, "observed")


class BackgroundPlanner:
    """Implements `xgpt.core.schema.Planner`: runs the planner in a separate process at low priority."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self._cost_of = cache(lambda tp, ep: LaneCost(plan.model, profile, whole(plan.model, tp, ep)))
        self._profile_json = profile.model_dump_json()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            run_module("xscheduler.replanning.replanner"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Ctrl-C must reach only the server, which then ends this process. A new process group is enough. A new
            # session would make niceness useless, since the kernel divides cores evenly among sessions (autogroups).
            process_group=0,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        threading.Thread(target=self._report_end, args=(self._process,), daemon=True).start()
        assert self._process.stdin is not None
        with suppress(OSError):  # if the process has ended, the first question reports this
            self._process.stdin.write(self._profile_json.encode() + b"\n")
            self._process.stdin.flush()

    def _report_end(self, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if self._process is process:
            ended = f"signal {-status}" if status < 0 else f"exit code {status}"
            logger.error("the re-planning process %d has ended: %s; serving continues", process.pid, ended)

    def predict_s(self, plan: Plan, encode: list[tuple[int, int, int]], decodes: list[tuple[int, int]]) -> float | None:
        if len(plan.stages) > 1:
            return None
        cost = self._cost_of(plan.stages[0].tp, plan.stages[0].ep)
        (step_s,) = cost.step(StepCounts.of_requests(encode, decodes, has_encoder=cost.has_encoder))
        return plan.profile.slowdown * step_s

    async def propose(self, plan: Plan, observation: Observation) -> Proposal:
        try:
            try:
                answer = await self._answer(plan, observation)
            except TimeoutError:
                raise
            except OSError:  # the process was killed, which says nothing about the question
                await self.close()
                answer = await self._answer(plan, observation)
        except OSError as error:
            await self.close()
            raise MachineError(f"planning failed: {str(error) or type(error).__name__}") from None
        if "error" in answer:
            raise MachineError(f"planning failed: {answer['error']}")
        return await asyncio.to_thread(_proposal, answer)

    async def _answer(self, plan: Plan, observation: Observation) -> dict[str, Any]:
        begin_s = used_s = self._used_s()
        moved_s = time.monotonic()
        asking = asyncio.create_task(asyncio.to_thread(self._ask, plan, observation))
        try:
            while not (await asyncio.wait([asking], timeout=LOOK_S))[0]:
                before_s, used_s = used_s, self._used_s()
                moved_s = time.monotonic() if used_s != before_s else moved_s
                if used_s - begin_s > PATIENCE_S:
                    raise TimeoutError(f"it took longer than {PATIENCE_S:g} s of a core's time")
                if time.monotonic() - moved_s > PATIENCE_S:
                    raise TimeoutError(f"it has not run for {PATIENCE_S:g} s")
            return asking.result()
        finally:
            asking.cancel()

    def _used_s(self) -> float:
        if self._process is None:
            return 0.0
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            return time.monotonic()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def close(self) -> None:
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # unread data
                    pipe.close()

    def _ask(self, plan: Plan, observation: Observation) -> dict[str, Any]:
        if self._process is None:
            self.start()
        assert self._process is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(_question(plan, observation))
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise OSError("the planning process has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _question(plan: Plan, observation: Observation) -> bytes:
    return f'{{"plan":{plan.model_dump_json()},"observation":{observation.model_dump_json()}}}\n'.encode()


def _proposal(answer: dict[str, Any]) -> Proposal:
    plan = answer["plan"]
    return Proposal(Decision.model_validate(answer["decision"]), None if plan is None else Plan.model_validate(plan))


def main() -> None:
    """A question is a plan and an observation. Each message is one line of JSON."""
    os.nice(NICENESS)
    profile = Profile.model_validate_json(sys.stdin.readline())
    import_module("xscheduler.replanning.decide")  # load the modules that `propose` needs before the first question
    for line in sys.stdin:
        question = json.loads(line)
        try:
            decision, plan = propose(
                Plan.model_validate(question["plan"]), profile, Observation.model_validate(question["observation"])
            )
            answer: dict[str, Any] = {
                "decision": decision.model_dump(mode="json"),
                "plan": None if plan is None else plan.model_dump(mode="json"),
            }
        except XgptError as error:
            answer = {"error": str(error) or type(error).__name__}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
