"""Find a request's class by its API key or a header. A class has a priority and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from xgpt.core.errors import InputError, nearest
from xgpt.core.schema import Plan
from xrunner.server.access.keys import Key
from xrunner.server.api.errors import ApiError

HEADER = "X-Class"


class Classes:
    """The classes of a plan's requests. A new plan has the same classes as the plan that it replaces.

    Args:
        plan: the plan. None means that there are no classes.
        answer_within_s: promised time of an answer by class, as in `Limits`.

    Raises:
        InputError: a given class is not one of the plan's classes.
    """

    def __init__(self, plan: Plan | None, answer_within_s: Mapping[str, float] | None = None) -> None:
        self._plan = plan
        self._of = {} if plan is None else {each.name: each for each in plan.constraint.classes}
        self._within_s = dict(answer_within_s or {})
        for name in self._within_s:
            if name not in self._of:
                raise InputError("answer_within_s", f"{name}=...", self._missing(name))

    def key_of(self, key: Key, header: str | None) -> Key:
        """Return the key with the priority and bounds of its class, or of the class in the header.

        Raises:
            ApiError: 400, the plan has no such class; 403, the key belongs to another class.
        """
        name = key.of_class if header is None else header
        if header is not None and header not in self._of:
            raise ApiError(400, f"{HEADER}: {self._missing(header)}", param=HEADER, code="no_such_class")
        if not name or name not in self._of:
            return key
        if key.of_class not in ("", name):
            says = f"{HEADER}: this key's requests are of the class {key.of_class}; leave the header out"
            raise ApiError(403, says, param=HEADER, code="class_not_allowed")
        assert self._plan is not None
        class_of = self._of[name]
        return replace(
            key,
            account=self._plan.account_of(class_of, key.name, key.account.share),
            answer_within_s=key.answer_within_s or self._within_s.get(name),
            ttft_s=class_of.ttft_s,
            tpot_s=class_of.tpot_s,
            whole_s=class_of.latency_bound_s,
            of_class=name,
        )

    def _missing(self, name: str) -> str:
        if not self._of:
            return "the plan has no classes of requests; they come from the workload file that it was made from"
        return f"the plan's classes are {', '.join(self._of)}{nearest(name[:64], self._of)}"
