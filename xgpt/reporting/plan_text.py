"""Describe a plan as text, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from xgpt.core.schema import SERVED, ChunkedSettings, Constraint, Plan
from xgpt.core.schema.constraint import BOUND_NAMES
from xgpt.core.schema.policy import POLICY_GROUPS, POLICY_WORDS, PolicyChoice
from xgpt.deciding.phrases import range_in_words
from xscheduler.expression import maximised, objective_value
from xscheduler.objectives.best_plans import kinds_of
from xscheduler.objectives.sessions import KINDS as IN_SESSIONS
from xscheduler.problem import Problem
from xscheduler.space import UNCUT
from xsimulator.forecast import FORECASTS

TIMED_WORDS = {
    "layer_s": "the time to launch a layer",
    "step_s": "the engine loop's time for each step",
    "request_s": "the engine loop's time for each request",
    "uncaptured": "the slow-down of steps without CUDA graphs",
    "mixing": "the slow-down of decodes in steps with prompts",
    "before_admission_s": "a request's time in the API server",
    "launch_s": "the time to launch a kernel",
    "tokenise_s": "the time to tokenise prompts",
}
"""Descriptions of the figures in `xgpt.core.schema.engine.TIMED`."""
KEEPS_MOST = "the share of your load that keeps the bounds, since no plan found holds it"
OF_WINDOW = {"interval": "the requests of each interval", "day": "the day's requests"}


def settings_text(plan: Plan) -> str:
    """Return the values of a plan's control variables, as in "encode_batch 4, decode_iterations 9". A plan for several
    devices also has its replicas and stages.
    """
    policy = plan.policy
    texts = [f"{variable.name} {getattr(policy, variable.name)}" for variable in policy.variables]
    for of_rule in (getattr(policy, name) for name in policy.tuned):
        if of_rule is not None:
            texts += [f"{name} {value:g}" for name, value in of_rule]
    if isinstance(policy, ChunkedSettings) and policy.microbatches > 1:
        texts[0] += f" ({policy.step_budget} a step)"
    texts += [f"{name} {value}" for name in policy.steadying if (value := getattr(policy, name))]
    if plan.admission.order == "in-time":
        texts.append("in-time")
    for name in ("microbatches", "encode_microbatches", "decode_microbatches"):
        if getattr(policy, name, 1) > 1:
            texts.append(f"{name} {getattr(policy, name)}")
    if plan.cluster.num_devices > 1:
        texts.append(_shape(plan))
    return ", ".join(texts)


def placement_in_words(plan: Plan) -> str:
    replicas = "one replica" if plan.replicas == 1 else f"{plan.replicas} replicas"
    lanes = {"both": "", "encode": "encode ", "decode": "decode "}
    parts = []
    for lane, name in lanes.items():
        stages = [stage for stage in plan.stages if stage.lane == lane]
        if stages:
            sizes = [(stage.tp, stage.ep) for stage in stages]
            groups = [
                f"{sizes.count((tp, ep))} x {tp} device{'s' * (tp > 1)}"
                + (f", experts in {ep} parts" if 1 < ep <= tp else "")
                + (f", experts over {ep} devices of {ep // tp} replicas, which run in step" if ep > tp else "")
                for tp, ep in dict.fromkeys(sizes)
            ]
            noun = "prefill group" if lane == "encode" and plan.prefill_groups > 1 else f"{name}stage"
            parts.append(f"{_count(len(stages), noun)} ({' and '.join(groups)})")
    return f"{replicas} of {' and '.join(parts)}; {plan.num_devices} of {plan.cluster.num_devices} devices"


def objective_in_words(plan: Plan) -> str:
    constraint, told = plan.constraint, plan.recommendation
    if constraint.maximise is not None:
        return f"{constraint.maximise} while requests are always waiting"
    if constraint.maximises_arrivals:
        rate = f"the arrival rate ({_process(constraint)}) within the bounds, waiting included"
        asked = None if told is None else (told.rejected or told.best).at_load
        if asked is None or asked.share_kept is None:
            return rate
        return f"{rate}, and how surely your load is held" if asked.holds else KEEPS_MOST
    if constraint.objective == "arrivals":
        return "throughput (without a bound, any lower arrival rate is sustained)"
    return "throughput while requests are always waiting; latency counts from admission"


def own_objective_in_words(plans: Mapping[str, Plan]) -> list[str]:
    if next(iter(plans.values())).constraint.maximise is None:
        return []
    return [
        "value of this expression: " + ", ".join(f"{kind} {objective_value(plan):.4g}" for kind, plan in plans.items())
    ]


def _process(constraint: Constraint) -> str:
    return "Poisson" if constraint.burstiness == 1 else f"coefficient of variation of gaps {constraint.burstiness:g}"


def engine_in_words(plan: Plan) -> list[str]:
    engine = plan.engine
    if engine is None or engine.framework == "xgpt":
        return []
    parts = ["each step is prepared during the previous one"] if engine.schedules_ahead else []
    parts += (
        ["xgpt's scheduler prepares a step only after the previous one has ended"] if engine.scheduler == "xgpt" else []
    )
    if plan.request_path_s:
        parts.append(f"a request spends {1e3 * plan.request_path_s:.3g} ms outside the engine's loop")
    if engine.mixing:
        parts.append(f"decodes take {100 * engine.mixing:.0f}% longer in a step with prompts")
    if FORECASTS[plan.policy.kind].stations.admits_each_step:
        parts += [] if engine.mixes else ["prompts run in separate steps, before decodes"]
        parts += [] if engine.cuts_prompts else ["a prompt waits for a step that has room for the whole prompt"]
    lines = [": ".join([f"engine: {engine.name}", *([", ".join(parts)] if parts else [])])]
    if timed := engine.borrowed:
        named = ", ".join(TIMED_WORDS[name] for name in timed)
        lines.append(f"not measured on {engine.name} but taken from another engine or version: {named}")
    return lines


def ranges_in_words(plan: Plan) -> list[str]:
    """Return a line on the likely ranges of a plan's figures, from the errors of earlier predictions, or nothing if
    they are not known.
    """
    figures = {
        "rate_per_s": ("arrival rate within the bounds", f"{_unit(plan)}/s"),
        "throughput_rps": ("saturated throughput", f"{_unit(plan)}/s"),
        "latency_s": ("from admission", "s"),
        "ttft_s": ("first token", "s"),
        "tpot_s": ("between tokens", "s"),
        "itl_p99_s": ("between tokens (p99)", "s"),
    }
    ranges, rows = plan.estimate.ranges, plan.estimate.ranges_from
    parts = [
        f"{text} {range_in_words(*ranges[name], unit)}" + (f" ({rows[name]})" if name in rows else "")
        for name, (text, unit) in figures.items()
        if name in ranges and (name in rows or not rows)
    ]
    where = "" if rows else " on this machine"
    held = "which hold in nine of ten cases (19 of 20 are above the low end)"
    return [f"likely ranges{where}, {held}: {'; '.join(parts)}"] if parts else []


def mixing_in_words(plan: Plan) -> list[str]:
    """Return a line that states how much prompts in a step must slow its decodes until another policy is better."""
    edge = plan.estimate.mixing_edge
    if edge is None:
        return []
    now = 0.0 if plan.engine is None else plan.engine.mixing
    than = "more" if edge.mixing > now else "less"
    return [
        f"mixed steps: the plan assumes that prompts in a step slow its decodes by {100 * now:.0f}%; if they do so by "
        f"{than} than {100 * edge.mixing:.0f}%, {edge.policy} is better"
    ]


def bounds_in_words(constraint: Constraint) -> str:
    """Return a description of the bounds, as in "15 s from arrival to the last token"."""
    names = {
        "latency_bound_s": "from arrival to the last token",
        "ttft_s": "to the first token",
        "tpot_s": "mean between tokens",
        "session_wait_s": "waiting in a session",
        "session_time_s": "for a session without its pauses",
    }
    quantiles = {"ttft_s": constraint.ttft_quantile, "tpot_s": constraint.tpot_quantile}
    return ", ".join(
        f"{bound:g} s {text}" + (f" (p{100 * share:g})" if (share := quantiles.get(name)) else "")
        for name, text in names.items()
        if (bound := getattr(constraint, name))
    )


def _unit(plan: Plan) -> str:
    return "requests" if plan.workload.sessions is None else "turns"


def _rate(plan: Plan, rate_per_s: float) -> str:
    sessions = plan.estimate.sessions
    text = f"{rate_per_s:.4g} {_unit(plan)}/s"
    return text if sessions is None else f"{rate_per_s / sessions.turns:.4g} sessions/s ({text})"


def arrivals_in_words(plan: Plan) -> list[str]:
    e, constraint, found = plan.estimate, plan.constraint, plan.estimate.capacity
    texts, sessions, unit = [], e.sessions, _unit(plan)
    every, of = ("turns and of all sessions", " of a turn") if sessions is not None else ("requests", "")
    count = "requests" if sessions is None else f"turns of {sessions.num_sessions} sessions"
    if found is not None and not found.rate_per_s:
        texts.append("arrivals: practically no rate keeps the bounds, waiting included (simulated)")
    elif found is not None:
        least = "at least " if sessions is not None and found.share_kept < 0.9995 else ""
        texts.append(
            f"arrivals: up to {_rate(plan, found.rate_per_s)} ({_process(constraint)}); at this rate "
            f"{least}{100 * found.share_kept:.1f}% of all {every} keep "
            f"{bounds_in_words(constraint)}, waiting included "
            f"(p{100 * constraint.quantile:g} from arrival to the last token{of}: {found.whole_s:.2f} s); "
            f"simulated: {_with_error(found.error)}{found.num_requests} {count} after {found.warm_up_requests} "
            f"warm-up {unit}, seed {found.seed}"
        )
        tighter, looser = found.rate_under_tighter_per_s, found.rate_under_looser_per_s
        if tighter is not None and looser is not None:
            line = f"sensitivity: {tighter:.4g} requests/s with 5% tighter bounds, {looser:.4g} with 5% looser bounds"
            if tighter >= looser:
                line += ": memory and step times limit the rate, not the bounds"
            texts.append(line)
    what = "latency of all requests" if constraint.sla == "request" else "output length"
    texts.append(
        f"saturated: {e.throughput_rps:.4g} {unit}/s while {unit} are always waiting; then a {unit[:-1]} with the "
        f"p{100 * constraint.quantile:g} {what} takes {e.latency_s:.2f} s from admission"
    )
    return texts


def order_in_words(plan: Plan) -> list[str]:
    """Return a line that says what the plan's order of admission needs but simulated requests lack, or nothing."""
    match plan.admission.order:
        case "lpt":
            lacks = "simulated requests all have the same maximum output, so the figures are those of fcfs"
        case "edf":
            lacks = "simulated requests have no deadlines, so the figures are those of fcfs"
        case "das":
            lacks = "simulated requests have no deadlines, so the figures count only the lengths of prompts"
        case _:
            return []
    return [f"order: {lacks}"]


