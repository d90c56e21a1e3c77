"""Inner loops over 16 or 32 float32 lanes, as LLVM vector instructions that numba-compiled kernels call.

This module has the parts of all loops, and the loops for a query that shares its keys with no other query. In these
loops, the lanes are dimensions of the query. In the loops of `tiles`, they are queries. Keys and values may be bfloat16
(stored as uint16) or int8. Loading converts them to float32.

LLVM's own vectoriser uses half an AVX-512 register and keeps accumulators in memory. Here each accumulator stays in a
register. On processors with narrower registers, LLVM splits each vector.

Arrays must be C-contiguous. `from_x` is the index at which array x begins. `lanes` and other counts by which loops are
unrolled must be constants where the function is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

UNROLL = 4

# 2^x for -0.5 <= x <= 0.5, highest power first; 1e-7 relative.
_EXP2 = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)
_ROUGH_EXP2 = (5.5171606487e-02, 2.4261111739e-01, 6.9326099701e-01, 9.9992807413e-01)
"""Coefficients of a polynomial for 2^x with an error of 7e-05, for results that are rounded to bfloat16."""

HIDDEN = -1e30


def _lanes(*firsts: int, run: int) -> tuple[int, ...]:
    return tuple(first + i for first in firsts for i in range(run))


# Each shuffle takes two vectors and returns two. In the sum of the two results, each vector's partial sums are in half
# as many lanes; after the last shuffle, they are in one lane.
_PAIRS = (
    (
        tuple(lane + other for group in range(0, 16, 4) for lane in (group, group + 1) for other in (0, 16)),
        tuple(lane + other for group in range(2, 16, 4) for lane in (group, group + 1) for other in (0, 16)),
    ),
    (
        tuple(lane + other for group in range(0, 16, 4) for other in (0, 16) for lane in (group, group + 1)),
        tuple(lane + other for group in range(2, 16, 4) for other in (0, 16) for lane in (group, group + 1)),
    ),
    (_lanes(0, 8, 16, 24, run=4), _lanes(4, 12, 20, 28, run=4)),
    (_lanes(0, 8, 16, 24, run=4), _lanes(4, 12, 20, 28, run=4)),
)


def inlined(function: Callable[..., Any]) -> Any:
    """Return a function that numba can call, with the parameters of `function` except `typing_context`. `function`
    returns a signature and `generate`, which appends the instructions.
    """
    return intrinsic(prefer_literal=True)(function)


@inlined
def dot_keys(
    typing_context: Any, query: Any, keys: Any, scores: Any, from_query: Any, from_keys: Any, head_dim: Any, lanes: Any
) -> Any:
    """Compute dot products of one query with `lanes` (16) contiguous keys. `head_dim` must be a multiple of `lanes`.

    # query [dim], keys [lanes, dim] -> scores [lanes]
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        query, keys, scores = pointers(context, builder, signature, values, 3)
        query, keys = builder.gep(query, [values[3]]), builder.gep(keys, [values[4]])
        dim, emit = values[5], Emit(builder, lanes.literal_value)
        sums = emit.variables(emit.lanes)

        def add_products(first: ir.Value, num_vectors: int) -> None:
            parts = [builder.add(first, int64(i)) for i in range(num_vectors)]
            rows = [emit.load(query, part) for part in parts]
            for number, total in enumerate(sums):
                key = builder.gep(keys, [builder.mul(dim, int64(number))])
                for part, row in zip(parts, rows, strict=True):
                    builder.store(emit.multiply_add(row, emit.load(key, part), builder.load(total)), total)

        num_vectors = builder.sdiv(dim, int64(emit.lanes))
        num_steps = builder.sdiv(num_vectors, int64(UNROLL))
        with cgutils.for_range(builder, num_steps) as step:
            add_products(builder.mul(step.index, int64(UNROLL)), UNROLL)
        with cgutils.for_range_slice(builder, builder.mul(num_steps, int64(UNROLL)), num_vectors, int64(1)) as (
            last,
            _,
        ):
            add_products(last, 1)
        emit.store(emit.sums([builder.load(total) for total in sums]), scores, int64(0))
        return context.get_dummy_value()

    return types.void(query, keys, scores, types.intp, types.intp, types.intp, lanes), generate


