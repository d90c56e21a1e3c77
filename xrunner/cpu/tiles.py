"""Inner loops over keys in vector registers (see `simd`). Each lane is a query of a tile.

Layouts: scores and weights are [keys, lanes]. Queries and sums are [dim, lanes].
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from xrunner.cpu.simd import HIDDEN, UNROLL, Emit, inlined, int64, pointers


@inlined
def score_keys(
    typing_context: Any,
    queries: Any,
    keys: Any,
    scores: Any,
    from_keys: Any,
    from_scores: Any,
    head_dim: Any,
    num_keys: Any,
    lanes: Any,
) -> Any:
    """Compute dot products of a tile's queries with `num_keys` contiguous keys. # queries [dim, lanes], keys [keys,
    dim] -> scores [keys, lanes]
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        arrays = pointers(context, builder, signature, values, 3)
        queries, keys, scores = arrays[0], builder.gep(arrays[1], [values[3]]), builder.gep(arrays[2], [values[4]])
        dim, emit = values[5], Emit(builder, lanes.literal_value)
        sums = emit.variables(num_keys.literal_value)

        def add_products(first: ir.Value, num_dims: int) -> None:
            rows = [emit.load(queries, builder.add(first, int64(i))) for i in range(num_dims)]
            for number, total in enumerate(sums):
                key = builder.gep(keys, [builder.add(builder.mul(dim, int64(number)), first)])
                for i, row in enumerate(rows):
                    builder.store(emit.multiply_add(row, emit.spread(key, i), builder.load(total)), total)

        num_steps = builder.sdiv(dim, int64(UNROLL))
        with cgutils.for_range(builder, num_steps) as step:
            add_products(builder.mul(step.index, int64(UNROLL)), UNROLL)
        with cgutils.for_range_slice(builder, builder.mul(num_steps, int64(UNROLL)), dim, int64(1)) as (last, _):
            add_products(last, 1)
        for number, total in enumerate(sums):
            emit.store(builder.load(total), scores, int64(number))
        return context.get_dummy_value()

    return types.void(queries, keys, scores, types.intp, types.intp, types.intp, num_keys, lanes), generate


@inlined
def add_values(
    typing_context: Any,
    weights: Any,
    shrink: Any,
    values: Any,
    places: Any,
    sums: Any,
    first: Any,
    from_values: Any,
    from_sums: Any,
    num_keys: Any,
    num_dims: Any,
    lanes: Any,
) -> Any:
    """Set sums = shrink * sums + weights^T * values, for `num_keys` keys from `first` on and `num_dims` dimensions.

    # weights [keys, lanes], shrink [lanes], places (index of each value's first element) int64 [keys], sums [num_dims,
    lanes]
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        weights, shrink, values, places, sums = pointers(context, builder, signature, arguments, 5)
        first, count, emit = arguments[5], arguments[8], Emit(builder, lanes.literal_value)
        values, sums = builder.gep(values, [arguments[6]]), builder.gep(sums, [arguments[7]])
        shrunk = emit.shrunk_sums(sums, emit.load(shrink, int64(0)), num_dims.literal_value)
        with shrunk as totals, cgutils.for_range_slice(builder, first, builder.add(first, count), int64(1)) as (key, _):
            weight = emit.load(weights, key)
            value = builder.gep(values, [builder.load(builder.gep(places, [key]))])
            for number, total in enumerate(totals):
                builder.store(emit.multiply_add(weight, emit.spread(value, number), builder.load(total)), total)
        return context.get_dummy_value()

    arrays = [weights, shrink, values, places, sums]
    return types.void(*arrays, *[types.intp] * 4, num_dims, lanes), generate


@inlined
def soften(
    typing_context: Any, scores: Any, highest: Any, total: Any, shrink: Any, first: Any, num_keys: Any, lanes: Any
) -> Any:
    """Take one step of the online softmax in powers of two. Scores are overwritten by weights. # scores [keys, lanes]

    The step is over `num_keys` keys from `first` on. It updates `highest` (the highest score so far) and `total` (the
    sum of weights so far), and sets `shrink` to the factor for all earlier sums. # each [lanes]
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        scores, highest, total, shrink = pointers(context, builder, signature, values, 4)
        end, start, emit = builder.add(values[4], values[5]), int64(0), Emit(builder, lanes.literal_value)
        before = emit.load(highest, start)
        top, mass = emit.variables(2)
        builder.store(before, top)
        with cgutils.for_range_slice(builder, values[4], end, int64(1)) as (key, _):
            builder.store(emit.maximum(emit.load(scores, key), builder.load(top)), top)
        now = builder.load(top)
        factor = emit.exp2(builder.fsub(before, now))
        builder.store(builder.fmul(emit.load(total, start), factor), mass)
        with cgutils.for_range_slice(builder, values[4], end, int64(1)) as (key, _):
            weight = emit.exp2(builder.fsub(emit.load(scores, key), now))
            emit.store(weight, scores, key)
            builder.store(builder.fadd(builder.load(mass), weight), mass)
        emit.store(now, highest, start)
        emit.store(factor, shrink, start)
        emit.store(builder.load(mass), total, start)
        return context.get_dummy_value()

    return types.void(scores, highest, total, shrink, types.intp, types.intp, lanes), generate


@inlined
def hide(
    typing_context: Any, scores: Any, limits: Any, before: Any, begin: Any, end: Any, window: Any, lanes: Any
) -> Any:
    """Hide the scores of keys [begin, end) that a lane does not see. A lane sees the last `window` keys before its
    limit.

    # scores [keys, lanes], of which the first is key `before` of the sequence; limits int32 [lanes]
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        scores, limits = pointers(context, builder, signature, values, 2)
        emit = Emit(builder, lanes.literal_value)
        place = builder.bitcast(limits, emit.integers.as_pointer())
        behind = builder.load(place, align=4)
        first = builder.sub(behind, emit.spread_integer(values[5]))
        with cgutils.for_range_slice(builder, values[3], values[4], int64(1)) as (key, _):
            number = emit.spread_integer(builder.add(values[2], key))
            seen = builder.and_(builder.icmp_signed("<", number, behind), builder.icmp_signed(">=", number, first))
            emit.store(builder.select(seen, emit.load(scores, key), emit.constant(HIDDEN)), scores, key)
        return context.get_dummy_value()

    return types.void(scores, limits, *[types.intp] * 4, lanes), generate


@inlined
def rescale(typing_context: Any, sums: Any, factors: Any, count: Any, lanes: Any) -> Any:
    """Multiply each lane's sums by the lane's factor, unless all factors are one. # sums [count, lanes], factors
    [lanes]
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        sums, factors = pointers(context, builder, signature, values, 2)
        emit = Emit(builder, lanes.literal_value)
        factor = emit.load(factors, int64(0))
        smallest = builder.call(emit.reduction("fmin"), [factor])
        is_changed = builder.fcmp_unordered("!=", smallest, ir.Constant(ir.FloatType(), 1.0))  # none is above one
        with builder.if_then(is_changed), cgutils.for_range(builder, values[2]) as row:
            emit.store(builder.fmul(emit.load(sums, row.index), factor), sums, row.index)
        return context.get_dummy_value()

    return types.void(sums, factors, types.intp, lanes), generate
