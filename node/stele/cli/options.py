"""Options that several commands share, and the client for a command. Imports the client only when it is used.

Invariant: a shared option means the same before and after the command. Given in several of these places, the last one
counts. Given twice in one place it is refused, and so is an option that the command does not have.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from stele.backup import Workers
    from stele.client import AsyncClient

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class _Seconds(click.FloatRange):
    """A finite number of seconds above 0. Refuses nan, which passes click's own check of a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value}: expected a finite number of seconds above 0", param, ctx)
        return seconds


def lease_id(value: str) -> int:
    """The id of a lease, as `stele kv lease-grant` prints it."""
    try:
        lease = int(value, 16)
    except ValueError:
        lease = 0
    if not 0 < lease < 1 << 63:
        raise click.BadParameter(f"{value}: expected the id of a lease, 16 hexadecimal digits")
    return lease


_SECONDS = _Seconds(min=0, min_open=True)
_META = "stele.cli.early."
_WORKERS = "stele.cli.workers"


class Shared(click.Option):
    """An option of a command that may also be given before it."""

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        value, source = super().consume_value(ctx, opts)
        early = f"{_META}{self.name}"
        if source is not ParameterSource.COMMANDLINE and early in ctx.meta:
            return ctx.meta[early], ParameterSource.COMMANDLINE
        return value, source


def early_options() -> list[click.Parameter]:
    """The shared options, as `stele` itself and its groups take them for the command that follows."""

    def early(*names: str, **kwargs: Any) -> click.Option:
        return click.Option(names, expose_value=False, callback=_keep, **kwargs)

    return [
        early(
            "--masters",
            metavar="HOST:PORT,...",
            help="Some of the masters; also allowed after the command (environment: STELE_MASTERS).",
        ),
        early(
            "--timeout",
            "timeout_s",
            type=_SECONDS,
            help="Give up after this many seconds; also allowed after commands that have it.",
        ),
        early(
            "--json", "as_json", is_flag=True, help="Print JSON; also allowed after commands that have it."
        ),
    ]


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE:
        ctx.meta[f"{_META}{param.name}"] = value


def refuse_unused(ctx: click.Context, name: str, command: click.Command) -> None:
    """Raises UsageError if an option was given before a command that does not have it."""
    taken = {param.name for param in command.params if isinstance(param, Shared)}
    behind = {option for param in command.params for option in param.opts}
    for param in early_options():
        if f"{_META}{param.name}" in ctx.meta and param.name not in taken:
            option = param.opts[0]
            where = " before the command" if option in behind else ""
            own = click.Context(command, parent=ctx, info_name=name)
            raise click.UsageError(f"{own.command_path} takes no {option}{where}", own)


def refuse_unclear(ctx: click.Context, name: str, command: click.Command, arguments: list[str]) -> None:
    """Raises UsageError for options after a command as `refuse_unclear_options` does.

    Only for commands that call a cluster. Nodes and masters are started from templates, so their options are not checked.
    """
    if any(isinstance(param, Shared) for param in command.params):
        refuse_unclear_options(click.Context(command, parent=ctx, info_name=name), arguments)


def refuse_unclear_options(own: click.Context, arguments: list[str]) -> None:
    """Raises UsageError if an option has an empty value, for example from a shell variable that is not set.
    Also if an option is given twice although one value counts. `own`: the context of the command or group
    that takes `arguments`."""
    values, _, given = own.command.make_parser(own).parse_args(list(arguments))
    for param in given:
        if not isinstance(param, click.Option) or param.multiple or param.is_flag:
            continue
        value = values[str(param.name)]
        if isinstance(value, str) and not value.strip():
            raise click.UsageError(f"{param.opts[0]} is empty; leave it out, or give it a value", own)
        if given.count(param) > 1:
            raise click.UsageError(f"{param.opts[0]} is given {given.count(param)} times; give it once", own)


def masters_option(command: F) -> F:
    """Add the option --masters to a command. Its default is the environment variable STELE_MASTERS."""
    return click.option(
        "--masters",
        cls=Shared,
        envvar="STELE_MASTERS",
        default="127.0.0.1:7051",
        show_default=True,
        metavar="HOST:PORT,...",
        help="Some of the masters (environment: STELE_MASTERS).",
    )(command)


def timeout_option(command: F, default_s: float = 30.0) -> F:
    """Add the option --timeout, in seconds, to a command."""
    return click.option(
        "--timeout",
        "timeout_s",
        cls=Shared,
        type=_SECONDS,
        default=default_s,
        show_default=True,
        help="Give up after this many seconds.",
    )(command)


def json_option(command: F) -> F:
    """Add the option --json to a command."""
    return click.option("--json", "as_json", cls=Shared, is_flag=True, help="Print JSON.")(command)


def replication_option(default: int | None = 3) -> Callable[[F], F]:
    """Return a decorator that adds the option --replication-factor to a command."""
    return click.option(
        "--replication-factor",
        type=click.IntRange(min=1),
        default=default,
        show_default=default is not None,
        help=f"Replicas of each tablet{' [default: 3]' if default is None else ''}.",
    )


def lease_option(command: F) -> F:
    """Add the option --lease to a command."""
    return click.option(
        "--lease",
        type=lease_id,
        default=None,
        metavar="ID",
        help="Remove the keys that are set here when this lease ends.",
    )(command)


def set_workers(make: Callable[[str], Workers]) -> None:
    """Let the backup command of this context run its jobs elsewhere. `make`: workers for the cluster with these masters."""
    click.get_current_context().meta[_WORKERS] = make


def workers_for(masters: str) -> Workers | None:
    """Who runs the jobs of a backup; None: this process."""
    make = click.get_current_context().meta.get(_WORKERS)
    return None if make is None else make(masters)


def with_client(masters: str, work: Callable[[AsyncClient], Awaitable[T]], timeout_s: float = 30.0) -> T:
    """Run `work` with a client of the cluster, on an event loop that ends with it.

    If the user gave --timeout, it also bounds the wait for the first answer of a master.
    """
    from stele.client import AsyncClient
    from stele.rpc.first_contact import FIRST_CONTACT_S

    context = click.get_current_context()
    given = context.get_parameter_source("timeout_s") not in (None, ParameterSource.DEFAULT)
    first_contact_s = float(context.params["timeout_s"]) if given else FIRST_CONTACT_S

    async def main() -> T:
        async with AsyncClient(masters, timeout_s=timeout_s, first_contact_s=first_contact_s) as client:
            return await work(client)

    return asyncio.run(main())
