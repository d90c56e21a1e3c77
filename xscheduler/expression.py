"""Evaluate a user's own objective: an expression over a plan's figures. It is parsed, never executed as code.

An expression may use the names in `FIGURES`, numbers, the operators + - * / **, comparisons (1 if true, else 0), `a if
condition else b`, and the functions in `FUNCTIONS`. One call evaluates an expression for many candidates.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from xgpt.core.errors import nearest
from xgpt.core.schema import PlanDraft
from xgpt.core.schema.plan import rate_of

Values = npt.NDArray[np.float64] | float

FIGURES = {
    "throughput": "requests a second, all replicas together",
    "tokens": "output tokens a second, all replicas together",
    "latency": "seconds from admission to the last token, of a request whose output has the quantile's length",
    "ttft": "seconds from admission to the first token",
    "tpot": "mean seconds between tokens",
    "gap": "99th percentile of the seconds between tokens",
    "running": "requests in decode, of one replica",
    "encode_batch": "mean number of requests in a step that encodes",
    "idle": "share of time in which devices are idle",
    "devices": "devices used, all replicas together",
    "replicas": "number of replicas",
    "cost": "price of these devices for an hour; it needs a price",
}
"""The figures that an expression may name, with their meanings. All are figures at saturation."""
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": lambda *values: np.minimum.reduce(np.broadcast_arrays(*values)),
    "max": lambda *values: np.maximum.reduce(np.broadcast_arrays(*values)),
    "abs": np.abs,
    "log": np.log,
    "exp": np.exp,
    "sqrt": np.sqrt,
}
MOST_CHARACTERS = 500

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: np.divide,
    ast.Pow: np.power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@cache
def names_in(text: str) -> frozenset[str]:
    tree = _parsed(text)
    _check(tree)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called)


def value_of(text: str, figures: Mapping[str, Values]) -> Values:
    """Return an expression's value for each candidate. Undefined values, such as 0 / 0, become minus infinity."""
    with np.errstate(all="ignore"):
        value = np.asarray(_value(_parsed(text), figures), float)
    return np.where(np.isnan(value), -np.inf, value)


def objective_value(plan: PlanDraft) -> float:
    """Return the value that a plan maximises at saturation: its throughput, or the user's own objective."""
    text, e = plan.constraint.maximise, plan.estimate
    if text is None:
        return e.throughput_rps
    devices, price = float(plan.num_devices), plan.cluster.price_per_device_hour
    figures: dict[str, Values] = {
        "throughput": e.throughput_rps,
        "tokens": e.output_tokens_per_s,
        "latency": e.latency_s,
        "ttft": e.ttft_s,
        "tpot": e.tpot_s,
        "gap": e.itl_p99_s,
        "running": e.decode_batch,
        "encode_batch": e.encode_batch,
        "idle": e.bubble_fraction,
        "devices": devices,
        "replicas": float(plan.replicas),
        "cost": devices * (np.nan if price is None else price),
    }
    return float(value_of(text, figures))


@cache
def _parsed(text: str) -> ast.expr:
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"give at most {MOST_CHARACTERS} characters")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("give an expression, such as 'throughput / devices'") from None


def _check(node: ast.expr) -> None:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return
        case ast.Name(id=name):
            if name not in FIGURES:
                known = ", ".join(FIGURES)
                raise ValueError(f"{name} is not known; the figures are {known}{nearest(name, FIGURES)}")
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            _check(left)
            _check(right)
        case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
            _check(operand)
        case ast.Compare(left, [op], [right]) if type(op) in _OPERATORS:
            _check(left)
            _check(right)
        case ast.IfExp(test, body, orelse):
            for part in (test, body, orelse):
                _check(part)
        case ast.Call(ast.Name(id=name), arguments, []) if name in FUNCTIONS and arguments:
            if name not in ("min", "max") and len(arguments) != 1:
                raise ValueError(f"{name} takes one argument")
            for argument in arguments:
                _check(argument)
        case _:
            raise ValueError(
                "give an expression of numbers, figures, + - * / **, comparisons, 'a if condition else b', and "
                f"{', '.join(FUNCTIONS)}"
            )


def _value(node: ast.expr, figures: Mapping[str, Values]) -> Any:
    match node:
        case ast.Constant(value=number):
            return float(number)  # type: ignore[arg-type]
        case ast.Name(id=name):
            return figures[name]
        case ast.BinOp(left, op, right):
            return _OPERATORS[type(op)](_value(left, figures), _value(right, figures))
        case ast.UnaryOp(op, operand):
            return _OPERATORS[type(op)](_value(operand, figures))
        case ast.Compare(left, [op], [right]):
            return np.asarray(_OPERATORS[type(op)](_value(left, figures), _value(right, figures)), float)
        case ast.IfExp(test, body, orelse):
            holds = np.asarray(_value(test, figures)) != 0
            return np.where(holds, _value(body, figures), _value(orelse, figures))
        case ast.Call(ast.Name(id=name), arguments, _):
            return FUNCTIONS[name](*(_value(argument, figures) for argument in arguments))
    raise AssertionError(ast.dump(node))


def maximised(plan: PlanDraft) -> float:
    return rate_of(plan) if plan.constraint.maximises_arrivals else objective_value(plan)
