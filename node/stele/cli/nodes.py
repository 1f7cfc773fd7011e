"""`stele node forget`."""

from __future__ import annotations

import sys

import click

from stele.cli.options import masters_option, with_client
from stele.cli.output import say


@click.command()
@click.argument("node", metavar="NAME|UUID")
@click.option("--yes", is_flag=True, help="Do not ask.")
@masters_option
def forget(node: str, yes: bool, masters: str) -> None:
    """Forget a node or master that is gone for good. It is no longer shown, and nothing waits for it.

    Refused while the node sends heartbeats, or while a tablet's configuration or a change under way names it.
    Then heal first, with `stele driver run` or the operator. The operator forgets its own nodes by itself.
    This cannot be undone: a node that returns under this UUID holds nothing.

    Example: stele node forget 6f1c0d7e
    """
    from stele.client import AsyncClient
    from stele.client.admin import forget_node

    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(
                f"standard input is no terminal, so nobody can confirm to forget {node}; add --yes"
            )
        click.confirm(f"Forget {node} for good?", abort=True)

    async def work(client: AsyncClient) -> str:
        return await forget_node(client.masters, node)

    say(f"forgot {with_client(masters, work)}")
