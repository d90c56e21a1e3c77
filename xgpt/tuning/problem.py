"""Make the problem of an engine's own scheduler from a request, and find the settings that run now in it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import chain, product
from pathlib import Path

from xgpt.checkpoints import hub
from xgpt.comparing.compare import engine_name, score_current
from xgpt.comparing.current import CurrentEngine
from xgpt.comparing.flags import Given
from xgpt.comparing.launched import read_current
from xgpt.core.errors import InputError
from xgpt.core.progress import Progress
from xgpt.core.schema import ChunkedSettings, ClusterSpec, Plan, Profile
from xgpt.core.schema.profile import SERVED
from xgpt.deciding.commands import engine_command
from xgpt.problems import resolve
from xgpt.requests import PlanRequest, ProblemRequest, as_plan_request
from xgpt.resolve import load_cluster, load_engine
from xgpt.tuning.engines import parted
from xscheduler.problem import Problem
from xscheduler.tuning.model import Prior

UNMEASURED = Prior(0.5, 0.35)
"""What is known of an engine on this machine if only xgpt's own engine was measured here."""


MOST_VARIANTS = 16


def variants_of(also: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the words of all combinations of flags, each given as FLAG or FLAG=VALUE,VALUE. The first has none."""
    choices: list[list[tuple[str, ...]]] = []
    for text in also:
        name, equals, values = text.partition("=")
        flag = f"--{name.strip().removeprefix('--')}"
        if flag == "--" or any(flag == one[1][0] for one in choices):
            raise InputError("also", text, "give each flag once, as FLAG or FLAG=VALUE,VALUE")
        choices.append([(), *([(flag, value) for value in values.split(",")] if equals else [(flag,)])])
    found = tuple(tuple(chain.from_iterable(one)) for one in product(*choices))
    if len(found) > MOST_VARIANTS:
        raise InputError("also", ", ".join(also), f"these are {len(found)} combinations: at most {MOST_VARIANTS}")
    return found


@dataclass(frozen=True)
class EngineProblem:
    """The settings to choose among.

    Attributes:
        kept: options of the present command that other settings' commands repeat.
        variants: further words of the command, each of which is tried. The first has none.
        plans: folder of the plans that xgpt's own engine serves.
    """

    problem: Problem
    prior: Prior | None = None
    now: Plan | None = None
    kept: Given = field(default_factory=dict)
    command: str = ""
    variants: tuple[tuple[str, ...], ...] = ((),)
    plans: Path = Path()

    @property
    def is_own(self) -> bool:
        return self.problem.engine is not None and self.problem.engine.framework == "xgpt"

    def file_of(self, plan: Plan) -> Path:
        return self.plans / f"{sha256(repr((plan.policy, plan.stages, plan.replicas)).encode()).hexdigest()[:12]}.json"

    def command_of(self, plan: Plan, *, is_now: bool, variant: int = 0) -> str | None:
        """Return what starts the engine with a plan's settings: for those that run now, the present command itself; on
        the same devices, the present command with other sizes, so that nothing else differs.
        """
        if is_now and self.command:
            return self.command
        if self.is_own:
            command = plan.checkpoint and shlex.join(["xgpt", "serve", str(self.file_of(plan)), "--no-replan"])
        else:
            command = engine_command(plan, self.kept)
        if command and self.command and self.now is not None and _shape(plan) == _shape(self.now):
            command = _resized(self.command, command)
        return command and " ".join([command, *map(shlex.quote, self.variants[variant])])

    @property
    def settings_now(self) -> list[ChunkedSettings]:
        return [self.now.policy] if self.now is not None and isinstance(self.now.policy, ChunkedSettings) else []


SIZES = re.compile(
    r"--(max[-_]num[-_]batched[-_]tokens|max[-_]num[-_]seqs|chunked[-_]prefill[-_]size|max[-_]running[-_]requests)"
)


def _shape(plan: Plan) -> tuple[object, ...]:
    return plan.replicas, [(stage.tp, stage.ep) for stage in plan.stages]


def _resized(command: str, other: str) -> str:
    return shlex.join([*parted(shlex.split(command), SIZES)[0], *parted(shlex.split(other), SIZES)[1]])


def engine_problem(
    request: ProblemRequest, current: str | None, progress: Progress | None = None, also: Sequence[str] = ()
) -> EngineProblem:
    """Return the problem of a request.

    Args:
        also: flags with which every setting is tried, too, each as FLAG or FLAG=VALUE,VALUE.

    Raises:
        InputError: names are not known, the bounds are missing, or the command cannot be read.
        InfeasibleError: the model does not fit.
    """
    planned, variants = as_plan_request(request, policy="chunked"), variants_of(also)
    if not planned.constraint.bounds_latency or not planned.constraint.maximises_arrivals:
        says = "give a bound: `latency_bound_s`, `ttft_s` or `tpot_s`"
        raise InputError("latency_bound_s", planned.latency_bound_s, says)
    cluster = planned.cluster if isinstance(planned.cluster, ClusterSpec) else load_cluster(planned.cluster)
    running = None if current is None else read_current(current, cluster)
    if running is not None:
        planned = _with_model(planned, running)
    name = planned.engine or ("vllm" if running is None else engine_name(running))
    problem, prior = _resolved(planned, name, cluster, progress)
    if problem.engine is None or problem.engine.scheduler != "own":
        raise InputError("engine", None if problem.engine is None else problem.engine.name, "give vllm, sglang or xgpt")
    if running is None:
        return EngineProblem(problem, prior, variants=variants)
    now = score_current(problem, running)
    return EngineProblem(problem, prior, now, running.kept, running.command, variants)


def _with_model(request: PlanRequest, running: CurrentEngine) -> PlanRequest:
    if "model" in request.model_fields_set:
        return request
    if running.model is None:
        raise InputError("current", running.framework, "it names no model: add it to the command, or give `model`")
    return request.but(model=running.model) if request.config is None or hub.is_id(running.model) else request


def _resolved(
    request: PlanRequest, name: object, cluster: ClusterSpec, progress: Progress | None
) -> tuple[Problem, Prior | None]:
    if not cluster.is_local or request.profile is not None or name == "xgpt":
        return resolve(request.but(engine=name), progress), None
    engine = load_engine(str(name)).measured_on(cluster.device.type)
    problem = resolve(request.but(engine=None), progress)
    return replace(
        problem, profile=_as_of(problem.profile, engine.framework, engine.version), engine=engine
    ), UNMEASURED


def _as_of(profile: Profile, framework: str, version: str) -> Profile:
    provenance = {name: text for name, text in profile.provenance.items() if name != SERVED}
    return profile.but(engine=framework, engine_version=version, jitter=None, provenance=provenance)