def profile_in_words(plan: Plan) -> str:
    profile = plan.profile
    text = f"profile: {profile.source}, sha256 {profile.sha256[:12]}"
    if SERVED in profile.provenance:
        return f"{text}; {profile.provenance[SERVED]}"
    if profile.source == "measured":
        return f"{text}; not fitted to served requests, whose steps take longer"
    return text


def _with_error(error: float | None) -> str:
    return "" if error is None else f"standard deviation of the rate {100 * error:.1f}% over three draws, "


def classes_in_words(plan: Plan) -> list[str]:
    texts = []
    for each in plan.constraint.classes:
        bounds = [
            f"{label} {bound:g} s" for name, label in BOUND_NAMES.items() if (bound := getattr(each, name)) is not None
        ]
        texts.append(f"{each.name} ({100 * each.share:.3g}% of requests, {', '.join(bounds) or 'no bounds'})")
    return [f"classes: {'; '.join(texts)}; planned for the tightest bounds"] if texts else []


def headroom_in_words(plan: Plan) -> list[str]:
    headroom, source = plan.constraint.headroom, plan.profile.source
    if not headroom or not plan.constraint.bounds_latency:
        return []
    errors = {
        "measured": "the variation and drift of steps on one machine, and the load by other processes",
        "imported": "the usual error of predictions from imported tables",
        "analytic": "the usual error of predictions from a datasheet",
    }
    return [
        f"headroom: the plan keeps the bounds even if all times are {100 * headroom:.0f}% longer than predicted "
        f"(about {errors[source]}; --headroom sets another share)"
    ]


