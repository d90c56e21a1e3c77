"""Methods that search a policy's spaces, by the names that `--search` accepts."""

from xgpt.core.schema import SearchMethod
from xscheduler.search import checked, exhaustive, optuna_search
from xscheduler.search.base import Search, SearchResult

SEARCHES: dict[SearchMethod, Search] = {
    "branch-and-bound": checked.search,
    "exhaustive": exhaustive.search,
    "optuna": optuna_search.search,
}

__all__ = ["SEARCHES", "Search", "SearchResult"]