@inlined
def soften_keys(
    typing_context: Any, scores: Any, totals: Any, from_totals: Any, highest: Any, begin: Any, end: Any, lanes: Any
) -> Any:
    """Take one step of a query's online softmax over `lanes` keys. Only keys [begin, end) are visible.

    Scores are overwritten by weights, which are powers of two. The weights are added to `totals`, lane by lane.

    # scores [lanes], totals [lanes] -> the highest score so far, the factor for all earlier sums
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        scores, totals = pointers(context, builder, signature, values, 2)
        totals = builder.gep(totals, [values[2]])
        before, begin, end = values[3:6]
        first, emit = int64(0), Emit(builder, lanes.literal_value)
        score = builder.select(emit.is_between(begin, end), emit.load(scores, first), emit.constant(HIDDEN))
        top = builder.call(emit.reduction("fmax"), [score])
        top = builder.select(builder.fcmp_ordered(">", top, before), top, before)
        tops = emit.fill(top)
        factor = emit.exp2(builder.fsub(emit.fill(before), tops))
        weight = emit.exp2(builder.fsub(score, tops))
        emit.store(weight, scores, first)
        emit.store(emit.multiply_add(emit.load(totals, first), factor, weight), totals, first)
        shrink = builder.extract_element(factor, ir.Constant(ir.IntType(32), 0))
        return context.make_tuple(builder, signature.return_type, [top, shrink])

    floats = types.UniTuple(types.float32, 2)
    return floats(scores, totals, types.intp, types.float32, types.intp, types.intp, lanes), generate


@inlined
def add_rows(
    typing_context: Any,
    weights: Any,
    values: Any,
    sums: Any,
    from_values: Any,
    from_sums: Any,
    shrink: Any,
    begin: Any,
    end: Any,
    head_dim: Any,
    num_vectors: Any,
    lanes: Any,
) -> Any:
    """Set sums = shrink * sums + the weighted sum of the values of keys [begin, end), for `num_vectors` * `lanes`
    dimensions.

    # weights [keys], values [keys, head_dim], sums [num_vectors * lanes]
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        weights, values, sums = pointers(context, builder, signature, arguments, 3)
        values, sums = builder.gep(values, [arguments[3]]), builder.gep(sums, [arguments[4]])
        factor, begin, end, dim = arguments[5:9]
        emit = Emit(builder, lanes.literal_value)
        shrunk = emit.shrunk_sums(sums, emit.fill(factor), num_vectors.literal_value)
        with shrunk as totals, cgutils.for_range_slice(builder, begin, end, int64(1)) as (key, _):
            weight = emit.fill(builder.load(builder.gep(weights, [key])))
            value = builder.gep(values, [builder.mul(key, dim)])
            for number, total in enumerate(totals):
                product = emit.multiply_add(weight, emit.load(value, int64(number)), builder.load(total))
                builder.store(product, total)
        return context.get_dummy_value()

    numbers = [types.intp, types.intp, types.float32, types.intp, types.intp, types.intp]
    return types.void(weights, values, sums, *numbers, num_vectors, lanes), generate


@inlined
def widen(
    typing_context: Any, halves: Any, wide: Any, from_halves: Any, offset: Any, num_vectors: Any, lanes: Any
) -> Any:
    """Convert `num_vectors` vectors of bfloat16 or int8 numbers to float32. `offset` is added to the start of both
    arrays.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        halves, wide = pointers(context, builder, signature, values, 2)
        halves = builder.gep(halves, [builder.add(values[2], values[3])])
        wide, emit = builder.gep(wide, [values[3]]), Emit(builder, lanes.literal_value)
        with cgutils.for_range(builder, values[4]) as part:
            emit.store(emit.load(halves, part.index), wide, part.index)
        return context.get_dummy_value()

    return types.void(halves, wide, *[types.intp] * 3, lanes), generate


@inlined
def at(typing_context: Any, array: Any, first: Any) -> Any:
    """Return a pointer to element `first` of an array or pointer. The pointer does not keep the array alive.

    Numba counts references to arrays that are passed, atomically. This is too slow for inner loops.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        (place,) = pointers(context, builder, signature, values, 1)
        return builder.gep(place, [values[1]])

    return types.CPointer(array.dtype)(array, types.intp), generate


