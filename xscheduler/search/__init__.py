"""Searches of one policy's space, by the name that `--search` takes."""

from xscheduler.search import branch_and_bound, exhaustive, optuna_search
from xscheduler.search.base import Found, Method, Search

SEARCHES: dict[Method, Search] = {
    "branch-and-bound": branch_and_bound.search,
    "exhaustive": exhaustive.search,
    "optuna": optuna_search.search,
}

__all__ = ["SEARCHES", "Found", "Method", "Search"]
