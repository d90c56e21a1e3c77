"""Find the engine and its command line in a shell command, `docker run`, a Compose file, a pod or Helm values."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from xgpt.comparing.current import CurrentEngine
from xgpt.comparing.flags import tables
from xgpt.comparing.other_engines import read_sglang, read_tensorrt_llm
from xgpt.comparing.vllm_command import read_vllm
from xgpt.core.documents import Excess, read_yaml
from xgpt.core.errors import InputError
from xgpt.core.io import read_text
from xgpt.core.schema import ClusterSpec

Engine = Literal["vllm", "sglang", "tensorrt-llm"]

ENDS = {";", "&", "&&", "|", "||", ">", ">>", "2>", "2>&1", "<", "&>", ")"}
"""Words that end a shell command."""
NONE_SET: Mapping[str, str] = MappingProxyType({})
ARITHMETIC = re.compile(r"\$\(\(([\w\s$+*/%(){}<>=?:-]{1,100})\)\)")
OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.Mod: operator.mod, ast.Gt: operator.gt, ast.Lt: operator.lt, ast.GtE: operator.ge, ast.LtE: operator.le,
}  # fmt: skip
MOST_LINES = 100
"""Largest number of lines of a quoted text in a command."""
MOST_TEXT = 1 << 20
MOST_COMMAND = 1 << 16
"""Largest number of characters of a command whose variables are replaced by their values."""
MOST_VARIABLES = 1000
QUOTES = {"": re.compile(r"\\.|['\"]"), "'": re.compile("'"), '"': re.compile(r'\\.|"')}
"""For each open quote ("" for none), what may open or close one."""
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
ARRAY = re.compile(r"\s*(?:(?:local|declare|readonly|export) (?:-\w+ )*)?(\w+)(\+?)=\((.*)")
PUBLISHED = re.compile(r"(?:[\d.]+:)?(\d+):\d+")
QUOTED = "\ue000"
"""Stands for a "$" between quotes: a shell does not split the value of such a variable into words."""
REFERENCE = re.compile(rf"[${QUOTED}](?:\((\w+)\)|\{{(\w+)(?:\[[@*]\])?(?::?[-=]([^}}]*))?\}}|(\w+))")
OF_ENGINES = re.compile(r"(VLLM|SGLANG|SGL|TRTLLM)_(?!.*(API_KEY|LOG|USAGE|STATS|CACHE|HOST|PORT|TRACE|PROFILER)).*")
"""Environment variables that may change how an engine computes."""


@dataclass(frozen=True)
class Launched:
    """An engine with its command line.

    Attributes:
        words: the arguments after the program's name.
        image: the container's image, or "".
        devices: number of devices that the manifest requests, or None if the manifest does not state it.
        published: the host's port under which `docker run` publishes the engine's, or None.
    """

    engine: Engine
    words: list[str]
    image: str = ""
    devices: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    published: int | None = None

    @property
    def command(self) -> str:
        """The engine's command with those of its variables that change how it computes."""
        variables = [f"{name}={value}" for name, value in self.environment.items() if OF_ENGINES.fullmatch(name)]
        program = tables()["programs"][self.engine]
        return shlex.join([*(["env", *variables] if variables else []), *program, *self.words])

    @property
    def version(self) -> str | None:
        """The version in the image's tag, such as 0.15.1, or None if the tag has none."""
        tag = re.search(r":v?(\d+\.\d+(\.\d+)?)", self.image)
        return None if tag is None else tag[1]


def find_engine(text: str, variables: Mapping[str, str] = NONE_SET) -> Launched:
    """Return the engine that a command or a file starts.

    Args:
        text: a command, YAML, or the path of a file with a command or YAML.
        variables: values of shell variables that the text does not set.

    Raises:
        InputError: `text` starts no engine, or several different engines.
    """
    text = text.strip()
    if "\n" not in text and len(text) < 4096 and not re.search(r"\s--?\w", text) and os.path.isfile(text):
        text = read_text(Path(text), "current")
    elif " " not in text and Path(text).suffix in (".yaml", ".yml", ".json"):
        raise InputError("current", text, "there is no such file")
    text = _with_values(text, variables)
    if len(text) > MOST_TEXT:
        raise InputError("current", shorten(text), f"it has over {MOST_TEXT >> 20} MiB; give the command of one engine")
    documents = _documents(text)
    if documents:
        return _one([launched for document in documents for launched in in_manifest(document)], "the manifest")
    return _one(list(in_shell(text)), shorten(text))


