"""`stele kv elect`: compete for a name, and hold it as long as this command runs."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import TYPE_CHECKING

import click

from stele.cli.options import json_option, masters_option, with_client
from stele.cli.output import say, show_json
from stele.model.errors import Code, Rejected, SteleError

if TYPE_CHECKING:
    from stele.client import AsyncClient, AsyncKeySpace, AsyncLease


class _Candidate:
    """One candidate for a name. Prints each holder once."""

    def __init__(self, space: AsyncKeySpace, name: str, me: str, as_json: bool) -> None:
        self._space = space
        self._name = name
        self._me = me
        self._as_json = as_json
        self._told: str | None = None

    def tell(self, holder: str) -> None:
        """Print who holds the name, if that is new."""
        if holder == self._told:
            return
        self._told = holder
        mine = holder == self._me
        if self._as_json:
            show_json({"name": self._name, "holder": holder, "me": mine}, one_line=True)
        else:
            say(f"{holder} holds {self._name}{' (me)' if mine else ''}")

    async def once(self) -> None:
        """Take the name if nobody holds it, and keep it without a lease."""
        self.tell(await self._space.elect(self._name, self._me))

    async def compete(self, lease: AsyncLease | None) -> None:
        """Print each holder, until the lease is lost."""
        while True:
            try:
                holder = await self._space.elect(self._name, self._me, lease=lease)
            except Rejected as exc:
                if exc.code is not Code.LEASE_LOST:
                    raise
                return
            known: bytes | None = holder.encode()
            while known is not None:
                self.tell(known.decode("utf-8", "replace"))
                known = await self._next(known, lease)
                if lease is not None and not lease.alive:
                    return

    async def _next(self, known: bytes, lease: AsyncLease | None) -> bytes | None:
        """Wait until the holder differs from `known`, and return it, or until the lease is lost."""
        changed = asyncio.ensure_future(self._space.changed(self._name, known))
        ended = asyncio.ensure_future(asyncio.Event().wait() if lease is None else lease.lost())
        try:
            await asyncio.wait((changed, ended), return_when=asyncio.FIRST_COMPLETED)
            return changed.result() if changed.done() else known
        finally:
            changed.cancel()
            ended.cancel()
            await asyncio.gather(changed, ended, return_exceptions=True)

    def lost(self) -> None:
        """Print that this candidate no longer holds the name. Called before another candidate can take it."""
        if self._told == self._me:
            self._told = None
            if self._as_json:
                show_json({"name": self._name, "holder": None, "me": False}, one_line=True)
            else:
                say(f"{self._me} has lost its lease, and no longer holds {self._name}")


@click.command()
@click.argument("keyspace")
@click.argument("name")
@click.option("--id", "candidate", default="", help="The name of this candidate [default: a new UUID].")
@click.option(
    "--once", is_flag=True, help="Take the name for good if it is free, print who holds it, and end."
)
@click.option(
    "--ttl",
    "ttl_s",
    type=float,
    default=10.0,
    show_default=True,
    help="Seconds after which the name is free, if this command is gone. 0: never.",
)
@masters_option
@json_option
def elect(
    keyspace: str, name: str, candidate: str, once: bool, ttl_s: float, masters: str, as_json: bool
) -> None:
    """Compete for NAME: take it if nobody holds it, then print each new holder.

    The holder keeps the name as long as this command runs and reaches the cluster. With --once, or --ttl 0, it keeps it
    until somebody deletes the key (`stele kv delete KEYSPACE NAME`).

    Example: stele kv elect settings primary
    """

    async def work(client: AsyncClient) -> None:
        space = await client.keyspace(keyspace)
        mine = _Candidate(space, name, candidate or uuid.uuid4().hex, as_json)
        if once:
            await mine.once()
        while not once:
            lease = await space.lease(ttl_s) if ttl_s else None
            try:
                await mine.compete(lease)
            finally:
                if lease is not None:
                    with contextlib.suppress(SteleError):
                        await lease.revoke()
            mine.lost()

    with_client(masters, work)
