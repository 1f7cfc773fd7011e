"""The first contact with a cluster: does any master answer at the given addresses? Used by masters.py until a
client has met one.

Asks all at once, so that a silent master costs nothing if another answers. If no name resolves, it gives up
after a fifth of the given time, since a mistyped name stays wrong. The name of a Kubernetes service appears
within moments of its start. A caller that expects more delay gives more time. Invariant: a caller that met no
master gets an error within the given time, with what each address answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from stele.model.errors import Advice, Closed, Code, Retryable, SteleError
from stele.rpc.channels import ChannelPool
from stele.rpc.errors import was_answered
from stele.rpc.proto import master_pb2
from stele.rpc.proto.master_pb2_grpc import MasterServiceStub
from stele.rpc.resolve import resolve

FIRST_CONTACT_S = 5.0
"""Patience of a client that has met no master yet. Wrong addresses are then far likelier than an outage."""
_AGAIN_S = 0.25
UNRESOLVED_SHARE = 0.2
"""The part of the patience to spend if no name resolves: 1 s of the usual 5."""
_SILENT = "no answer"
_UNRESOLVED = "name does not resolve"


async def first_contact(pool: ChannelPool, given: Sequence[str], patience_s: float) -> str:
    """Return the address (IP:PORT) of the master that answered first.

    Raises:
        Retryable: UNAVAILABLE: none answered within `patience_s`, or no name resolved within a fifth of it.
            The message has a reason for each address.
        Closed: the pool was closed.
    """
    said = dict.fromkeys(given, _SILENT)
    found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ask(name: str, address: str) -> None:
        try:
            await pool.unary(
                address,
                MasterServiceStub,
                "ListMasters",
                master_pb2.ListMastersRequest(),
                timeout_s=patience_s,
            )
        except Closed as error:
            if not found.done():
                found.set_exception(error)
            return
        except SteleError as error:
            if not was_answered(error) or error.code is Code.UNSUPPORTED_VERSION:
                said[name] = str(error.args[0]).removeprefix(f"{address}: ")
                return
        if not found.done():
            found.set_result(address)

    loop = asyncio.get_running_loop()
    began = loop.time()

    def end_early() -> None:
        nowhere = all(why == _UNRESOLVED for why in said.values())
        if nowhere and loop.time() - began >= UNRESOLVED_SHARE * patience_s and not found.done():
            found.set_exception(_nobody(said))

    async def knock(name: str) -> None:
        while True:
            try:
                addresses = await resolve(name)
            except Retryable:
                said[name] = _UNRESOLVED
                end_early()
            else:
                if said[name] == _UNRESOLVED:
                    said[name] = _SILENT
                await asyncio.gather(*(ask(name, address) for address in addresses))
            await asyncio.sleep(_AGAIN_S)

    tasks = [asyncio.create_task(knock(name)) for name in given]
    try:
        async with asyncio.timeout(patience_s):
            return await found
    except TimeoutError:
        raise _nobody(said) from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _nobody(said: Mapping[str, str]) -> Retryable:
    reasons = ", ".join(f"{name} ({why})" for name, why in said.items())
    return Retryable(f"no master answers at {reasons}", code=Code.UNAVAILABLE, advice=Advice.CHECK_MASTERS)
