"""`stele.connect` and `stele.connect_async`: where a program begins."""

from __future__ import annotations

from collections.abc import Iterable

from stele.client.async_client import TIMEOUT_S, AsyncClient
from stele.client.blocking import Client
from stele.rpc.first_contact import FIRST_CONTACT_S


def connect(
    masters: str | Iterable[str],
    *,
    timeout_s: float = TIMEOUT_S,
    first_contact_s: float = FIRST_CONTACT_S,
    zone: str = "",
) -> Client:
    """A client of a cluster. Several threads may share it. Use it in a `with`, or call `close`.

    No message is sent before the first call that needs one.

    Args:
        masters: Addresses of some masters, "HOST:PORT,HOST:PORT" or a list of HOST:PORT. One that answers
            is enough.
        timeout_s: How many seconds a write or read may take, unless the call says otherwise.
        first_contact_s: How many seconds to look for a master before any has ever answered. If no name
            resolves, a fifth of it.
        zone: The zone where this program runs, named as nodes name theirs. Scans read replicas there first.

    Raises:
        Rejected: An address is not HOST:PORT, or a number is not a time.

    Example:
        >>> with stele.connect(masters) as other:
        ...     "readings" in [info.name for info in other.list_tables()]
        True
    """
    return Client(masters, timeout_s=timeout_s, first_contact_s=first_contact_s, zone=zone)


def connect_async(
    masters: str | Iterable[str],
    *,
    timeout_s: float = TIMEOUT_S,
    first_contact_s: float = FIRST_CONTACT_S,
    zone: str = "",
) -> AsyncClient:
    """The client for a program with an event loop. Call it within the loop, in an `async with`. Arguments as
    for `connect`.

    Raises:
        Rejected: An address is not HOST:PORT, or a number is not a time.

    Example:
        >>> import asyncio
        >>> async def main():
        ...     async with stele.connect_async(masters) as client:
        ...         table = await client.open_table("readings")
        ...         return table.name
        >>> asyncio.run(main())
        'readings'
    """
    return AsyncClient(masters, timeout_s=timeout_s, first_contact_s=first_contact_s, zone=zone)