@inlined
def take_next(typing_context: Any, counter: Any) -> Any:
    """Return the counter and increment it atomically, so that no two threads get the same number. # int64 [1] ->
    int64"""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        (place,) = pointers(context, builder, signature, values, 1)
        return builder.atomic_rmw("add", place, int64(1), "monotonic")

    return types.int64(counter), generate


@inlined
def address(typing_context: Any, array: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        (place,) = pointers(context, builder, signature, values, 1)
        return builder.ptrtoint(place, ir.IntType(64))

    return types.int64(array), generate


@inlined
def fetch(typing_context: Any, array: Any, element: Any) -> Any:

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        (place,) = pointers(context, builder, signature, values, 1)
        integer = ir.IntType(32)
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, integer, integer, integer])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        line = builder.bitcast(builder.gep(place, [values[1]]), pointer)
        builder.call(prefetch, [line, integer(0), integer(2), integer(1)])  # read access, second-level cache, data
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


class Emit:
    """Appends vector instructions to a function. Index i of an array means its i-th whole vector."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.builder = builder
        self.lanes = lanes
        self.type = ir.VectorType(ir.FloatType(), lanes)
        self.integers = ir.VectorType(ir.IntType(32), lanes)

    def constant(self, value: float) -> ir.Value:
        return ir.Constant(self.type, [value] * self.lanes)

    def variables(self, count: int) -> list[ir.Value]:
        return [cgutils.alloca_once_value(self.builder, self.constant(0.0)) for _ in range(count)]

    @contextmanager
    def shrunk_sums(self, sums: ir.Value, factor: ir.Value, count: int) -> Iterator[list[ir.Value]]:
        """Yield variables with the first `count` vectors of an array, multiplied by a factor. At the end of the `with`
        block, they are written back.
        """
        totals = self.variables(count)
        for number, total in enumerate(totals):
            self.builder.store(self.builder.fmul(self.load(sums, int64(number)), factor), total)
        yield totals
        for number, total in enumerate(totals):
            self.store(self.builder.load(total), sums, int64(number))

    def _place(self, array: ir.Value, index: ir.Value) -> ir.Value:
        first = self.builder.gep(array, [self.builder.mul(index, int64(self.lanes))])
        return self.builder.bitcast(first, self.type.as_pointer())

    def load(self, array: ir.Value, index: ir.Value) -> ir.Value:
        kept = array.type.pointee
        if not isinstance(kept, ir.IntType):
            return self.builder.load(self._place(array, index), align=4)
        first = self.builder.gep(array, [self.builder.mul(index, int64(self.lanes))])
        narrow = self.builder.bitcast(first, ir.VectorType(kept, self.lanes).as_pointer())
        numbers = self.builder.load(narrow, align=kept.width // 8)
        if kept.width == 8:
            return self.builder.sitofp(self.builder.sext(numbers, self.integers), self.type)
        upper = self.builder.zext(numbers, self.integers)
        shifted = self.builder.shl(upper, ir.Constant(self.integers, [16] * self.lanes))
        return self.builder.bitcast(shifted, self.type)

    def store(self, vector: ir.Value, array: ir.Value, index: ir.Value) -> None:
        self.builder.store(vector, self._place(array, index), align=4)

    def spread(self, array: ir.Value, element: int) -> ir.Value:
        return self.fill(self.builder.load(self.builder.gep(array, [int64(element)])))

    def fill(self, scalar: ir.Value) -> ir.Value:
        one = self.builder.insert_element(ir.Constant(self.type, ir.Undefined), scalar, int64(0))
        return self.builder.shuffle_vector(one, one, ir.Constant(self.integers, [0] * self.lanes))

    def spread_integer(self, number: ir.Value) -> ir.Value:
        small = self.builder.trunc(number, ir.IntType(32))
        one = self.builder.insert_element(ir.Constant(self.integers, ir.Undefined), small, int64(0))
        return self.builder.shuffle_vector(one, one, ir.Constant(self.integers, [0] * self.lanes))

    def multiply_add(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self.builder.fadd(self.builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    def maximum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def reduction(self, what: str) -> ir.Function:
        kind = ir.FunctionType(ir.FloatType(), [self.type])
        return cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.vector.reduce.{what}.v{self.lanes}f32")

    def sums(self, vectors: list[ir.Value]) -> ir.Value:
        """Return a vector whose lane i is the sum over the lanes of vector i, for 16 vectors. This takes 15
        additions.
        """
        for halves in _PAIRS:
            masks = [ir.Constant(self.integers, list(half)) for half in halves]
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [
                self.builder.fadd(*[self.builder.shuffle_vector(a, b, mask) for mask in masks]) for a, b in pairs
            ]
        return vectors[0]

    def is_between(self, begin: ir.Value, end: ir.Value) -> ir.Value:
        numbers = ir.Constant(self.integers, list(range(self.lanes)))
        bounds = [self.spread_integer(bound) for bound in (begin, end)]
        not_before = self.builder.icmp_signed(">=", numbers, bounds[0])
        return self.builder.and_(not_before, self.builder.icmp_signed("<", numbers, bounds[1]))

    def rounded(self, x: ir.Value) -> ir.Value:
        """Return numbers rounded to bfloat16, ties away from zero."""
        return self.builder.bitcast(self._cut(self._raised(x)), self.type)

    def halves(self, even: ir.Value, odd: ir.Value) -> ir.Value:
        """Round both vectors to bfloat16. Each lane of the result has the number of `even` in its lower half and that
        of `odd` in its upper half.
        """
        low = self.builder.lshr(self._raised(even), ir.Constant(self.integers, [16] * self.lanes))
        return self.builder.bitcast(self.builder.or_(low, self._cut(self._raised(odd))), self.type)

    def _raised(self, x: ir.Value) -> ir.Value:
        """Return the bits plus half a unit of bfloat16's last bit. Dropping the lower bits then rounds."""
        return self.builder.add(
            self.builder.bitcast(x, self.integers), ir.Constant(self.integers, [0x8000] * self.lanes)
        )

    def _cut(self, bits: ir.Value) -> ir.Value:
        return self.builder.and_(bits, ir.Constant(self.integers, [0xFFFF0000] * self.lanes))

    def exp2(self, x: ir.Value, *, roughly: bool = False) -> ir.Value:
        """Return 2^x for x <= 0, but at least 2^-126.

        The relative error is 1e-7, or about 1e-4 if `roughly`.
        """
        builder = self.builder
        unary = ir.FunctionType(self.type, [self.type])
        rint = cgutils.get_or_insert_function(builder.module, unary, f"llvm.rint.v{self.lanes}f32")
        x = self.maximum(x, self.constant(-126.0))
        whole = builder.call(rint, [x])
        rest = builder.fsub(x, whole)
        first, *others = _ROUGH_EXP2 if roughly else _EXP2
        power = self.constant(first)
        for coefficient in others:
            power = self.multiply_add(power, rest, self.constant(coefficient))
        exponent = builder.shl(builder.fptosi(whole, self.integers), ir.Constant(self.integers, [23] * self.lanes))
        return builder.bitcast(builder.add(builder.bitcast(power, self.integers), exponent), self.type)


def pointers(context: Any, builder: ir.IRBuilder, signature: Any, values: Any, count: int) -> list[ir.Value]:
    pairs = zip(signature.args[:count], values[:count], strict=True)
    return [
        value if isinstance(kind, types.CPointer) else context.make_array(kind)(context, builder, value).data
        for kind, value in pairs
    ]


def int64(value: int) -> ir.Constant:
    return ir.Constant(ir.IntType(64), value)


def append_assembly(builder: ir.IRBuilder, place: ir.Value, code: str, overwritten: Iterable[str]) -> None:
    """Append assembly to a function that is being compiled. It reads its arguments from an array of int64, whose
    address is in %rdi.

    Args:
        overwritten: what the code changes: registers except %rdi, memory, flags.
    """
    kind = ir.FunctionType(ir.VoidType(), [place.type])
    constraints = ",".join(["{rdi}", *[f"~{{{name}}}" for name in overwritten]])
    builder.asm(kind, code, constraints, [place], True)


def argument(number: int) -> str:
    return f"{8 * number}(%rdi)"


@cache
def enable_assembly() -> None:
    """Let LLVM read assembly. Call this before the first function that contains assembly is compiled."""
    llvmlite.binding.initialize_native_asmparser()