def missing_in_words(policy: PolicyChoice, problem: Problem, plans: dict[str, Plan]) -> list[str]:
    """Return lines on the policies without a plan, and on those whose latency was not simulated."""
    kinds = POLICY_GROUPS.get(policy, (policy,))
    either = POLICY_GROUPS["waa"] if "waa" in plans else ()
    lines = []
    if either and set(either) <= set(kinds):
        lines.append("waa: waa-c and waa-m divide these devices in the same way")
    missing: dict[str, list[str]] = {}
    for kind in kinds:
        if kind not in plans and kind not in either:
            missing.setdefault(_why_missing(kind, policy, problem), []).append(kind)
    lines += [reason.format(", ".join(found)) for reason, found in missing.items()]
    closed = [kind for kind, plan in plans.items() if plan.constraint.sla == "request" and not plan.search.simulations]
    if closed:
        lines.append(f"these policies serve less, so their latency was not simulated: {', '.join(closed)}")
    return lines


def _why_missing(kind: str, policy: PolicyChoice, problem: Problem) -> str:
    engine, speculation, in_waa = problem.engine, problem.speculation, kind in POLICY_GROUPS["waa"]
    if engine is not None and not (engine.takes_ours or engine.runs(kind)):
        return f"{engine.framework} does not run {{}}"
    if problem.workload.sessions is not None and kind not in IN_SESSIONS:
        return "sessions are not planned under {}"
    if kind == "chunked" and problem.model.is_encoder_decoder:
        return f"no plan of {{}}: {UNCUT}"
    if in_waa and (problem.max_devices or problem.cluster.num_devices) == 1:
        return "these policies need several devices: {}"
    if in_waa and problem.cluster.host is None:
        return "no plan of waa: the cluster has no `host`, the link over which waa sends K/V"
    if kind not in kinds_of(problem, policy):
        if speculation is not None:
            return "not searched, since drafts need another policy: {}"
        return "not searched" + (", since a fixed setting is not theirs: {}" if problem.fixed else ": {}")
    return "these policies have no plan that keeps the bounds: {}"


