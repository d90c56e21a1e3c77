"""Predict the rates of sessions that an engine's settings serve."""

from __future__ import annotations

from collections.abc import Mapping

from xgpt.core.schema import ChunkedSettings, Plan, Profile
from xgpt.core.schema.plan import rate_of
from xgpt.core.sessions import turns_of
from xgpt.core.workload import TraceLengths
from xscheduler.objectives.sessions import of_turns
from xscheduler.problem import Problem
from xscheduler.tuning.belief import Array
from xscheduler.tuning.model import EngineModel, Prior
from xsimulator.fitted import Fit
from xsimulator.measures import RequestTimes
from xsimulator.session_rate import replay_sessions


class SessionModel(EngineModel):
    """The settings of an engine whose present plan serves sessions. Rates are of sessions that begin in a second.

    Under all settings, turns find as much in the cache as under the present ones. The closed forms decide only the
    ratios of rates: the present plan's rate is its own, which was simulated.

    Args:
        now: the present plan, with what its turns find.
        sent: the sessions of each measured load, by their rate.
    """

    def __init__(self, now: Plan, profile: Profile, prior: Prior | None, sent: Mapping[float, TraceLengths]) -> None:
        problem, law = Problem.of(now, profile), now.workload.sessions
        assert law is not None and isinstance(now.policy, ChunkedSettings)
        self._now, self._sent, self._scale = now, sent, 1.0
        super().__init__(problem.under(of_turns(problem)), prior, [now.policy])
        closed = float(self.rates(self.unfitted)[self.nearest(now.policy)])
        self._scale = rate_of(now) / turns_of(law) / closed if closed else 0.0

    def rates_of(self, problem: Problem) -> Array:
        return self._scale * super().rates_of(problem)

    def simulated(self, candidate: int, rate_per_s: float, fit: Fit) -> RequestTimes:
        run = replay_sessions(fit.of_plan(self._now), fit.of_profile(self.problem.profile), self._sent[rate_per_s])
        return RequestTimes(run.ttft_s, run.tpot_s, run.whole_s)
