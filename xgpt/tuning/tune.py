"""Find the best settings of an engine by starting it with few of them."""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xgpt.core.errors import InputError, MachineError
from xgpt.core.io import dump_json, write_atomic
from xgpt.core.schema import ChunkedSettings
from xgpt.core.schema.tuning import DrivenLoad, TuneJournal, TuneOutput, TuneRun
from xgpt.tuning.advice import advise
from xgpt.tuning.driving import drive, highest_rate
from xgpt.tuning.engines import READY_S, DidNotStart, Host, ProcessorUse
from xgpt.tuning.journal import Journal
from xgpt.tuning.problem import EngineProblem
from xscheduler.tuning.belief import MeasuredRate, Standing
from xscheduler.tuning.model import EngineModel, MeasuredTimes
from xscheduler.tuning.tuner import Tuner

LEAST_BUDGET_S = 60.0
MOST_RUNS = 60
IDLE_RUNS, IDLE_GAIN = 8, 0.01
"""After this number of measurements, none of which is better than all before by this share, the search ends."""
MOST_FAILURES = 3
"""If the first engines fail to start, the reason is not in their settings."""


@dataclass(frozen=True)
class Told:
    start: Callable[[str, float], None] = lambda command, rate_per_s: None
    end: Callable[[TuneRun, Standing], None] = lambda run, standing: None