def reuse_in_words(plan: Plan) -> list[str]:
    """Return a line on the share of prompt tokens that the plan expects in the prefix cache, and on the gain."""
    reuse = plan.estimate.reuse
    if reuse is None:
        return []
    blocks = min(stage.kv_blocks for stage in plan.stages if stage.lane != "decode")
    line = (
        f"reuse: {reuse.share:.0%} of prompt tokens are cached ({reuse.most_share:.0%} with unlimited memory), in "
        f"{reuse.kept_blocks} of {blocks} K/V blocks; running requests need the others"
    )
    if reuse.alone:
        gain = maximised(plan) / reuse.alone - 1
        line += f"; the best plan without reuse reaches {reuse.alone:.3f} requests/s ({gain:+.0%})"
    return [line]


def joint_in_words(plan: Plan) -> list[str]:
    """Return a line on how the correlation between a trace's input and output lengths changes the estimate."""
    joint = plan.estimate.joint_lengths
    if joint is None:
        return []
    return [
        f"pairs: the trace's input and output lengths have a correlation of {joint.correlation:+.2f}; its real pairs "
        f"of lengths change throughput by {100 * joint.throughput:+.1f}% and latency by {100 * joint.latency:+.1f}%, "
        "compared with independent lengths"
    ]


def _shape(plan: Plan) -> str:
    """Return the replicas and the tensor-parallel degrees of stages, as in "2 x [2 1 1]" or, with WAA, "[1 1] > [2]".

    "[1 | 1] > [2]" has two prefill groups instead of a pipeline of two stages. "4e2" means four devices, with the
    experts divided into two parts. "1e8" means a single device, with the experts divided among eight such devices.
    """
    lanes = []
    for lane in ("both", "encode", "decode"):
        degrees = [
            f"{stage.tp}e{stage.ep}" if stage.ep > 1 else str(stage.tp) for stage in plan.stages if stage.lane == lane
        ]
        if degrees:
            beside = " | " if lane == "encode" and plan.prefill_groups > 1 else " "
            lanes.append(f"[{beside.join(degrees)}]")
    replicas = f"{plan.replicas} x " if plan.replicas > 1 else ""
    return replicas + " > ".join(lanes)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def schedule_in_words(plan: Plan) -> str:
    policy, each = plan.policy, " in each replica" if plan.replicas > 1 else ""
    match policy.kind:
        case "rra":
            return (
                f"encode about {_count(policy.encode_batch, 'request')}, then run "
                f"{_count(policy.decode_iterations, 'decode iteration')}, and repeat"
            )
        case "orca" | "chunked" if plan.engine is not None and not plan.engine.mixes:
            budget = policy.token_budget if policy.kind == "chunked" else plan.engine.token_budget
            size = "" if budget is None else f" of up to {budget} tokens"
            return (
                f"prompts run first, in separate steps{size}, then a decode step; at most "
                f"{_count(policy.max_batch, 'request')} at once{each}"
            )
        case "orca":
            return (
                "every step decodes running requests and encodes waiting ones into free slots; at most "
                f"{_count(policy.max_batch, 'request')} at once{each}"
            )
        case "chunked" if policy.slack is not None:
            return (
                f"every step decodes running requests and encodes as many prompt tokens as their slack allows, "
                f"{policy.slack.least_tokens} to {policy.slack.most_tokens}; at most "
                f"{_count(policy.max_batch, 'request')} at once{each}"
            )
        case "chunked":
            return (
                f"every step decodes running requests and adds prompt tokens up to a total of {policy.step_budget}; "
                f"at most {_count(policy.max_batch, 'request')} at once{each}"
            )
        case "static":
            return f"encode {_count(policy.batch, 'request')}, decode until the last of them ends, and repeat"
        case "waa":
            return (
                f"some devices encode {_count(policy.encode_batch, 'request')} at once, and the others decode up to "
                f"{policy.max_decode_batch}; neither waits for the other"
            )
    return f"{POLICY_WORDS[policy.kind]} ({settings_text(plan)})"


