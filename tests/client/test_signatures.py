"""A blocking call takes what the asynchronous call of the same name takes, with the same defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import stele
from stele import backup

Call = Callable[..., Any]


def pairs() -> Iterator[tuple[str, Call, Call]]:
    """Each blocking call beside the asynchronous one."""
    for name in ("create", "compare", "restore", "drill", "verify", "prune", "remove"):
        yield f"backup.{name}", getattr(backup, name), getattr(backup, f"{name}_async")
    for kind in ("Client", "Table", "Session", "Scanner", "KeySpace", "Watch", "Lease"):
        blocking, asynchronous = getattr(stele, kind), getattr(stele, f"Async{kind}")
        for name in vars(blocking):
            call = getattr(blocking, name)
            if inspect.isfunction(call) and hasattr(asynchronous, name) and not name.startswith("_"):
                yield f"{kind}.{name}", call, getattr(asynchronous, name)


def arguments(call: Call) -> list[tuple[str, Any, Any, Any]]:
    """Name, kind, default and type of each argument. Clients and leases are of either kind."""
    found = inspect.signature(call, eval_str=True).parameters.values()
    return [
        (p.name, p.kind, p.default, p.annotation if p.name not in ("client", "self", "lease") else "")
        for p in found
    ]


@pytest.mark.parametrize(("blocking", "asynchronous"), [pytest.param(b, a, id=n) for n, b, a in pairs()])
def test_blocking_and_asynchronous_calls_take_the_same(blocking: Call, asynchronous: Call) -> None:
    assert arguments(blocking) == arguments(asynchronous)