class Search:
    def __init__(
        self, asked: EngineProblem, host: Host, journal: Path | None = None, *, resume: bool = False, seed: int = 0
    ) -> None:
        self._asked, self._host, self._seed = asked, host, seed
        model = EngineModel(asked.problem, asked.prior, asked.settings_now, variants=len(asked.variants))
        self.now = model.nearest(asked.settings_now[0]) if asked.settings_now else None
        self.tuner = Tuner(model, seed)
        self.journal = Journal(journal, self._header(model), resume=resume)
        for run in self.journal.runs:
            self._tell(run)
        if self._command(0) is None:
            problem = asked.problem
            says = "no command is known for it: plan for a checkpoint directory, and for vLLM, SGLang or TensorRT-LLM"
            raise InputError("model", problem.model.name if problem.checkpoint is None else problem.checkpoint, says)

    def run(self, budget_s: float | None = None, told: Told | None = None) -> TuneOutput:
        """Measure until the decision is certain, a further measurement promises nothing, or the time is over.

        Raises:
            MachineError: no engine started, or the time was too short for one measurement.
        """
        told = told or Told()
        if budget_s is not None and budget_s < LEAST_BUDGET_S:
            accepted = f"a start and one load take longer: give at least {LEAST_BUDGET_S:.0f}s"
            raise InputError("budget_s", budget_s, accepted)
        until_s = float("inf") if budget_s is None else time.monotonic() + budget_s
        ended = ""
        while not ended:
            standing = self.tuner.standing()
            candidate = self._next(standing)
            if candidate is None:
                ended = "the decision is certain" if standing.is_decided else "a further measurement promises nothing"
            elif len(self.journal.runs) >= MOST_RUNS:
                ended = f"{MOST_RUNS} settings were measured"
            elif time.monotonic() >= until_s or (self.journal.runs and time.monotonic() + self._usual_s >= until_s):
                ended = "the time is over"
            else:
                run = self.measured(candidate, until_s, told)
                if run is None:
                    ended = "the time is over"
                    continue
                self.journal.add(run)
                self._tell(run)
                told.end(run, self.tuner.standing())
                self._check_starts()
        if not any(run.loads for run in self.journal.runs):
            raise MachineError("the time was over before anything was measured: give a larger `budget_s`")
        return self.output(ended)

    def output(self, ended: str) -> TuneOutput:
        standing = self.tuner.standing()
        return TuneOutput(
            runs=tuple(self.journal.runs),
            sure=standing.sure,
            most_per_s=standing.most,
            ended=ended,
            recommendation=advise(self.tuner, self.now, self._command),
        )

    def _next(self, standing: Standing) -> int | None:
        measured = {found.candidate for found in self.tuner.belief.measured} | self.tuner.belief.excluded
        if self.now is not None and self.now not in measured:
            return self.now
        return None if standing.ends or self._is_idle else standing.next

    @property
    def _is_idle(self) -> bool:
        rates = [run.rate_per_s for run in self.journal.runs]
        before, last = rates[:-IDLE_RUNS], rates[-IDLE_RUNS:]
        return bool(before) and max(before) > 0 and max(last) < (1 + IDLE_GAIN) * max(before)

    @property
    def _usual_s(self) -> float:
        return float(np.median([run.seconds for run in self.journal.runs if run.loads] or [0.0]))

    def _command(self, candidate: int) -> str | None:
        model = self.tuner.model
        return self._asked.command_of(
            model.plan(candidate), is_now=candidate == self.now, variant=model.variant[candidate]
        )

    def measured(self, candidate: int, until_s: float = float("inf"), told: Told | None = None) -> TuneRun | None:
        """Start the engine with a candidate's settings and measure it. Return None if the time is over before that."""
        told, command = told or Told(), self._command(candidate)
        assert command is not None
        problem, (placement, settings) = self.tuner.model.problem, self.tuner.model.settings[candidate]
        expected = max(float(self.tuner.belief.draws[:, candidate].mean()), 0.02)
        told.start(command, expected)
        if self._asked.is_own:
            write_atomic(self._asked.file_of(plan := self.tuner.model.plan(candidate)), dump_json(plan))
        began_s, before, loads = time.monotonic(), ProcessorUse.now(), list[DrivenLoad]()
        start_s, found = 0.0, dict[str, Any]()

        def send(rate_per_s: float) -> DrivenLoad:
            load = drive(
                url,
                problem.workload,
                problem.constraint,
                rate_per_s,
                vocabulary=problem.model.vocab_size,
                seed=self._seed,
                until_s=until_s,
            )
            loads.append(load)
            return load

        try:
            with self._host.run(shlex.split(command), min(began_s + READY_S, until_s)) as url:
                start_s = time.monotonic() - began_s
                highest = highest_rate(send, expected, until_s)
                found |= {"rate_per_s": highest.rate_per_s, "error": highest.error}
        except DidNotStart as error:
            if time.monotonic() >= until_s:
                return None
            found |= {"start": "did not start", "reason": str(error), "for_memory": error.for_memory}
        except MachineError as error:
            if time.monotonic() >= until_s and not loads:
                return None
            found |= {"start": "died", "reason": str(error)}
        used = ProcessorUse.now()
        return TuneRun(
            token_budget=settings.token_budget,
            max_batch=settings.max_batch,
            placement=placement,
            further=self._asked.variants[self.tuner.model.variant[candidate]],
            command=command,
            loads=tuple(loads),
            start_s=start_s,
            seconds=time.monotonic() - began_s,
            processor_s=used.processor_s - before.processor_s,
            load_average=used.load_average,
            **found,
        )

    def _tell(self, run: TuneRun) -> None:
        candidate = self._candidate(run)
        if run.start != "started":
            self.tuner.tell_failed(candidate, for_memory=run.for_memory)
            return
        kept = [load for load in run.loads if load.kept and load.tpot_mean_s] or list(run.loads[-1:])
        times = [
            MeasuredTimes(candidate, load.rate_per_s, load.ttft_mean_s, load.tpot_mean_s)
            for load in kept[-1:]
            if load.tpot_mean_s and load.ttft_mean_s
        ]
        self.tuner.tell(MeasuredRate(candidate, run.rate_per_s, run.error or 0.03), *times)

    def _candidate(self, run: TuneRun) -> int:
        model, settings = self.tuner.model, (run.further, run.placement, run.token_budget, run.max_batch)
        for index, (placement, each) in enumerate(model.settings):
            if (self._asked.variants[model.variant[index]], placement, each.token_budget, each.max_batch) == settings:
                return index
        return self.tuner.model.nearest(ChunkedSettings(token_budget=run.token_budget, max_batch=run.max_batch))

    def _check_starts(self) -> None:
        runs = self.journal.runs
        if len(runs) >= MOST_FAILURES and all(run.start == "did not start" and not run.for_memory for run in runs):
            raise MachineError(f"the first {len(runs)} engines did not start; the last one: {runs[-1].reason}")

    def _header(self, model: EngineModel) -> TuneJournal:
        problem = model.problem
        bounds = problem.constraint.model_dump_json(exclude_none=True, exclude={"headroom"})
        said = f"{problem.model.name} on {problem.cluster.name} for {problem.workload.name}"
        settings = [(placement, each.token_budget, each.max_batch) for placement, each in model.settings]
        content = repr((said, bounds, problem.workload, settings, self._asked.variants)).encode()
        return TuneJournal(problem=said, sha256=hashlib.sha256(content).hexdigest())