def limit_in_words(plan: Plan) -> str:
    """Return a sentence on the upper bound for all other schedules. The plan's gap must be known."""
    constraint = plan.constraint
    most = _rate(plan, maximised(plan) * (1 + (plan.search.gap or 0.0)))
    if not constraint.bounds_latency:
        return f"no other schedule in the searched space serves more than {most}"
    num_bounds = len(constraint.bounds.given) + sum(bound is not None for bound in constraint.session_bounds)
    kept = "bounds" if num_bounds > 1 else "bound"
    if constraint.maximises_arrivals:
        return f"no other schedule in the searched space keeps the {kept} at more than {most}"
    return f"no other schedule in the searched space serves more than {most} within the {kept}"


def proof_in_words(plan: Plan) -> str:
    """Return a description of a plan's proof: the upper bound for other schedules, and how many points the search
    evaluated.
    """
    search = plan.search
    proof = f"no proof of optimality ({search.bound.removeprefix('none: ')})"
    if search.gap is not None:
        more = f"{100 * search.gap:.1f}% more than this one" if search.gap >= 0.0005 else "no more than this one"
        proof = f"{limit_in_words(plan)}, {more} (bound: {search.bound})"
    if search.rival is not None:
        proof += f"; {search.rival}, a difference within the error of simulation"
    simulated = f" and simulated {_count(search.simulations, 'plan')}" if search.simulations else ""
    if plan.estimate.simulated:
        rate = ("the arrival rate",) if plan.estimate.capacity is not None else ()
        proof += f"; simulated: {', '.join((*plan.estimate.simulated, *rate))}; other figures are closed forms"
    points = f"{search.evaluations} of {search.space_size} points{simulated}"
    return f"{proof}; the search evaluated {points} in {search.seconds:.2f} s"


def speculation_in_words(plan: Plan, ahead: Mapping[int, float]) -> Iterator[str]:
    """Yield lines on speculative decoding and on the rate for each number of draft tokens.

    Args:
        ahead: rates by number of draft tokens, as in `Planned.ahead`.
    """
    tried = ", ".join(f"{tokens}: {value:.4g}" for tokens, value in sorted(ahead.items()))
    others = f" (requests/s by number of draft tokens: {tried})" if ahead else ""
    if plan.speculation is None:
        if ahead:
            yield f"speculative decoding: off, since it gains nothing{others}"
        return
    speculation = plan.speculation
    yield (
        f"speculative decoding: {speculation.method}, {speculation.tokens} draft tokens a step, "
        f"of which {speculation.tokens_per_step - 1:.2f} are accepted{others}"
    )
    if isinstance(plan.policy, ChunkedSettings):
        yield f"together with draft tokens, a step holds {plan.step_tokens(plan.policy.token_budget)} tokens"
