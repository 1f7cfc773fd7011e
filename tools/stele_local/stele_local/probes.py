"""Runs probes (httpGet and tcpSocket) of a running container, as a stream of verdicts. Opens sockets, changes
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

Json = dict[str, Any]
_HEAD_BYTES_MAX = 256


def port_number(value: int | str, container: Json) -> int:
    """A probe's port: a number, or the name of one of the container's ports.

    Raises:
        ValueError: the container declares no port of this name.
    """
    if isinstance(value, int) or value.isdigit():
        return int(value)
    for port in container.get("ports") or ():
        if port.get("name") == value:
            return int(port["containerPort"])
    raise ValueError(
        f"probe names port {value!r}, which the container {container['name']!r} does not declare"
    )


async def check_once(probe: Json, container: Json, address: str) -> str:
    """Run the probe once. Returns why it failed; "" if it succeeded."""
    target = probe.get("httpGet") or probe["tcpSocket"]
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(probe.get("timeoutSeconds", 1)):
            port = port_number(target["port"], container)
            reader, writer = await asyncio.open_connection(target.get("host") or address, port)
            if "httpGet" not in probe:
                return ""
            request = f"GET {target['path']} HTTP/1.1\r\nHost: {address}:{port}\r\nConnection: close\r\n\r\n"
            writer.write(request.encode())
            head = await reader.readline()
        code = int(head[:_HEAD_BYTES_MAX].split()[1])
        return "" if 200 <= code < 400 else f"HTTP probe failed with statuscode: {code}"
    except TimeoutError:
        return "context deadline exceeded"
    except (OSError, ValueError, IndexError) as error:
        return str(error) or type(error).__name__
    finally:
        if writer is not None:
            writer.close()


async def verdicts(probe: Json, container: Json, address: str) -> AsyncIterator[tuple[bool, str]]:
    """Probe for ever, and yield (success, last failure) each time that a threshold is reached. Whenever the
    result changes, the count starts again.
    """
    await asyncio.sleep(probe.get("initialDelaySeconds", 0))
    good = bad = 0
    while True:
        failure = await check_once(probe, container, address)
        good, bad = (0, bad + 1) if failure else (good + 1, 0)
        if good >= probe["successThreshold"]:
            yield True, ""
        elif bad >= probe["failureThreshold"]:
            yield False, failure
        await asyncio.sleep(probe["periodSeconds"])
