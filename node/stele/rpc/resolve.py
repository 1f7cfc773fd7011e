"""Resolves host names. Called by channels.py and peers.py before they dial. Caches nothing.

gRPC's own resolver caches, and learns a new address only some time after its channel failed. A pod's address
changes with every restart. So names are resolved here, in a thread, at each dial.
"""

from __future__ import annotations

import ipaddress
import socket

from stele.model import bounds
from stele.model.errors import Code, Rejected, Retryable
from stele.rpc.threads import in_thread


def split_address(address: str, *, default_port: int | None = None) -> tuple[str, int]:
    """(host, port) of `host:port`, `[v6]:port`, or of `host` if there is a default port.

    Raises:
        Rejected: INVALID_ARGUMENT for anything else.
    """
    if "/" in address:
        raise Rejected(f"address {address!r}: expected HOST:PORT, like 10.0.0.1:7051, without http://")
    host, separator, port = address.strip().rpartition(":")
    if (not separator or host.count(":")) and not host.startswith("["):
        host, port = address.strip(), ""
    host = host.removeprefix("[").removesuffix("]")
    if not port and default_port is not None and host:
        return host, default_port
    number = bounds.digits(port)
    if not host or number is None or number > 65_535:
        raise Rejected(f"address {address!r}: expected HOST:PORT, like 10.0.0.1:7051")
    return host, number


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def resolve(address: str, *, default_port: int | None = None) -> list[str]:
    """All `ip:port` that `address` resolves to, in the resolver's order. An IP address is not looked up.

    Raises:
        Rejected: `address` is not HOST:PORT.
        Retryable: UNAVAILABLE: the name does not resolve now.
    """
    host, port = split_address(address, default_port=default_port)
    try:
        ipaddress.ip_address(host)
        return [join_address(host, port)]
    except ValueError:
        pass
    try:
        found = await in_thread(socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise Retryable(f"{host} does not resolve: {exc}; check the name", code=Code.UNAVAILABLE) from exc
    return list(dict.fromkeys(join_address(str(entry[4][0]), port) for entry in found))


async def resolve_one(address: str) -> str:
    """The first address of `resolve`."""
    return (await resolve(address))[0]
