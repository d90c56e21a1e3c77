"""Read API keys: the account, the limits and the rights of each key."""

from __future__ import annotations

import hashlib
import logging
import math
import re
import stat
from base64 import b64decode
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from xgpt.core.errors import InputError, nearest, reason_of
from xgpt.core.io import read_text
from xgpt.core.numbers import decimal
from xgpt.core.schema import ANYONE, Account, Plan
from xrunner.server.api.errors import ApiError

logger = logging.getLogger(__name__)

FIELD = "api_key_file"
MIN_KEY_LENGTH = 16
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
NUMBERS = ("share", "priority", "requests_per_minute", "tokens_per_minute", "answer_within", "ttft", "tpot")
SETTING = re.compile(rf"admin|(class|{'|'.join(NUMBERS)})=(\S*)")
LIKE_SETTING = re.compile(rf"{SETTING.pattern}|[A-Za-z_-]+=[^=]\S*")
"""Matches settings, known or mistyped. It does not match a key in Base64, which contains = only at its end."""
OF_CLASS = ("priority", "ttft", "tpot")
"""Settings that a class replaces in a key."""


@dataclass(frozen=True, slots=True)
class Key:
    """The account, limits and rights of an API key, but never the key itself.

    Attributes:
        is_admin: whether the key may also read pages about all accounts: /plan, /metrics, the live page.
        answer_within_s: promised time from a request to its last token, as in `Limits`. None means the server's
            promise.
        ttft_s, tpot_s, whole_s: bounds for the goodput of this key's requests. `answer_within_s` replaces a missing
            `whole_s`. If all of these are missing, the plan's bounds are used.
        of_class: the class that sets the priority and bounds of this key's requests. Empty means that a request may
            choose any class."""

    account: Account = ANYONE
    is_admin: bool = True
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    answer_within_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    whole_s: float | None = None
    of_class: str = ""

    @property
    def name(self) -> str:
        return self.account.key


NO_KEY = Key()
"""The rights of a client if no keys are set."""


