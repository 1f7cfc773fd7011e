"""The tree of commands. The module of a command is imported when the command is called.

Invariant: of the heavy modules `stele --help` imports only click.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO, cast

import click

from stele import __version__
from stele.cli.errors import (
    BUG,
    EXIT_CODES,
    INTERRUPTED,
    OK,
    error_lines,
    exit_code,
    exit_code_of_system,
    exit_codes_help,
)
from stele.cli.options import early_options, refuse_unclear, refuse_unclear_options, refuse_unused
from stele.cli.output import say
from stele.model.errors import SteleError

_GROUPS = {
    "node": (
        "Run, list, drain, park, fence and retire nodes.",
        {
            "run": ("stele.cli.processes:node_run", "Run a node until SIGTERM."),
            "list": (
                "stele.cli.nodes:list_nodes",
                "List nodes, with the state seen and the state wanted of each.",
            ),
            "drain": ("stele.cli.wanted:drain", "Move all replicas and leaders off a node."),
            "undrain": ("stele.cli.wanted:undrain", "Cancel a drain."),
            "park": (
                "stele.cli.wanted:park",
                "Let a node be away for a while; its replicas are not replaced.",
            ),
            "fence": ("stele.cli.wanted:fence", "Let a node run without serving anybody for a while."),
            "unfence": ("stele.cli.wanted:unfence", "Return a fenced node to service."),
            "unpark": ("stele.cli.wanted:unpark", "Return a parked node to service."),
            "retire": ("stele.cli.wanted:retire", "Drain a node, then retire it for good."),
            "forget": ("stele.cli.nodes:forget", "Forget a node or master that is gone for good."),
        },
    ),
    "master": (
        "Run masters, form and list them.",
        {
            "run": ("stele.cli.processes:master_run", "Run a master until SIGTERM."),
            "form": (
                "stele.cli.masters:form",
                "Form a new cluster: introduce its first masters to each other.",
            ),
            "list": ("stele.cli.masters:list_masters", "Show the masters and who leads."),
            "set-count": ("stele.cli.masters:set_count", "Set how many masters the cluster has: 1, 3 or 5."),
        },
    ),
    "cluster": (
        "Show and finalize the cluster version; set what holds for all tables.",
        {
            "version": ("stele.cli.versions:version", "Show the cluster version, and what each member runs."),
            "finalize": (
                "stele.cli.versions:finalize",
                "End an upgrade: allow formats that the release before cannot read.",
            ),
            "keep-dropped": (
                "stele.cli.dropping:keep_dropped",
                "Show or set for how long dropped tables can be recalled.",
            ),
        },
    ),
    "table": (
        "Create, alter, read and write tables.",
        {
            "list": ("stele.cli.tables:list_tables", "List tables and key spaces."),
            "describe": ("stele.cli.tables:describe", "Show columns, partitioning and tablets of a table."),
            "create": ("stele.cli.tables:create", "Create a table from a file or from options."),
            "alter": ("stele.cli.alter:alter", "Change the columns of a table while it is in use."),
            "rename": ("stele.cli.alter:rename", "Rename a table."),
            "drop": ("stele.cli.dropping:drop", "Drop a table; it can be recalled for a time."),
            "recall": ("stele.cli.dropping:recall", "Bring a dropped table back."),
            "delete": ("stele.cli.tables:delete", "Delete a table permanently."),
            "set-rf": ("stele.cli.replicas:set_rf", "Set how many replicas each tablet of a table has."),
            "scan": ("stele.cli.scan:scan", "Print rows of a table at one snapshot."),
            "holds": ("stele.cli.holds:holds", "List the holds on a table's history."),
            "hold": ("stele.cli.holds:hold", "Keep a table's history from a time on."),
            "release": ("stele.cli.holds:release", "End a hold on a table's history."),
            "verify": ("stele.cli.same:verify", "Compare all replicas of a table with each other."),
            "load": ("stele.cli.load:load", "Write CSV, Parquet or Arrow files into a table."),
        },
    ),
    "tablet": (
        "Look at tablets, place their replicas, and move their leaders.",
        {
            "list": ("stele.cli.tablets:list_tablets", "List tablets with leaders and health."),
            "describe": ("stele.cli.tablets:describe", "Show the replicas of one tablet."),
            "step-down": ("stele.cli.leaders:step_down", "Move the leader of a tablet to another node."),
            "move": ("stele.cli.placing:move", "Move a replica to another node."),
            "add-replica": ("stele.cli.placing:add_replica", "Add a replica beyond the table's factor."),
            "remove-replica": ("stele.cli.placing:remove_replica", "Remove a replica that was added."),
            "release": ("stele.cli.placing:release", "Cancel a placement by hand."),
            "promote": ("stele.cli.recover:promote", "Make a voter stand for election by force."),
            "recover": ("stele.cli.recover:recover", "Recover with one survivor after a lost majority."),
        },
    ),
    "kv": (
        "Use key spaces.",
        {
            "create": ("stele.cli.kv:create", "Create a key space."),
            "get": ("stele.cli.kv:get", "Print the value of a key."),
            "put": ("stele.cli.kv:put", "Set a key, whether it exists or not."),
            "insert": ("stele.cli.kv:insert", "Set a key that must not exist yet."),
            "write": ("stele.cli.kv:write", "Change several keys at once, under conditions."),
            "delete": ("stele.cli.kv:delete", "Remove a key."),
            "list": ("stele.cli.kv:list_keys", "Print keys and values."),
            "leases": ("stele.cli.kv_lease:leases", "List leases, and their keys."),
            "lease-grant": ("stele.cli.kv_lease:grant", "Take a lease: keys that end with their holder."),
            "lease-keep": ("stele.cli.kv_lease:keep", "Keep a lease alive until interrupted."),
            "lease-revoke": ("stele.cli.kv_lease:revoke", "End a lease, and remove its keys."),
            "watch": ("stele.cli.kv_watch:watch", "Print changes of keys as they are made."),
            "elect": ("stele.cli.kv_elect:elect", "Compete for a name, and print each new holder."),
        },
    ),
    "driver": (
        "Replace lost replicas.",
        {"run": ("stele.cli.driver:run", "Replace lost replicas until stopped, or until all are healthy.")},
    ),
    "backup": (
        "Back up tables, restore them, and check backups.",
        {
            "create": ("stele.cli.backup:create", "Back up tables at one moment."),
            "list": ("stele.cli.backup:list_all", "List the backups of a folder."),
            "verify": ("stele.cli.verify:verify", "Check a backup, by itself or against tables."),
            "restore": ("stele.cli.restore:restore", "Make tables from a backup."),
            "drill": ("stele.cli.drill:drill", "Practise a restore, and measure it."),
            "prune": ("stele.cli.backup:prune", "Remove old backups."),
            "remove": ("stele.cli.drill:remove", "Remove one backup."),
        },
    ),
    "local": (
        "Work on the volume of a stopped node.",
        {
            "take-back": (
                "stele.cli.local:take_back",
                "Use a volume again that was refused as an older copy.",
            ),
            "cmeta": ("stele.cli.cmeta:cmeta", "Recover the catalog, or a tablet, from one volume."),
        },
    ),
}
_OTHER_PROGRAMS = {
    ("stele local", verb): f"the one-machine Kubernetes is another program: `stele-local {verb}`"
    for verb in ("up", "down", "status", "off", "on", "wipe", "env", "exec", "operator")
} | {("stele", "operator"): "the operator is another program: `stele-operator run`"}
"""Commands of other programs that people look for here, by group and word, with the hint to print."""
_COMMANDS = {
    "ksck": ("stele.cli.ksck:ksck", "Check the health of the cluster."),
    "rebalance": ("stele.cli.rebalance:rebalance", "Spread replicas evenly over zones and nodes."),
    "plan": ("stele.cli.plan:plan", "Show what a loss or a changed manifest would do."),
}


class _BestEffortStream:
    """Standard error that drops what cannot be written, because the disk is full or the reader left.

    The exit code still shows what happened, and a node continues although nobody reads its log.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Lazy(click.Group):
    """A group whose commands are imported when they are called. It accepts the shared options for its
    commands."""

    def __init__(self, *args: Any, places: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.extend(early_options())
        self._places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *self._places]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = self._places.get(cmd_name)
        if place is None:
            return super().get_command(ctx, cmd_name)
        module, _, name = place[0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        refuse_unclear_options(ctx, args)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if other := _OTHER_PROGRAMS.get((ctx.command_path, args[0])):
            raise click.UsageError(other, ctx)
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not isinstance(command, click.Group):
            refuse_unused(ctx, str(name), command)
            refuse_unclear(ctx, str(name), command, rest)
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and flush its output. If the reader of the output has left, the command
        succeeds."""
        try:
            answer = super().invoke(ctx)
            sys.stdout.flush()
            return answer
        except BrokenPipeError:  # click would end with 1, which means "no" here
            _drop_output()
            ctx.exit(OK)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = [(name, (super(_Lazy, self).get_command(ctx, name))) for name in super().list_commands(ctx)]
        rows = [(name, command.get_short_help_str()) for name, command in own if command is not None]
        rows += [(name, text) for name, (_, text) in self._places.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(
    cls=_Lazy,
    places=_COMMANDS,
    help=f"""Stele: replicated tables of tablets, each a Raft group.

    Commands find the cluster through --masters HOST:PORT,... (before or after the command) or STELE_MASTERS.

    {exit_codes_help(EXIT_CODES)}
    """,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="stele")
def cli() -> None:
    """The command line."""


for _name, (_help, _places) in _GROUPS.items():
    cli.add_command(_Lazy(name=_name, help=_help, places=_places))


def run(
    arguments: Sequence[str] | None = None, *, command: click.Command = cli, program: str = "stele"
) -> None:
    """Run the command line, or another program's one command; every error is one line, or a line for each fault of a file.

    Always raises SystemExit with the exit code."""
    # gRPC's C core writes to standard error whenever a port speaks another protocol.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if sys.stdout is None:  # closed by the shell (>&-)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - to the end of the process
    stderr = open(os.devnull, "w") if sys.stderr is None else sys.stderr  # noqa: SIM115
    sys.stderr = cast(TextIO, _BestEffortStream(stderr))
    try:
        code = command.main(arguments, prog_name=program, standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except click.ClickException as exc:
        say(f"{program}: {_usage(exc)}", err=True)
        sys.exit(exc.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SteleError as exc:
        first, *more = error_lines(exc)
        for line in (f"{program}: {first}", *more):
            say(line, err=True)
        sys.exit(exit_code(exc))
    except OSError as exc:
        _drop_output()
        say(f"{program}: {f'{exc.filename}: ' if exc.filename else ''}{exc.strerror or exc}", err=True)
        sys.exit(exit_code_of_system(exc))
    except Exception:  # noqa: BLE001 - Python would end with 1, which means "no"
        traceback.print_exc()
        say(f"{program}: this is a bug in Stele; please report it with the lines above", err=True)
        sys.exit(BUG)
    sys.exit(code if isinstance(code, int) else 0)


def _drop_output() -> None:
    """Discard the unwritten output, so that the interpreter does not try to write it again as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(exc: click.ClickException) -> str:
    """What is wrong with the command line, in one line, and the command that prints help."""
    context = exc.ctx if isinstance(exc, click.UsageError) else None
    what = " ".join(exc.format_message().split()).removesuffix(".")
    return f"{what}; see `{context.command_path if context else 'stele'} --help`"
