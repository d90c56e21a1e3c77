"""Define the command line. `commands` declares each command's arguments. The function with the command's name, in one
of the other modules, runs it.

A command calls one function of xgpt.api and prints the result. Until then only click is imported, so that `xgpt plan
--help` answers immediately.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click

from xgpt.cli import commands
from xgpt.cli.options import fields_as_options
from xgpt.core.errors import (
    InfeasibleError,
    MachineError,
    XgptError,
    cut,
    nearest,
    not_installed,
    printable,
    reason_of,
    similar,
)
from xgpt.core.version import __version__

GROUPS = {
    "": ("plan", "check", "serve", "export"),
    "judge": ("compare", "simulate", "replan", "report", "ui"),
    "measure": ("profile", "bench", "calibrate", "tune", "watch"),
    "fleet": ("fleet", "autoscale"),
    "machine": ("doctor", "completion"),
}
"""Commands by group. Those without a group come first in the help, each with a sentence."""
COMMANDS = tuple(name for names in GROUPS.values() for name in names if hasattr(commands, name))


LONGEST_HELP = 200
"""In the list of commands, a command's first sentence has at most this many characters."""


class _Commands(click.Group):
    """The group of all commands. The error for an unknown command suggests the most similar name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return getattr(commands, name) if name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first commands with the complete first sentence of their help, and the others by group."""
        with formatter.section("Commands"):
            first = [name for name in GROUPS[""] if name in COMMANDS]
            formatter.write_dl([(name, getattr(commands, name).get_short_help_str(LONGEST_HELP)) for name in first])
        with formatter.section("More (xgpt COMMAND --help)"):
            more = {group: [name for name in names if name in COMMANDS] for group, names in GROUPS.items() if group}
            formatter.write_dl([(group, ", ".join(names)) for group, names in more.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = similar(args[0], COMMANDS)
            way_out = f"Did you mean {near}?" if near else f"The commands are {', '.join(COMMANDS)}."
            raise click.UsageError(f"{error.message} {way_out}", ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except XgptError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            error.args = (in_options(str(error), command.params if command else []),)
            raise


SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


@click.group(cls=_Commands, context_settings=SETTINGS)
@click.version_option(__version__)
def cli() -> None:
    """Find the best schedule for an LLM under a latency bound, prove it, and serve it.

    \b
    xgpt plan --latency-bound 9.8     write plan.json for this machine
    xgpt serve plan.json              run that plan behind an OpenAI-compatible endpoint
    """


SYNONYMS = {
    "fp8": "float8",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "kubernetes": "k8s",
    "docker": "compose",
    "docker-compose": "compose",
}
"""Other names that users may give to values of options, with the names that xgpt uses."""
NO_TARGET = dict.fromkeys(
    ("vllm", "sglang", "trtllm", "tensorrt-llm", "trt-llm", "tensorrt", "script", "systemd"),
    "; the plan says which engine runs: take shell (a script and a systemd unit) or another place",
) | {"helm": "; Helm has no export: take k8s (a kustomization) or llm-d (values for the Helm chart of its router)"}
"""Ends of the error messages for targets that `xgpt export` does not have."""
OPTIONS_ELSEWHERE = {
    "--cluster, which names the devices": ("--gpu", "--gpus", "--num-gpus", "--gpu-type", "--device"),
    "--fix tp=N": ("--tp", "--tp-size", "--tensor-parallel-size"),
    "--fix pp=N": ("--pp", "--pipeline-parallel-size"),
    "--fix max_batch=N": ("--max-num-seqs", "--batch-size", "--max-batch-size"),
    "--fix token_budget=N": ("--max-num-batched-tokens", "--chunked-prefill-size"),
    "--workload, a file of lengths or a log": ("--isl", "--osl", "--input-len", "--output-len", "--trace", "--log"),
    "--arrival-rate": ("--rate", "--qps", "--rps", "--request-rate"),
    "--model with the quantised checkpoint or its id, or --dtype": ("--quantization", "--quantize", "--quant"),
    "--workload, whose longest request sets the context": ("--max-model-len", "--context-length"),
    "--latency-bound, --ttft or --tpot": ("--slo", "--sla-ms", "--latency-ms", "--itl", "--p99"),
}
"""For options of other tools, what to give instead."""
INSTEAD: dict[tuple[str | None, str], str] = {
    ("replan", "--workload"): "--lengths",
    ("replan", "--trace"): "--lengths",
    ("fleet", "--quantile"): "--attain",
    ("fleet", "--workload"): "--trace",
}
"""For a command and an option of other commands, its own."""


def _elsewhere(error: click.NoSuchOption) -> str:
    """Return the end of the error for an unknown option: the option that was probably meant, or the commands that have
    the option.
    """
    command = None if error.ctx is None else error.ctx.info_name
    if (instead := INSTEAD.get((command, error.option_name))) is not None:
        return f" Give {instead}."
    named = [name for name in COMMANDS if _takes(name, error.option_name)]
    if named:
        return f" These commands have it: `xgpt {'`, `xgpt '.join(named)}`."
    for here, elsewhere in OPTIONS_ELSEWHERE.items():
        if error.option_name in elsewhere:
            return f" Give {here}." if _takes(command or "", re.split("[ ,]", here)[0]) else f" `xgpt plan` has {here}."
    near = similar(error.option_name, error.possibilities or [], cutoff=0.7)
    return f" Did you mean {near}?" if near else ""


def _takes(name: str, option: str) -> bool:
    command = cli.get_command(click.Context(cli), name)
    return command is not None and any(option in parameter.opts for parameter in command.params)


def ignore_hangups() -> None:
    """Ignore SIGHUP from now on, in the main thread. Programs that are started do not inherit this."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, lambda *_: None)


def set_up_process() -> None:
    """Make up for what the program that started this one has left out.

    Closed standard streams become /dev/null. Otherwise the next opened file would get what any library writes to
    standard error. Signals that were blocked are no longer.
    """
    if threading.current_thread() is threading.main_thread():
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Every error is one line on standard error and an exit code (see xgpt.core.errors)."""
    set_up_process()
    given = sys.argv[1:] if arguments is None else arguments
    for each in given:
        if not each.isascii() and each.encode(errors="ignore").decode() != each:
            _fail(f"{each} is not text in UTF-8; rename the file", 2)
    if given[:1] == ["serve"]:
        ignore_hangups()  # a program that has written keys may send SIGHUP before the server reads them
    try:
        code = cli.main(arguments, prog_name="xgpt", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(2)
    except click.NoSuchOption as error:
        _fail(f"No such option {error.option_name!r}.{_elsewhere(error)}", 2)
    except click.BadParameter as error:
        _fail(error.format_message().removesuffix(".") + _way_out(error), 2)
    except click.UsageError as error:
        example = "" if error.ctx is None else f"; `{error.ctx.command_path} --help` has an example"
        _fail(error.format_message() + (example if "extra argument" in error.format_message() else ""), 2)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except XgptError as error:
        _fail_with(error)
    except ModuleNotFoundError as error:
        if os.environ.get("XGPT_TRACEBACK") or (missing := not_installed(error)) is None:
            raise
        _fail_with(missing)
    except BrokenPipeError:
        # The process that reads the output has ended, so nothing can be reported.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if os.environ.get("XGPT_TRACEBACK"):
            raise
        if isinstance(error, OSError):
            _fail_with(MachineError(_unusable(error)))
        _fail(f"internal error: {type(error).__name__}: {error} (XGPT_TRACEBACK=1 shows where)", 4)


def _unusable(error: OSError) -> str:
    if error.filename is not None:
        return f"cannot use {cut(str(error.filename))}: {reason_of(error)}; give another file"
    if isinstance(error, FileNotFoundError):
        return "the working directory is gone; change to another one"
    return f"cannot read or write: {reason_of(error)}"


def _fail_with(error: XgptError) -> None:
    if isinstance(error, InfeasibleError):
        for warning in error.warnings:
            click.echo(f"warning: {printable(warning)}", err=True)
        _fail(f"infeasible: {error}", error.exit_code)
    _fail(str(error), error.exit_code)


def _way_out(error: click.BadParameter) -> str:
    if isinstance(error, click.MissingParameter):
        return "" if error.ctx is None else f"; `{error.ctx.command_path} --help` has an example"
    type_ = None if error.param is None else error.param.type
    given = re.match("'([^']*)'", error.message or "")
    if given is not None and given[1].lower() in NO_TARGET and error.param is not None and error.param.name == "target":
        return NO_TARGET[given[1].lower()]
    if given is not None and isinstance(type_, click.Choice):
        return nearest(SYNONYMS.get(given[1].lower(), given[1]), type_.choices)
    param = error.param
    share = param is not None and (
        (param.name or "").endswith("quantile") or getattr(param, "metavar", None) == "SHARE"
    )
    is_percent = "range" in (error.message or "") or "%' is not a number" in (error.message or "")
    return "; it is a share: 0.99 for 99%" if share and is_percent else ""


def in_options(message: str, params: Sequence[click.Parameter]) -> str:
    """Return a message with the API's arguments written as options, as in --seed 1 for `seed=1`."""
    longest = [(param.name, max(param.opts, key=len)) for param in params if isinstance(param, click.Option)]
    options = {name: option for param, option in longest for name in (param, option[2:].replace("-", "_"))}
    message = re.sub(r"^([a-z_]+)(\.\d+)?(?=:| is )", lambda match: options.get(match[1], match[0]), message)
    message = re.sub(": (True|False) is", " is", message, count=1)  # a flag has no value
    return fields_as_options(message, options)


def _fail(message: str, code: int) -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()  # the error must be the last line
    with suppress(OSError):  # standard error may be full
        click.echo(f"xgpt: {printable(' '.join(message.split()))}", err=True)
    sys.exit(code)
