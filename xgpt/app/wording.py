"""What a plan does, in words: the terminal's and the report's."""

from __future__ import annotations

from xgpt.schema import Plan


def settings_text(plan: Plan) -> str:
    """The control variables of a plan: "encode_batch 4, decode_iterations 9"."""
    policy = plan.policy
    return ", ".join(f"{variable.name} {getattr(policy, variable.name)}" for variable in policy.variables)


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
