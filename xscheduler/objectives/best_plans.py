"""Find each policy's best plan for a problem, and the best plan on replicas of equal stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from xgpt.core.errors import InfeasibleError, InputError, similar
from xgpt.core.progress import Progress
from xgpt.core.schema import AdmissionOrder, Pinned, Plan, PlanDraft, SearchMethod
from xgpt.core.schema.plan import rate_of
from xgpt.core.schema.policy import POLICY_GROUPS, PolicyChoice
from xscheduler.expression import names_in
from xscheduler.found import Found
from xscheduler.objectives.arrivals import CLOSED_FORMS, Arrivals
from xscheduler.objectives.nearest_bound import never_kept_closed
from xscheduler.objectives.saturation import Saturated, with_simulated_figures
from xscheduler.objectives.tuning import TunedArrivals
from xscheduler.placement import PLACED
from xscheduler.problem import Problem
from xscheduler.schedule import Scheduler, scheduler
from xscheduler.space import UNCUT, run_by, runnable
from xscheduler.tolerances import TOLERANCES
from xsimulator.costs.step_times import with_step_times
from xsimulator.counts.counted_run import is_counted
from xsimulator.forecast import CHOICES, TUNED

OF_ROWS = ("row_tokens", "eta_percent", "row_batches")


def plan_each(
    problem: Problem,
    policy: PolicyChoice = "auto",
    search: SearchMethod = "branch-and-bound",
    order: AdmissionOrder | None = None,
    progress: Progress | None = None,
) -> dict[str, Plan]:
    return {kind: found.plan for kind, found in found_each(problem, policy, search, order, progress).items()}


def found_each(
    problem: Problem,
    policy: PolicyChoice = "auto",
    search: SearchMethod = "branch-and-bound",
    order: AdmissionOrder | None = None,
    progress: Progress | None = None,
    *,
    proves: bool = True,
) -> dict[str, Found]:
    """Return each policy's best schedule with what is proven about the question, the best of all first.

    Args:
        proves: whether arrival rates get a proof, which may take longer than the search.
        order: order of admission. None means fcfs or, where it keeps a higher rate, in-time (see `_with_in_time`), and
            the order that tuning finds. A vLLM plan uses xgpt's scheduler class if it has another order or a tuned
            policy.
    """
    engine = problem.engine
    if engine is not None and engine.framework == "vllm" and (policy in TUNED or order not in (None, "fcfs")):
        problem = replace(problem, engine=engine.with_xgpt)
    if policy in TUNED:
        _check_tunable(problem, policy)
    _check_maximised(problem)
    for name in OF_ROWS:
        if name in problem.fixed and order != "das":
            raise InputError("fix", f"{name}={problem.fixed[name]}", "it needs `order=das`")
    if (percent := problem.fixed.get("eta_percent", 50)) >= 100:
        raise InputError("fix", f"eta_percent={percent}", "it must be from 1 to 99")
    kinds = kinds_of(problem, policy, order)
    # If any plan sustains the requested rate, the plan with the highest rate does.
    if problem.constraint.arrival_rate_per_s is not None:
        problem = problem.under(problem.constraint.but(objective="arrivals"))

    def finish(plan: PlanDraft) -> PlanDraft:
        return corrected(_admitting(plan, order or "fcfs", problem), problem)

    by = scheduler(problem, search)
    if policy in TUNED and problem.constraint.maximises_arrivals:  # `auto` includes no tuned policy: tuning is slow
        plans = TunedArrivals(by, finish, progress, policy, order).settle(kinds)
    else:
        find = partial(best_of_each, by, finish=finish, proves=proves)
        plans = _distinct(_own_searched(by, find(kinds, progress=progress), kinds, find))
        if order is None:
            plans = _with_in_time(by, plans, progress, proves=proves)
    pinned = Pinned(policy=policy, fixed=dict(problem.fixed))
    return {kind: replace(found, draft=found.draft.but(pinned=pinned)) for kind, found in plans.items()}


def best_of_each(
    by: Scheduler,
    kinds: Sequence[str],
    finish: Callable[[PlanDraft], PlanDraft] = lambda plan: plan,
    progress: Progress | None = None,
    *,
    is_closed: bool = False,
    only_best: bool = False,
    proves: bool = True,
) -> dict[str, Found]:
    """Return the best schedule of each policy by the problem's objective, the best of all first.

    Args:
        finish: completes a draft before it is simulated. For example, it sets the order of admission.
    """
    constraint = by.problem.constraint
    if is_closed and not constraint.maximises_arrivals:
        found = by.found(kinds)
        return dict(sorted(found.items(), key=lambda item: -item[1].draft.estimate.throughput_rps))
    if is_closed:
        closed = Arrivals(by)
        rated = [
            (kind, Found(draft, CLOSED_FORMS, closed_rate=rate))
            for kind in kinds
            for draft, rate in closed.of_kind(kind, 1)
        ]
        if not rated:
            by.found(kinds)  # raises an error with the reason if requests break the bounds even without waiting
            raise never_kept_closed(by, kinds)
        return dict(sorted(rated, key=lambda item: -(item[1].closed_rate or 0.0)))
    if constraint.maximises_arrivals:
        return Arrivals(by, finish, progress, only_best=only_best, proves=proves).settle(kinds)
    return Saturated(by, finish, progress).settle(kinds)


def _own_searched(
    by: Scheduler, plans: dict[str, Found], kinds: Sequence[str], find: Callable[[Sequence[str]], dict[str, Found]]
) -> dict[str, Found]:
    """Return the plans. If the best one is of a policy that the engine's own scheduler lacks, the policies that it has
    are searched again by themselves, since only the best policy's plan is searched to the end.
    """
    engine = by.problem.engine
    own = [kind for kind in kinds if engine is not None and engine.runs(kind) and kind in plans]
    if not own or next(iter(plans)) in own:
        return plans
    return plans | find(own)


def _with_in_time(
    by: Scheduler, plans: dict[str, Found], progress: Progress | None, *, proves: bool
) -> dict[str, Found]:
    """Return the plans. If TTFT is bounded and xgpt's rule runs the steps, the best plan may have order in-time. Only
    policies that mix prompts and decodes are tried, where counts simulate this order.
    """
    problem = by.problem
    constraint, engine = problem.constraint, problem.engine
    is_own = (engine is None or "xgpt" in (engine.framework, engine.scheduler)) and problem.speculation is None
    simple = problem.reused is None and problem.workload.sessions is None and not problem.model.is_encoder_decoder
    if not (constraint.maximises_arrivals and constraint.ttft_s is not None and is_own and simple):
        return plans

    def finish(plan: PlanDraft) -> PlanDraft:
        return corrected(_admitting(plan, "in-time", problem), problem)

    mixing = [kind for kind, found in plans.items() if found.draft.policy.mixes]
    kinds = [kind for kind in mixing if is_counted(_admitting(plans[kind].draft, "in-time", problem))]
    if not kinds:
        return plans
    with suppress(InfeasibleError):
        in_time = Arrivals(by, finish, progress, only_best=True, explains=False, proves=proves)
        ((kind, found),) = in_time.settle(kinds).items()
        best = next(iter(plans.values()))
        if rate_of(found.draft) > (1 + TOLERANCES.rate) * rate_of(best.draft):
            ceilings = [one.ceiling for one in (found, best)]
            unproven = [ceiling for ceiling in ceilings if ceiling.most is None]
            ceiling = (unproven or [found.ceiling._replace(most=max(each.most or 0.0 for each in ceilings))])[0]
            others = {name: one for name, one in plans.items() if name != kind}
            return {kind: replace(found, ceiling=ceiling), **others}
    return plans


def _check_tunable(problem: Problem, policy: str) -> None:
    constraint = problem.constraint
    by_rate = constraint.maximises_arrivals or constraint.arrival_rate_per_s is not None
    if not by_rate or constraint.tpot_s is None:
        raise InputError("policy", policy, "it needs `objective=arrivals` and a bound on the time per token, `tpot_s`")
    if problem.reused is not None:
        raise InputError("policy", policy, "it cannot plan for prompts with common prefixes: use chunked")
    if problem.model.is_encoder_decoder:
        says = f"it needs a decoder-only model, which {problem.model.name} is not; use chunked"
        raise InputError("policy", policy, says)


def _check_maximised(problem: Problem) -> None:
    text = problem.constraint.maximise
    if text is not None and "cost" in names_in(text) and problem.cluster.price_per_device_hour is None:
        raise InputError("price", None, f"`maximise` names cost, but {problem.cluster.name} states no price: give one")


def _distinct(plans: dict[str, Found]) -> dict[str, Found]:
    """Return the plans. If waa-c and waa-m divide the devices in the same way, return only the better one, as `waa`."""
    both = [kind for kind in plans if kind in POLICY_GROUPS["waa"]]
    if len(both) < 2 or plans[both[0]].draft.division != plans[both[1]].draft.division:
        return plans
    return {"waa" if kind == both[0] else kind: plan for kind, plan in plans.items() if kind != both[1]}


def kinds_of(problem: Problem, policy: PolicyChoice, order: AdmissionOrder | None = None) -> tuple[str, ...]:
    """Return the policies that a choice includes and the engine runs. For a tuned policy, this is the policy from which
    tuning begins.
    """
    kinds = POLICY_GROUPS.get(policy, (TUNED.get(policy, policy),))
    if policy == "auto" and problem.profile.engine == "vllm":  # vLLM frees a slot as soon as its request ends
        kinds = tuple(kind for kind in kinds if kind != "static")
    kinds = run_by(problem.engine, problem.speculation, kinds, policy, order)
    if policy in ("auto", "exegpt") and problem.profile.kv_transfer is None:
        kinds = tuple(kind for kind in kinds if kind not in POLICY_GROUPS["waa"])
    found = _with_variables(runnable(kinds, problem.model, problem.speculation), policy, problem.fixed)
    if not found:
        others = ", ".join(runnable(POLICY_GROUPS["auto"], problem.model))
        says = f"{UNCUT}, and {problem.model.name} has an encoder; take one of {others} or auto"
        raise InputError("policy", policy, says)
    return found


ENGINE_NAMES = {
    "max_num_seqs": "max_batch",
    "max_running_requests": "max_batch",
    "max_batch_size": "max_batch",
    "batch_size": "max_batch",
    "max_num_batched_tokens": "token_budget",
    "max_num_tokens": "token_budget",
    "chunked_prefill_size": "token_budget",
    "tensor_parallel_size": "tp",
    "tp_size": "tp",
    "pipeline_parallel_size": "pp",
    "pp_size": "pp",
    "data_parallel_size": "replicas",
}


def check_held(policy: PolicyChoice, fixed: Mapping[str, int]) -> None:
    """Check that the fixed variables exist. Call this before anything is measured for a plan."""
    _with_variables(POLICY_GROUPS.get(policy, (TUNED.get(policy, policy),)), policy, fixed)


def _with_variables(kinds: tuple[str, ...], policy: str, fixed: Mapping[str, int]) -> tuple[str, ...]:
    of_kind = {kind: variables_of(kind) for kind in CHOICES}
    known = set().union(*of_kind.values())
    for name, value in fixed.items():
        if name not in known:
            meant = ENGINE_NAMES.get(name.replace("-", "_").strip("_"))
            meant = meant or similar(name, known)
            hint = f"did you mean {meant}? Otherwise " if meant else ""
            raise InputError("fix", name, f"{hint}give one of {', '.join(sorted(known))}")
        if kinds and not any(name in of_kind[kind] for kind in kinds):
            having = ", ".join(kind for kind, names in of_kind.items() if name in names)
            raise InputError("fix", f"{name}={value}", f"policy {policy} has no such variable; these have it: {having}")
        if not value and not any(name in CHOICES[kind].settings.steadying for kind in CHOICES):
            raise InputError("fix", f"{name}=0", "it must be at least 1")
    return tuple(kind for kind in kinds if fixed.keys() <= of_kind[kind])


def variables_of(kind: str) -> set[str]:
    settings = CHOICES[kind].settings
    placed = set(PLACED) & (settings.model_fields.keys() | {"tp", "tp_devices", "ep", "pp", "replicas"})
    return placed | {variable.name for variable in settings.variables} | {*settings.steadying, *OF_ROWS}


def corrected(plan: PlanDraft, problem: Problem) -> PlanDraft:
    is_simulated = problem.reused is not None or not problem.constraint.maximises_arrivals
    return plan if is_simulated else with_simulated_figures(plan, problem.profile)


def _admitting(plan: PlanDraft, order: AdmissionOrder, problem: Problem) -> PlanDraft:
    """Unless `row_tokens` is fixed, a row under das has as many tokens as the prompts of an average number of running
    requests. Under lpt, all work is known at the start, so no request becomes overdue.
    """
    if order == "in-time":
        if plan.constraint.ttft_s is None:
            raise InputError("order", order, "it needs a bound on the time to first token, `ttft_s`")
        if len(plan.policy.lanes) > 1 or plan.model.is_encoder_decoder:
            says = f"{plan.policy.kind} cannot use it with {plan.model.name}: take another order or policy"
            raise InputError("order", order, says)
        plan = with_step_times(plan, problem.profile)
    at_once = max(1, round(plan.estimate.decode_batch * plan.workload.input.mean))
    changes: dict[str, object] = {"order": order, "row_tokens": None}
    if order == "lpt":
        changes["patience"] = None
    if order == "das":
        fixed = problem.fixed
        changes["row_tokens"] = fixed.get("row_tokens", at_once)
        if "eta_percent" in fixed:
            changes["eta"] = fixed["eta_percent"] / 100
    return plan.but(admission=plan.admission.but(**changes))