def shorten(text: str) -> str:
    """Return a text as one line for a message, cut to 100 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 100 else line[:97] + "..."


def _one(launched: list[Launched], text: str) -> Launched:
    if len(launched) == 1:
        return launched[0]
    if not launched:
        accepted = (
            "give a command that starts with vllm serve, sglang serve or trtllm-serve, or a docker run, Compose file, "
            "pod or Helm values that contain one"
        )
        raise InputError("current", text, accepted)
    if all((each.engine, each.words) == (launched[0].engine, launched[0].words) for each in launched):
        return launched[0]
    raise InputError("current", text, f"it starts {len(launched)} different engines: give the command of one")


def _documents(text: str) -> list[Any]:
    if not re.search(r"^\s*[\w.-]+\s*:(\s|$)", text, flags=re.MULTILINE):
        return []
    try:
        return [each for each in read_yaml(text) if isinstance(each, dict)]
    except Excess as error:
        raise InputError("current", shorten(text), f"{error}; give a smaller, flat manifest") from None
    except ValueError:
        return []


# --- shells


def in_shell(text: str) -> Iterator[Launched]:
    variables: dict[str, str] = {}
    text = re.sub(r"^[ \t]*#.*\n", "", re.sub(r"\\[ \t]*\r?\n", " ", text), flags=re.MULTILINE)
    for line in _lines(text):
        if array := ARRAY.fullmatch(line):
            words = _all_filled(_words(_computed(array[3].rstrip()[:-1], variables)), variables, splits=True)
            _set(variables, array[1], f"{variables.get(array[1], '') if array[2] else ''} {shlex.join(words)}")
        elif line.strip() and not line.strip().startswith("#"):
            words = _words(_computed(re.sub(r"^[$>] ", "", line.strip()), variables))
            yield from _in_words(words, variables=variables)


def _set(variables: dict[str, str], name: str, value: str) -> None:
    if len(variables) >= MOST_VARIABLES:
        raise InputError("current", name, f"it sets over {MOST_VARIABLES} variables")
    if len(value) > MOST_COMMAND:
        raise InputError("current", name, f"with its variables it has over {MOST_COMMAND:,} characters")
    variables[name] = value


def _lines(text: str) -> Iterator[str]:
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        most = min(at + MOST_LINES, len(lines))
        if ARRAY.match(lines[at]):
            end = next((each for each in range(at, most) if lines[each].rstrip().endswith(")")), at)
            yield " ".join(lines[at : end + 1])
            at = end + 1
            continue
        end, quote = at, "" if lines[at].lstrip().startswith("#") else _marked(lines[at])[1]
        while quote and end + 1 < most:
            end += 1
            quote = _marked(lines[end], quote)[1]
        end = at if quote else end
        yield " ".join(lines[at : end + 1])
        at = end + 1


def _words(line: str) -> list[str]:
    # A placeholder such as <port> is a word, not a redirection.
    line = re.sub(r"<([A-Za-z][\w .:/-]*)>", lambda match: match[1].replace(" ", "-"), line)
    line = re.sub(r"\s[12](?=>)", " ", line)  # the file descriptor in 2>&1 is not a word
    line = re.sub(r"\$\(+[^()]*\)+", "$COMMAND", line)  # a command substitution is one word
    reader = shlex.shlex(_marked(line)[0], posix=True, punctuation_chars="&|;<>")
    reader.whitespace_split = True
    reader.commenters = ""
    try:
        words = list(reader)
    except ValueError as error:
        raise InputError("current", shorten(line), f"{error}; quote it as for a shell") from None
    return words[: _comment(words)]


def _marked(line: str, quote: str = "") -> tuple[str, str]:
    """Return a line with each "$" between quotes as `QUOTED`, and the quote that is open after it.

    Args:
        quote: the quote that is open before it.
    """
    at, parts = 0, list[str]()
    while found := QUOTES[quote].search(line, at):
        parts += [line[at : found.start()].replace("$", QUOTED if quote else "$"), found[0]]
        at = found.end()
        if not found[0].startswith("\\"):
            quote = "" if quote else found[0]
    return "".join([*parts, line[at:]]), quote


def _comment(words: list[str]) -> int:
    return next((at for at, word in enumerate(words) if word == "#" or word.startswith("# ")), len(words))


def _assigned(words: Iterable[str]) -> dict[str, str]:
    return {match[1]: match[2] for word in words if (match := ASSIGNMENT.fullmatch(word))}


def _in_words(words: list[str], image: str = "", variables: dict[str, str] | None = None) -> Iterator[Launched]:
    splits, variables = variables is not None, {} if variables is None else variables
    for words_given in _commands(words):
        command = _all_filled(words_given, variables, splits)
        command = command[command[:1] in (["export"], ["env"]) :]
        environment = _assigned(takewhile(ASSIGNMENT.fullmatch, command))
        command = command[len(environment) :]
        if not command:
            for name, value in environment.items():
                _set(variables, name, value)
            continue
        environment = variables | environment
        names = [os.path.basename(word) for word in command]
        for at, word in enumerate(names):
            after = names[at + 1] if at + 1 < len(names) else ""
            if (engine := tables()["launchers"].get(f"{word} {after}")) is not None:
                yield Launched(engine, command[at + 2 :], image, environment=environment)
                break
            if word == "trtllm-serve":
                rest = command[at + 1 :]
                rest = rest[1:] if rest[:1] == ["serve"] else rest
                yield Launched("tensorrt-llm", rest, image, environment=environment)
                break
            if word in ("bash", "sh") and (at == 0 or names[at - 1] == "exec"):
                script = next((then for flag, then in pairwise(command[at:]) if re.fullmatch(r"-\w*c", flag)), None)
                if script is not None:
                    yield from in_shell(script)
                    break
            if word in ("docker", "podman", "nerdctl") and after == "run":
                yield from _in_docker(command[at + 2 :])
                break


def _commands(words: list[str]) -> Iterator[list[str]]:
    command: list[str] = []
    is_redirected = False
    for word in words:
        if word in ENDS or re.fullmatch(r"[&|;<>]+", word):
            is_redirected = any(mark in word for mark in "<>")
            if not is_redirected:
                yield command
                command = []
        elif is_redirected:
            is_redirected = False
        else:
            command.append(word)
    yield command


def _in_docker(words: list[str]) -> Iterator[Launched]:
    entrypoint, variables, ports = "", list[str](), list[int]()
    at = 0
    while at < len(words) and words[at].startswith("-"):
        name, equals, value = words[at].partition("=")
        at += 1
        takes_none = name in tables()["docker_switches"] or bool(re.fullmatch(r"-[itdP]+", name))
        if not equals and not takes_none:
            value = words[at] if at < len(words) else ""
            at += 1
        if name == "--entrypoint":
            entrypoint = value
        elif name in ("-e", "--env"):
            variables.append(value)
        elif name in ("-p", "--publish") and (port := PUBLISHED.match(value)):
            ports.append(int(port[1]))
    if at < len(words):
        for launched in _in_container(words[at], [entrypoint] if entrypoint else [], words[at + 1 :]):
            yield replace(launched, environment=_assigned(variables), published=ports[0] if ports else None)


def _in_container(image: str, entrypoint: list[str], arguments: list[str]) -> Iterator[Launched]:
    launched = list(_in_words([*entrypoint, *arguments], image))
    if launched or entrypoint:
        yield from (replace(each, image=image) for each in launched)
        return
    name = image.lower()
    engine = next((engine for part, engine in tables()["images"].items() if part in name), None)
    if engine is not None and not re.search(r"router|lmcache-server|frontend", name):
        yield Launched(engine, arguments[1:] if arguments[:1] == ["serve"] else arguments, image)


# --- manifests


def in_manifest(node: Any) -> Iterator[Launched]:
    """Yield the engines in Compose services, pods, and Helm values of the production stack, llm-d or Dynamo."""
    if isinstance(node, list):
        for each in node:
            yield from in_manifest(each)
    if not isinstance(node, dict):
        return
    if isinstance(node.get("vllmConfig"), dict):
        yield _of_values(node)
        return
    if isinstance(node.get("image"), str) and ({"command", "args", "entrypoint"} & set(node)):
        environment = _environment(node)
        entrypoint, arguments = _texts(node.get("entrypoint")), _texts(node.get("command"))
        if "args" in node:  # a pod's command is the entrypoint
            entrypoint, arguments = arguments, _texts(node["args"])
        entrypoint, arguments = _all_filled(entrypoint, environment), _all_filled(arguments, environment)
        devices = _devices(node)
        for launched in _in_container(node["image"], entrypoint, arguments):
            yield replace(launched, devices=devices, environment=environment)
        return
    for value in node.values():
        yield from in_manifest(value)


def _of_values(node: dict[str, Any]) -> Launched:
    config = node["vllmConfig"]
    words = [str(node.get("modelURL", ""))] if node.get("modelURL") else []
    for name, flag in tables()["helm_values"].items():
        value = config.get(name)
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:
            words += [flag, str(value)]
    words += [str(word) for word in config.get("extraArgs", [])]
    devices = node.get("requestGPU")
    image = f"{node.get('repository', '')}:{node.get('tag', '')}"
    return Launched("vllm", words, image, devices if isinstance(devices, int) else None)


def _texts(value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return _words(re.sub(r"\s*\n\s*", " ", value))
    words = []
    for each in value:
        text = str(each)
        is_pair = re.fullmatch(r"--[\w.-]+ [^{\n]+", text.strip()) is not None  # "--max-num-seqs 64" as one argument
        words += text.strip().split(" ", 1) if is_pair else [text]
    return words


def _environment(node: dict[str, Any]) -> dict[str, str]:
    given = node.get("env", node.get("environment", {}))
    if isinstance(given, dict):
        return {str(name): str(value) for name, value in given.items()}
    variables = {}
    for each in given or []:
        if isinstance(each, dict) and "value" in each:
            variables[str(each.get("name"))] = str(each["value"])
        elif isinstance(each, str) and "=" in each:
            name, _, value = each.partition("=")
            variables[name] = value
    return variables


def _all_filled(words: list[str], environment: Mapping[str, str], splits: bool = False) -> list[str]:
    filled, size = list[str](), 0
    for word in words:
        values = _filled(word, environment, splits and ASSIGNMENT.fullmatch(word) is None)
        filled += values
        size += sum(map(len, values))
        if size > MOST_COMMAND:
            raise InputError("current", shorten(word), f"with its variables it has over {MOST_COMMAND:,} characters")
    return filled


def _filled(word: str, environment: Mapping[str, str], splits: bool) -> list[str]:
    array = re.fullmatch(rf"[${QUOTED}]\{{(\w+)\[[@*]\]\}}", word)
    if array and array[1] in environment:
        return shlex.split(environment[array[1]])

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[2] or match[4], match[3]
        return environment.get(name, match[0] if default is None else default)

    text = REFERENCE.sub(value, word).replace(QUOTED, "$")
    return text.split() if splits and text != word and word.startswith("$") else [text]


def _with_values(text: str, variables: Mapping[str, str]) -> str:
    for name, value in variables.items():
        pattern = rf"\$\{{{name}(?::?[-=?+][^}}]*)?\}}|\$\({name}\)|\${name}\b"
        text = re.sub(pattern, value.replace("\\", r"\\"), text)
    return _computed(text, variables)


def _computed(text: str, variables: Mapping[str, str]) -> str:
    """Replace sums, products and choices of known numbers, such as $((NODES * 8)), by their results."""

    def value(match: re.Match[str]) -> str:
        given = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: variables.get(name[1], name[0]), match[1])
        given = re.sub(r"^([^?]+)\?([^:]+):(.+)$", r"(\2) if (\1) else (\3)", given.strip())
        try:
            return str(_number(ast.parse(given.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return match[0]

    return ARITHMETIC.sub(value, text)


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPERATORS:
        return OPERATORS[type(node.ops[0])](_number(node.left), _number(node.comparators[0]))
    if isinstance(node, ast.IfExp):
        return _number(node.body if _number(node.test) else node.orelse)
    raise ValueError("not a sum or product of numbers")


def _devices(node: dict[str, Any]) -> int | None:
    resources = node.get("resources", {})
    for kind in ("limits", "requests"):
        resource = resources.get(kind, {}) if isinstance(resources, dict) else {}
        for name, number in (resource or {}).items():
            if str(name).endswith("/gpu") and str(number).isdecimal():
                return int(number)
    return None


READERS = {"vllm": read_vllm, "sglang": read_sglang, "tensorrt-llm": read_tensorrt_llm}


def read_current(text: str, cluster: ClusterSpec, variables: Mapping[str, str] = NONE_SET) -> CurrentEngine:
    """Return the deployment that a command, a Compose file, a pod or Helm values start.

    Args:
        text: the command, the YAML, or the path of a file with a command or YAML.
        variables: values of shell variables that the text does not set.

    Raises:
        InputError: `text` starts no engine that xgpt scores, the engine does not know a flag, or xgpt does not score a
            flag's effect.
    """
    launched = find_engine(text, variables)
    current = READERS[launched.engine](launched.words, cluster)
    notes = (*current.notes, *_device_note(current, launched), *_environment_note(launched))
    return replace(
        current, version=launched.version, notes=notes, command=launched.command, published=launched.published
    )


def _environment_note(launched: Launched) -> list[str]:
    names = sorted(name for name in launched.environment if OF_ENGINES.fullmatch(name))
    return [f"environment variables are not scored: {', '.join(names)}"] if names else []


def _device_note(current: CurrentEngine, launched: Launched) -> list[str]:
    if launched.devices in (None, current.num_devices):
        return []
    return [
        f"the manifest requests {launched.devices} devices, but its engine uses {current.num_devices}; these are scored"
    ]
