"""`stele node run`, `stele master run`: turns the command line into NodeOptions, then runs the process.

Every option can also be set in the environment as STELE_ plus its name: STELE_DATA_DIR, STELE_NODE_ID, ...
Exit codes: PROCESS_EXIT_CODES of errors.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stele.cli.errors import PROCESS_EXIT_CODES, exit_codes_help

if TYPE_CHECKING:
    from stele.tserver.options import FirstMaster, NodeOptions

F = TypeVar("F", bound=Callable[..., Any])


def _option(name: str, **kwargs: Any) -> Callable[[F], F]:
    """An option with its environment variable."""
    variable = "STELE_" + name.removeprefix("--").replace("-", "_").upper()
    return click.option(name, envvar=variable, show_envvar=True, **kwargs)


def _process_options(port: int, masters_default: str = "") -> Callable[[F], F]:
    """The options that nodes and masters share. `port`: the default port; `masters_default`: the default in the help of
    --masters."""
    options = (
        _option(
            "--data-dir",
            required=True,
            type=click.Path(path_type=Path),
            help="Directory of the log and the tablets; its parent must exist.",
        ),
        _option("--node-id", required=True, metavar="HEX32", help="UUID of the node; stays with its volume."),
        _option("--cluster-id", required=True, metavar="HEX32", help="UUID of the cluster."),
        _option(
            "--fork-id",
            default="",
            metavar="HEX32",
            help="Which copy of the cluster's volumes this is. Give all processes of a new copy one new id [default: as before].",
        ),
        _option(
            "--listen",
            default=f"0.0.0.0:{port}",
            show_default=True,
            metavar="HOST:PORT",
            help="Where gRPC listens; the other ports are on the same host.",
        ),
        _option(
            "--advertise",
            default="",
            metavar="HOST:PORT",
            help="The address that others use [default: --listen].",
        ),
        _option(
            "--masters",
            default="",
            metavar="HOST:PORT,...",
            help=f"All masters. The process sends heartbeats to each; names are resolved again for each connection{masters_default}.",
        ),
        _option(
            "--machine", default="", help="The machine this runs on. A machine holds one replica of a tablet."
        ),
        _option("--zone", default="", help="The zone of the machine."),
        _option(
            "--http-port", default=7080, show_default=True, help="Port for probes, metrics and identity."
        ),
        _option("--flight-port", default=7052, show_default=True, help="Port for Arrow Flight."),
        _option(
            "--stream-port",
            default=7053,
            show_default=True,
            help="Port for TCP streams of nodes and clients.",
        ),
        _option(
            "--wal-sync",
            type=click.Choice(("always", "interval", "never")),
            default="always",
            show_default=True,
            help="When the log is synced. Other values than always may lose acknowledged writes in a power loss.",
        ),
        _option(
            "--wal-segment-mib",
            type=click.IntRange(4, 1024),
            default=64,
            show_default=True,
            help="Length of a segment of the log. The next one is written with zeros and synced before it is needed. "
            "A change holds for new segments.",
        ),
        _option(
            "--wal-spare-segments",
            type=click.IntRange(0, 64),
            default=4,
            show_default=True,
            help="How many segments are kept for reuse once nobody needs what they hold. They take at most a sixteenth "
            "of the volume.",
        ),
        _option(
            "--leader-lease-ms",
            type=click.IntRange(0, 5_000),
            default=0,
            show_default=True,
            help="Length of a leader's lease: while it lasts, a leader answers reads without asking other nodes. A lost leader "
            "is replaced only after its lease. 0: no leases; else 150 or more, the same on all nodes.",
        ),
        _option(
            "--memory-mib",
            type=click.IntRange(min=64),
            default=None,
            help="Memory for requests in progress [default: from the memory limit of this process, 256 at most].",
        ),
        _option(
            "--log-level",
            type=click.Choice(("debug", "info", "warning", "error")),
            default="info",
            show_default=True,
            help="What to log.",
        ),
        _option(
            "--log-format",
            type=click.Choice(("auto", "json", "text")),
            default="auto",
            show_default=True,
            help="auto: text on a terminal, else JSON. Text has colours on a terminal unless NO_COLOR is set.",
        ),
    )

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.command(epilog=exit_codes_help(PROCESS_EXIT_CODES))
@_process_options(7050)
def node_run(**values: Any) -> None:
    """Run a node until SIGTERM. Then it hands over its leaders, and ends.

    \b
    Example:
      stele node run --data-dir /var/lib/stele/data --node-id $(cat id) --cluster-id $CLUSTER \\
        --listen 10.0.0.7:7050 --masters 10.0.0.1:7051,10.0.0.2:7051,10.0.0.3:7051
    """
    _prepare(values)
    from stele.tserver.process import end_process, run_process

    end_process(run_process(node_options(values, "node")))


@click.command(epilog=exit_codes_help(PROCESS_EXIT_CODES))
@_process_options(7051, " [default: those of --first-masters]")
@_option(
    "--first-masters",
    default="",
    metavar="HEX32=HOST:PORT,...",
    help="Format an empty volume as one of these first masters, once all others say that the cluster is not formed.",
)
@_option(
    "--join", is_flag=True, help="Format an empty volume as a master that waits for a copy of the catalog."
)
@_option(
    "--drive-after",
    type=click.FloatRange(min=0, max=86_400),
    default=120.0,
    show_default=True,
    help="Seconds without a driver after which the leading master heals the cluster itself; 0: never. "
    "A policy in the catalog takes precedence.",
)
def master_run(first_masters: str, join: bool, drive_after: float, **values: Any) -> None:
    """Run a master until SIGTERM.

    First masters do not vote or serve until `stele master form` has introduced them to each other.

    \b
    Example:
      stele master run --data-dir /var/lib/stele/data --node-id $A --cluster-id $CLUSTER \\
        --listen 10.0.0.1:7051 --first-masters $A=10.0.0.1:7051,$B=10.0.0.2:7051,$C=10.0.0.3:7051
    """
    _prepare(values)
    from stele.master.server import run
    from stele.tserver.process import end_process

    options = node_options(values, "master", first_masters=parse_first_masters(first_masters), join=join)
    end_process(run(options, drive_after_ms=int(drive_after * 1000)))


def _prepare(values: dict[str, Any]) -> None:
    """Set up the environment, imports and logging before heavy imports. gRPC's fork support, which costs a
    check per fork and wakes threads, is switched off."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from stele.model.no_pandas import keep_pandas_out
    from stele.rpc.logging import setup

    keep_pandas_out()
    form = values.pop("log_format")
    setup(
        json_lines={"auto": None, "json": True, "text": False}[form],
        level=values.pop("log_level"),
        node_id=values["node_id"],
    )


