"""`stele table set-rf`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from stele.cli.options import json_option, masters_option, with_client
from stele.cli.output import say, show_json

if TYPE_CHECKING:
    from stele.client import AsyncClient
    from stele.client.health import ClusterHealth
    from stele.rpc.proto import master_pb2

WAIT_S = 600.0
_LOOK_S = 0.5
_VIEW_TIMEOUT_S = 10.0


def wait_option(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options --wait and --wait-for to a command."""
    command = click.option(
        "--wait-for",
        "wait_s",
        type=click.FloatRange(min=1, max=86_400),
        default=WAIT_S,
        show_default=True,
        help="With --wait: give up after this many seconds; the change continues.",
    )(command)
    return click.option("--wait", is_flag=True, help="Wait until it is done, and show the progress.")(command)


@click.command()
@click.argument("table")
@click.argument("factor", type=click.Choice(["1", "3", "5", "7"]))
@wait_option
@masters_option
@json_option
def set_rf(table: str, factor: str, wait: bool, wait_s: float, masters: str, as_json: bool) -> None:
    """Set how many replicas each tablet of a table or key space has: 1, 3, 5 or 7.

    A driver adds or removes the replicas one at a time; the table is read and written meanwhile. Refused if there
    are too few machines. Where a TabletGroup describes the table, change its replicationFactor instead, because the
    operator sets that again. With one replica, a lost node or disk loses rows for good.

    Example: stele table set-rf flights 5 --wait
    """
    from stele.client.health import examine

    async def work(client: AsyncClient) -> None:
        before = await client.describe(table)
        info = await client.set_replication_factor(table, int(factor))
        if before.replication_factor == info.replication_factor:
            say(f"{table} has replication factor {factor} already", err=as_json)
        else:
            was = before.replication_factor
            say(f"{table}: replication factor {was} becomes {factor}", err=as_json)

            if factor == "1":
                say(
                    f"warning: once {table} has one replica, a lost node or disk loses its rows for good",
                    err=True,
                )

        def far(view: master_pb2.GetClusterViewResponse) -> tuple[bool, str]:
            health: ClusterHealth = examine(view)
            counts = health.replicas_of(info.table_id)
            return counts.done, str(counts)

        so_far = await follow(client, far, wait_s if wait else 0.0, err=as_json)
        if as_json:
            change = {"before": before.replication_factor, "replicationFactor": info.replication_factor}
            show_json({"table": table, **change, **so_far.as_json()})

    with_client(masters, work)


class Far(NamedTuple):
    """How far a change is: whether it is done, and the progress in words."""

    done: bool
    text: str

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {"done": self.done, "progress": self.text}


async def follow(
    client: AsyncClient,
    far: Callable[[master_pb2.GetClusterViewResponse], tuple[bool, str]],
    wait_s: float,
    *,
    err: bool = False,
) -> Far:
    """Show how far a change is, until it is done. `far(view)` returns (whether it is done, the progress in words).

    With `wait_s` 0, show it once. `err`: show it on standard error. Returns what was shown last.

    Raises:
        Retryable: TIMED_OUT, `wait_s` is not 0, and the change is not done after that many seconds.
    """
    from stele.driver.keeping import WholeView, pages_of
    from stele.model.errors import Code, Retryable

    deadline, told, warned = time.monotonic() + wait_s, "", False
    whole = WholeView(pages_of(client.masters, timeout_s=_VIEW_TIMEOUT_S))
    while True:
        view = await whole.look()
        done, text = far(view)
        if text != told:
            told = text
            say(text, err=err)
        if done:
            return Far(done, text)
        if not warned and not driver_of(view):
            warned = True
            say(
                "no driver is at work now; an operator checks at least every 30 s; without an operator, "
                "start `stele driver run`",
                err=True,
            )
        if time.monotonic() >= deadline:
            if not wait_s:
                return Far(done, text)
            raise Retryable(
                f"not done after {wait_s:.0f} s: {text}; the change continues", code=Code.TIMED_OUT
            )
        await asyncio.sleep(_LOOK_S)


def driver_of(view: master_pb2.GetClusterViewResponse) -> str:
    """Who holds the driver claim now; "" if nobody does."""
    claim = view.claim
    return claim.holder if claim.expires_us > view.now_us else ""
