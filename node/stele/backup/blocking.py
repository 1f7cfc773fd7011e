"""Backups for programs without an event loop, and for notebooks, which have one. Each call runs the asynchronous one and waits.

Invariant: a call has the arguments of the asynchronous one, and raises what that raises. A call that needs a cluster takes a
`stele.Client` in place of the `AsyncClient`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from stele.backup.creating import create_async
from stele.backup.drilling import drill_async
from stele.backup.finding import Backup, find_backups
from stele.backup.folder import Folder, Location
from stele.backup.pruning import prune_async
from stele.backup.removing import remove_async
from stele.backup.restoring import restore_async
from stele.backup.verifying import compare_async, verify_async
from stele.client.async_client import AsyncClient
from stele.client.blocking import Client

P = ParamSpec("P")
T = TypeVar("T")
Blocking = TypeVar("Blocking", bound=Callable[..., Any])


def _with_client(
    call: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Make the blocking form of a call that needs a client: its coroutine runs in the client's loop."""

    def blocking(client: Client, *args: P.args, **kwargs: P.kwargs) -> T:
        return client.run(call(client.asynchronous, *args, **kwargs))

    return _told_as(call, blocking)  # type: ignore[return-value]  # `client` may be named, too


def _alone(call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make the blocking form of a call without a client. It runs in a loop of its own; if the calling thread
    already runs a loop, in another thread."""

    def blocking(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(call(*args, **kwargs))
        with ThreadPoolExecutor(1, "stele-backup") as thread:
            return thread.submit(lambda: asyncio.run(call(*args, **kwargs))).result()

    return _told_as(call, blocking)


def _told_as(call: Callable[..., Any], blocking: Blocking) -> Blocking:
    """Give `blocking` the name, the documentation and the signature of `call`, which help() shows."""
    blocking.__name__ = blocking.__qualname__ = call.__name__.removesuffix("_async")
    blocking.__doc__ = call.__doc__
    its = inspect.signature(call, eval_str=True)
    taken = [p.replace(annotation=Client) if p.name == "client" else p for p in its.parameters.values()]
    blocking.__signature__ = its.replace(parameters=taken)  # type: ignore[attr-defined]
    return blocking


create = _with_client(create_async)
compare = _with_client(compare_async)
restore = _with_client(restore_async)
drill = _with_client(drill_async)
verify = _alone(verify_async)
prune = _alone(prune_async)
remove = _alone(remove_async)


def list_backups(folder: Location) -> list[Backup]:
    """All backups of a folder, the newest first. Raises Rejected NOT_FOUND if there is no such folder."""
    return find_backups(Folder.at(folder))