class ApiKeys:
    """The accepted keys. A lookup is by digest, and takes the same time for every key and every number of keys."""

    def __init__(self, keys: Mapping[bytes, Key], path: Path | None = None, classes: Collection[str] = ()) -> None:
        self._keys = dict(keys)
        self.path = path
        self._classes = classes

    @classmethod
    def read(cls, path: Path, classes: Collection[str] = ()) -> ApiKeys:
        """Return the keys of a file. Raises InputError: the file cannot be read, or is malformed. The message never
        shows a key."""
        return cls(_read(path, classes), path, classes)

    @classmethod
    def parse(cls, text: str, classes: Collection[str] = ()) -> ApiKeys:
        """Return the keys of a file's text.

        Each line holds a key, after an optional name and before optional settings: `share=3`, `priority=1`,
        `requests_per_minute=60`, `tokens_per_minute=1e5`, `answer_within=10`, `ttft=0.5`, `tpot=0.05`, `class=batch`,
        `admin`. Empty lines and lines that begin with # are skipped. A key without a name belongs to the operator and
        may do everything. A key with a name belongs to a client, and is an administrator's only with the setting
        `admin`.

        Raises:
            InputError: there is no key, or a line is malformed. The message never shows a key."""
        return cls(_parse(text, "keys", classes))

    def reload(self) -> None:
        """Read the file again. If it is broken, keep the present keys."""
        assert self.path is not None
        try:
            self._keys = _read(self.path, self._classes)
        except InputError as error:
            logger.error("the API keys are unchanged", extra={"fields": {"reason": str(error)}})
        else:
            names = [key.name for key in self._keys.values()]
            logger.info("API keys reloaded", extra={"fields": {"keys": names}})

    def find(self, authorization: bytes) -> Key | None:
        """Return the rights of the key in an Authorization header, or None if there is no such key. `authorization`:
        the header's value: Bearer KEY, or Basic with the key as password."""
        scheme, _, credentials = authorization.partition(b" ")
        given = credentials.strip()
        if scheme.lower() == b"basic":
            try:
                given = b64decode(given, validate=True).partition(b":")[2]
            except ValueError:
                return None
        elif scheme.lower() != b"bearer":
            return None
        return self._keys.get(_digest(given))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read(path: Path, classes: Collection[str]) -> dict[bytes, Key]:
    try:
        if not stat.S_ISREG(mode := path.stat().st_mode):
            raise InputError(FIELD, str(path), "it is no regular file; give a file of keys")
        if mode & 0o026:
            others = "change" if mode & 0o022 else "read"
            says = f"other users of this machine can {others} the API keys: chmod 600 {path}"
            logger.warning(says)
        return _parse(read_text(path, FIELD), str(path), classes)
    except FileNotFoundError:
        raise InputError(FIELD, str(path), "there is no such file; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(FIELD, str(path), f"it cannot be read: {reason_of(error)}; check its permissions") from None


def _parse(text: str, source: str, classes: Collection[str]) -> dict[bytes, Key]:
    keys: dict[bytes, Key] = {}
    names: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{source}, line {number}"
        has_name = len(words) > 1 and not LIKE_SETTING.fullmatch(words[1])
        name = words.pop(0) if has_name else f"line-{number}"
        secret, *settings = words
        if not NAME.fullmatch(name):
            says = "a name has up to 64 letters, digits and . _ @ -, and begins with a letter or digit"
            raise InputError(FIELD, where, says)
        if len(secret) < MIN_KEY_LENGTH or not secret.isascii() or not secret.isprintable():
            found = f"a key of {len(secret)} characters"
            must = f"a key is at least {MIN_KEY_LENGTH} printable ASCII characters without blanks"
            raise InputError(f"{FIELD} {where}", found, must)
        if name in names or _digest(secret.encode()) in keys:
            raise InputError(FIELD, where, "this name or key is on an earlier line: remove one of the lines")
        names.add(name)
        keys[_digest(secret.encode())] = _key(name, settings, where, classes, is_admin=not has_name)
    if not keys:
        raise InputError(FIELD, source, "it must contain at least one key; each key has its own line")
    return keys


def _key(name: str, settings: list[str], where: str, classes: Collection[str], *, is_admin: bool) -> Key:
    given: dict[str, str] = {}
    for setting in settings:
        match = SETTING.fullmatch(setting)
        if match is None:
            known = ", ".join(f"{name}=NUMBER" for name in NUMBERS)
            says = f"one of its words is not a known setting; the settings are {known}, class=NAME and admin"
            raise InputError(FIELD, where, says)
        if (known := match[1] or match[0]) in given:
            raise InputError(FIELD, where, f"{known} is given twice: leave one out")
        given[known] = match[2]
    is_admin = "admin" in given or is_admin
    numbers = {known: _number(known, given[known], where) for known in NUMBERS if known in given}
    of_class = given.get("class", "")
    if "class" in given and of_class not in classes:
        known = f"the plan's classes are {', '.join(classes)}{nearest(of_class, classes)}"
        has_none = "the plan has no classes of requests: leave class= out"
        raise InputError(FIELD, f"{where}, class={of_class}", known if classes else has_none)
    if of_class and (both := next((name for name in OF_CLASS if name in numbers), None)):
        says = f"class= already sets {both} for all of its requests: leave out {both}= or class="
        raise InputError(FIELD, where, says)
    ttft_ns, tpot_ns = (None if (s := numbers.get(bound)) is None else round(1e9 * s) for bound in ("ttft", "tpot"))
    account = Account(name, numbers.get("share", 1.0), int(numbers.get("priority", 0)), ttft_ns, tpot_ns)
    return Key(
        account,
        is_admin,
        requests_per_minute=numbers.get("requests_per_minute"),
        tokens_per_minute=numbers.get("tokens_per_minute"),
        answer_within_s=numbers.get("answer_within"),
        ttft_s=numbers.get("ttft"),
        tpot_s=numbers.get("tpot"),
        of_class=of_class,
    )


def _number(name: str, text: str, where: str) -> float:
    try:
        value = decimal(text)
    except ValueError:
        value = math.nan
    if name == "priority":
        if not (value.is_integer() and abs(value) <= 100):
            raise InputError(FIELD, f"{where}, {name}={text}", "give a whole number from -100 to 100")
    elif not 1e-3 <= value <= 1e12:
        raise InputError(FIELD, f"{where}, {name}={text}", "give a number from 0.001 to 1e12")
    return value


CLASS_HEADER = "X-Class"


class Classes:
    """The classes of a plan's requests. A new plan has the same classes as the plan that it replaces.

    Args:
        answer_within_s: promised time from a request to its last token, by class. See `Limits`.

    Raises:
        InputError: `answer_within_s` names a class that the plan does not have."""

    def __init__(self, plan: Plan | None, answer_within_s: Mapping[str, float] | None = None) -> None:
        self._plan = plan
        self._of = {} if plan is None else {each.name: each for each in plan.constraint.classes}
        self._within_s = dict(answer_within_s or {})
        for name in self._within_s:
            if name not in self._of:
                raise InputError("answer_within_s", f"{name}=...", self._missing(name))

    def key_of(self, key: Key, header: str | None) -> Key:
        """Return the key with the priority and bounds of the class in the header or, without one, of its own class.
        Raises ApiError: 400, the plan has no such class; 403, the key belongs to another class."""
        name = key.of_class if header is None else header
        if header is not None and header not in self._of:
            raise ApiError(400, f"{CLASS_HEADER}: {self._missing(header)}", param=CLASS_HEADER, code="no_such_class")
        if not name or name not in self._of:
            return key
        if key.of_class not in ("", name):
            says = f"{CLASS_HEADER}: this key's requests are of the class {key.of_class}; leave the header out"
            raise ApiError(403, says, param=CLASS_HEADER, code="class_not_allowed")
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
