"""Options that several commands share, and how a command gets at the cluster. Imports the client when it is used."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from stele.client import AsyncClient

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def masters_option(command: F) -> F:
    """--masters, or STELE_MASTERS."""
    return click.option(
        "--masters",
        envvar="STELE_MASTERS",
        default="127.0.0.1:7051",
        show_default=True,
        metavar="HOST:PORT,...",
        help="Some of the masters (environment: STELE_MASTERS).",
    )(command)


def timeout_option(command: F) -> F:
    """--timeout in seconds."""
    return click.option(
        "--timeout", "timeout_s", default=30.0, show_default=True, help="Give up after so many seconds."
    )(command)


def json_option(command: F) -> F:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def with_client(masters: str, work: Callable[[AsyncClient], Awaitable[T]], timeout_s: float = 30.0) -> T:
    """Run `work` with a client of the cluster, on an event loop that ends with it.

    A --timeout that was given is also the patience until a first master answers.
    """
    from stele.client import AsyncClient
    from stele.rpc.contact import FIRST_CONTACT_S

    context = click.get_current_context()
    given = context.get_parameter_source("timeout_s") not in (None, ParameterSource.DEFAULT)
    first_contact_s = float(context.params["timeout_s"]) if given else FIRST_CONTACT_S

    async def main() -> T:
        async with AsyncClient(masters, timeout_s=timeout_s, first_contact_s=first_contact_s) as client:
            return await work(client)

    return asyncio.run(main())