def node_options(
    values: dict[str, Any], role: str, first_masters: tuple[FirstMaster, ...] = (), **more: Any
) -> NodeOptions:
    """NodeOptions from the command's values. Without --masters, heartbeats go to the first masters."""
    from stele.model.ids import ClusterId, NodeId
    from stele.rpc.masters import parse_masters
    from stele.tserver.memory import MemoryShares, memory_limit
    from stele.tserver.options import NodeOptions

    masters, budget_mib = values.pop("masters"), values.pop("memory_mib")
    first = tuple(m.address for m in first_masters)
    return NodeOptions(
        data_dir=values.pop("data_dir"),
        node_id=NodeId(values.pop("node_id")),
        cluster_id=ClusterId(values.pop("cluster_id")),
        masters=tuple(parse_masters(masters)) if masters else first,
        memory=MemoryShares.of(memory_limit(), None if budget_mib is None else budget_mib << 20),
        role=role,
        first_masters=first_masters,
        **values,
        **more,
    )


def parse_first_masters(text: str) -> tuple[FirstMaster, ...]:
    """The value of --first-masters.

    Raises:
        Rejected: a part is not HEX32=HOST:PORT.
    """
    from stele.model.errors import Rejected
    from stele.model.ids import NodeId, is_id
    from stele.rpc.resolve import split_address
    from stele.tserver.options import FirstMaster

    found = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        node_id, separator, address = part.partition("=")
        if not separator or not is_id(node_id):
            raise Rejected(f"--first-masters {part!r}: expected HEX32=HOST:PORT")
        split_address(address)
        found.append(FirstMaster(NodeId(node_id), address))
    return tuple(found)
