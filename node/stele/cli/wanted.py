"""`stele node drain`, `undrain`, `park`, `unpark`, `fence`, `unfence`, `retire`: set the wanted state of a
node.

The masters record it, and a driver carries it out: the operator, or `stele driver run`. Invariant: a waiting
command may be interrupted; the wanted state stays.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stele.cli.nodes import in_full, in_words, node_as_json
from stele.cli.options import json_option, masters_option, with_client
from stele.cli.output import confirm, say, show_json
from stele.model.amounts import duration

if TYPE_CHECKING:
    from stele.client import AsyncClient
    from stele.client.admin import Answer, NodeStatus

F = TypeVar("F", bound=Callable[..., Any])
POLL_S = 1.0
STILL_S = 30.0
"""After this long without progress, a waiting command says what may be missing."""
REASONS_MAX = 3
"""The most reasons that a waiting command shows."""
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400}


def seconds_of(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """The seconds in a time such as 90s, 30m, 2h or 1d."""
    if value is None:
        return None
    found = re.fullmatch(r"([0-9]{1,9})(s|m|min|h|d)", value.strip())
    if found is None or not int(found[1]):
        raise click.BadParameter(f"{value!r}: expected a time such as 90s, 30m, 2h or 1d", ctx, param)
    return float(int(found[1]) * _UNITS[found[2]])


def _node_argument(command: F) -> F:
    return click.argument("node", metavar="NAME|UUID")(command)


def _reason_option(command: F) -> F:
    return click.option("--reason", default="", help="The reason, shown to those who look at the node.")(
        command
    )


def _override_option(command: F) -> F:
    return click.option(
        "--override",
        is_flag=True,
        help="Also override what the driver asked for. It may ask again, as long as its TabletCluster says so.",
    )(command)


def _kept(command: F) -> F:
    """The arguments of commands that set a wanted state for a time: `park`, `fence`."""
    long = click.option(
        "--for",
        "for_s",
        metavar="TIME",
        callback=seconds_of,
        required=True,
        help="For how long: 90s, 30m, 2h, 1d.",
    )
    return _node_argument(long(_reason_option(_override_option(masters_option(json_option(command))))))


def _taken_back(command: F) -> F:
    """The arguments of commands that cancel a wanted state: `undrain`, `unpark`, `unfence`."""
    return _node_argument(_override_option(masters_option(json_option(command))))


def _ask(
    masters: str,
    as_json: bool,
    wish: Callable[..., Awaitable[Answer]],
    node: str,
    *,
    until: Callable[[AsyncClient, NodeStatus], Awaitable[NodeStatus]] | None = None,
    **how: object,
) -> None:
    """Send a request about a node by `stele.client.admin`, and print the answer.

    `until`: waits until the node is as requested, and returns its last status. None: do not wait.
    """

    async def work(client: AsyncClient) -> None:
        answer = await wish(client.masters, node, **how)
        _tell(answer, err=as_json)
        now = answer.node if until is None else await until(client, answer.node)
        if as_json:
            show_json({"changed": answer.changed, "notes": list(answer.notes), "node": node_as_json(now)})

    with_client(masters, work)


def _wait_option(command: F) -> F:
    return click.option("--wait", is_flag=True, help="Wait until it is done, and show the progress.")(command)


@click.command()
@_node_argument
@_reason_option
@click.option(
    "--for",
    "for_s",
    metavar="TIME",
    callback=seconds_of,
    help="After this time it returns to service by itself.",
)
@_wait_option
@_override_option
@masters_option
@json_option
def drain(
    node: str, reason: str, for_s: float | None, wait: bool, override: bool, masters: str, as_json: bool
) -> None:
    """Move all leaders and replicas off a node. The node stays, and gets nothing new until `undrain`.

    Refused if other machines cannot take its replicas; the message says which, and what would help. The
    command only asks for it: a driver does it (the operator, or `stele driver run`).

    Example: stele node drain flights-node-2 --reason "new disk" --wait
    """
    from stele.client.admin import drain_node

    until = partial(_until_empty, retired=False, err=as_json) if wait else None
    _ask(masters, as_json, drain_node, node, until=until, reason=reason, for_s=for_s, override=override)


@click.command()
@_node_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@_reason_option
@_wait_option
@_override_option
@masters_option
@json_option
def retire(
    node: str, yes: bool, reason: str, wait: bool, override: bool, masters: str, as_json: bool
) -> None:
    """Drain a node, then retire it for good. Until it is empty, `undrain` takes this back.

    A retired node never serves again under its id. An operator then deletes its pod, and makes a new node if
    nodes.replicas asks for one. Refused as `drain` is.

    Example: stele node retire flights-node-2 --wait
    """
    from stele.client.admin import retire_node
    from stele.client.checks import check_retire

    async def look(client: AsyncClient) -> NodeStatus:
        return await check_retire(client.masters, node)

    if not yes:
        found = with_client(masters, look)
        confirm(f"Retire {in_full(found)} for good, once it is empty?", f"retire {found.label}")
        node = found.node_id

    until = partial(_until_empty, retired=True, err=as_json) if wait else None
    _ask(masters, as_json, retire_node, node, until=until, reason=reason, override=override)


@click.command()
@_taken_back
def undrain(node: str, override: bool, masters: str, as_json: bool) -> None:
    """Cancel a drain, or a retirement that is not complete. Copies that were begun for it end.

    Example: stele node undrain flights-node-2
    """
    from stele.client.admin import undrain_node

    _ask(masters, as_json, undrain_node, node, override=override)


@click.command()
@_kept
def park(node: str, for_s: float, reason: str, override: bool, masters: str, as_json: bool) -> None:
    """Let a node be away for a while. Its replicas are not replaced or copied elsewhere.

    Leaders leave it, and it gets nothing new. Meanwhile its tablets can lose no other voter, if they have
    three. After the time, or `unpark`, it is treated like any node. Refused if tablets would stop without it.

    Example: stele node park flights-node-2 --for 2h --reason "new memory"
    """
    from stele.client.admin import park_node

    _ask(masters, as_json, park_node, node, for_s=for_s, reason=reason, override=override)


@click.command()
@_taken_back
def unpark(node: str, override: bool, masters: str, as_json: bool) -> None:
    """Return a parked node to service. If it is still away, its replicas are replaced like those of any
    silent node.

    Example: stele node unpark flights-node-2
    """
    from stele.client.admin import unpark_node

    _ask(masters, as_json, unpark_node, node, override=override)


@click.command()
@_kept
def fence(node: str, for_s: float, reason: str, override: bool, masters: str, as_json: bool) -> None:
    """Let a node run without serving anybody: no clients and no other nodes, even after a restart.

    Use it for a node that you do not trust, or want to inspect. Its leaders move away first. Its replicas are
    not replaced or copied elsewhere. Meanwhile its tablets can lose no other voter, if they have three. After
    the time, or `unfence`, it is treated like any node. Refused if tablets would stop without it.

    Example: stele node fence flights-node-2 --for 2h --reason "wrong checksums"
    """
    from stele.client.admin import fence_node

    _ask(masters, as_json, fence_node, node, for_s=for_s, reason=reason, override=override)


@click.command()
@_taken_back
def unfence(node: str, override: bool, masters: str, as_json: bool) -> None:
    """Return a fenced node to service: within seconds it serves like any node.

    Example: stele node unfence flights-node-2
    """
    from stele.client.admin import unfence_node

    _ask(masters, as_json, unfence_node, node, override=override)


def _tell(answer: Answer, *, err: bool) -> None:
    """Print the wanted state, and what it means."""
    n = answer.node
    until = f" for {duration(n.wanted_left_s)}" if n.wanted_left_s is not None else ""
    already = "" if answer.changed else ", as it was before"
    say(f"{n.label} is {in_words(n)}{until}{already}{_holds(n)}", err=err)
    for note in answer.notes:
        say(f"while it is away: {note}", err=err)


def _holds(n: NodeStatus) -> str:
    if in_words(n) not in ("draining", "retiring"):
        return ""
    return f": {_left(n)}"


def _left(n: NodeStatus) -> str:
    copies = f", {n.copies} copies to it" if n.copies else ""
    return f"{_many(n.leaders, 'leader')} and {_many(n.replicas, 'replica')} left{copies}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


async def _tell_why(client: AsyncClient, node: NodeStatus, *, err: bool) -> None:
    """Print why nothing moves, as far as the masters' view shows this."""
    from stele.client.admin import what_drain_waits_for

    reasons = await what_drain_waits_for(client.masters, node.node_id)
    for reason in reasons[:REASONS_MAX]:
        say(f"{node.label} waits: {reason}", err=err)
    if len(reasons) > REASONS_MAX:
        more = len(reasons) - REASONS_MAX
        say(f"{node.label} waits for {more} more reasons; `stele ksck` has the tablets", err=err)
    if not reasons:
        say(
            f"{node.label}: nothing moved for {STILL_S:.0f} s; is a driver at work? (the operator, `stele "
            f"driver run`)",
            err=err,
        )


async def _until_empty(client: AsyncClient, node: NodeStatus, *, retired: bool, err: bool) -> NodeStatus:
    """Print how much is left whenever it changes. Ends when no configuration and no change under way names the
    node. Returns the node as it is then. Raises Rejected if its drain was cancelled."""
    from stele.client.admin import node_status_of
    from stele.model.errors import Rejected, Retryable

    told, moved_s, hinted = _left(node), time.monotonic(), False
    while True:
        if node.wanted.name not in ("DRAINED", "RETIRED"):
            raise Rejected(f"{node.label} is {in_words(node)} again; somebody cancelled the drain")
        if node.empty and (not retired or node.seen == "retired"):
            say(f"{node.label} is {in_words(node)}: it has no replicas left", err=err)
            return node
        if _left(node) != told:
            told, moved_s, hinted = _left(node), time.monotonic(), False
            say(f"{node.label}: {told}", err=err)
        if not hinted and time.monotonic() - moved_s >= STILL_S:
            hinted = True
            with suppress(Retryable):
                await _tell_why(client, node, err=err)
        await asyncio.sleep(POLL_S)
        with suppress(Retryable):  # masters elect a leader; the wanted state stays meanwhile
            node = await node_status_of(client.masters, node.node_id)
