"""What a plan does, in words: the terminal's and the report's."""

from __future__ import annotations

from xgpt.schema import Plan


def settings_text(plan: Plan) -> str:
    """The control variables of a plan: "encode_batch 4, decode_iterations 9"; with several devices, also where."""
    policy = plan.policy
    texts = [f"{variable.name} {getattr(policy, variable.name)}" for variable in policy.variables]
    for name in ("microbatches", "encode_microbatches", "decode_microbatches"):
        if getattr(policy, name, 1) > 1:
            texts.append(f"{name} {getattr(policy, name)}")
    if plan.cluster.num_devices > 1:
        texts.append(_shape(plan))
    return ", ".join(texts)


def placement_in_words(plan: Plan) -> str:
    """Which devices work together, and how."""
    used = plan.replicas * sum(stage.tp for stage in plan.stages)
    replicas = "one replica" if plan.replicas == 1 else f"{plan.replicas} replicas"
    lanes = {"both": "", "encode": "encode ", "decode": "decode "}
    parts = []
    for lane, name in lanes.items():
        stages = [stage for stage in plan.stages if stage.lane == lane]
        if stages:
            degrees = [stage.tp for stage in stages]
            groups = [f"{degrees.count(tp)} x {tp} device{'s' * (tp > 1)}" for tp in dict.fromkeys(degrees)]
            parts.append(f"{len(stages)} {name}stage{'s' * (len(stages) > 1)} ({' and '.join(groups)})")
    return f"{replicas} of {' and '.join(parts)}; {used} of {plan.cluster.num_devices} devices"


def arrivals_in_words(plan: Plan, simulating_s: float = 0.0) -> list[str]:
    """Up to which arrival rate the plan keeps its bound, where that is known.

    Args:
        simulating_s: how long it took to simulate that, if it was.
    """
    most, gap = plan.estimate.max_arrival_rate_per_s, plan.estimate.arrival_rate_gap
    if most is None:
        return []
    source = "in closed form: `xgpt report` simulates it"
    if gap is not None:
        source = f"simulated in {simulating_s:.1f} s; the closed form says {100 * gap:+.1f}%"
    return [f"arrivals: with waiting counted, the bound is kept up to {most:.3g} requests/s (Poisson), {source}"]


def joint_in_words(plan: Plan) -> list[str]:
    """What the estimate misses where a trace's outputs depend on their inputs."""
    joint = plan.estimate.joint_lengths
    if joint is None:
        return []
    return [
        f"pairs: inputs and outputs correlate by {joint.correlation:+.2f}; simulated in the trace's pairs, "
        f"throughput is {100 * joint.throughput:+.1f}%, latency {100 * joint.latency:+.1f}% beside lengths drawn apart"
    ]


def _shape(plan: Plan) -> str:
    """Replicas and tensor-parallel degrees of the stages: "2 x [2 1 1]", of WAA "[1 1] > [2]"."""
    lanes = []
    for lane in ("both", "encode", "decode"):
        degrees = [str(stage.tp) for stage in plan.stages if stage.lane == lane]
        if degrees:
            lanes.append(f"[{' '.join(degrees)}]")
    replicas = f"{plan.replicas} x " if plan.replicas > 1 else ""
    return replicas + " > ".join(lanes)


def schedule_in_words(plan: Plan) -> str:
    """What the engine will do, in a sentence."""
    policy = plan.policy
    match policy.kind:
        case "rra":
            return (
                f"encode about {policy.encode_batch} requests, then run {policy.decode_iterations} decode iterations, "
                "and again"
            )
        case "orca":
            return f"every step decodes what runs and encodes into free slots, at most {policy.max_batch} requests"
        case "chunked":
            return (
                f"every step decodes what runs and fills up to {policy.token_budget} tokens with prompts, "
                f"at most {policy.max_batch} requests"
            )
        case "static":
            return f"encode {policy.batch} requests, decode until the last of them ends, and again"
    return (
        f"some devices encode {policy.encode_batch} requests at once, the others decode up to "
        f"{policy.max_decode_batch}, neither waiting for the other"
    )


def proof_in_words(plan: Plan) -> str:
    """How near the plan is to the best one, and what that rests on."""
    search = plan.search
    proof = (
        "no proof of optimality"
        if search.gap is None
        else f"at most {100 * search.gap:.1f}% below the optimum (bound: {search.bound})"
    )
    return f"{proof}; {search.evaluations} of {search.space_size} points in {search.seconds:.2f} s"
