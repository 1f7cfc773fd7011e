"""Calls to the leading master. Used by clients, drivers and the operator. Keeps the list of masters and who
may lead.

An address may be a name with several addresses. Invariant: a call is retried in two cases only. The answer
says that it was not done, or the caller says that it may be done twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from stele.model.errors import Advice, Code, NotLeader, Rejected, Retryable, SteleError
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_from_pb
from stele.rpc.first_contact import FIRST_CONTACT_S, first_contact
from stele.rpc.proto import master_pb2, tserver_pb2
from stele.rpc.proto.master_pb2_grpc import MasterServiceStub
from stele.rpc.proto.tserver_pb2_grpc import TabletServerServiceStub
from stele.rpc.resolve import resolve, split_address

DEFAULT_PORT = 7051
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.05, 1.0
_ATTEMPT_TIMEOUT_S = 3.0

_NOT_DONE = frozenset(
    (Code.NOT_LEADER, Code.UNAVAILABLE, Code.NOT_READY, Code.NO_QUORUM, Code.STEPPING_DOWN, Code.THROTTLED)
)
_MAYBE_DONE = frozenset((Code.TIMED_OUT, Code.UNKNOWN_OUTCOME))
_LEADS_NOT = "does not lead"
_SAYS_LITTLE = (Code.UNAVAILABLE, Code.TIMED_OUT, Code.NOT_LEADER)
"""Of several masters' errors the most specific one is raised; later ones in this tuple are more specific."""


LIST_AGAIN_S = 5.0
"""The least time between two requests for the list of masters, to a master or to nodes."""
NODES_ASKED = 3
"""The number of nodes that are asked at once who the masters are. Some may be gone too."""


def parse_masters(masters: str | Iterable[str]) -> list[str]:
    """Addresses from "A,B,C" or from a list. The default port is 7051.

    Raises:
        Rejected: there is no address, or one is not HOST or HOST:PORT.
    """
    given = masters.split(",") if isinstance(masters, str) else masters
    listed = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(text, str) for text in listed):
        raise Rejected(f"masters {masters!r}: expected text like 'HOST:PORT,HOST:PORT', or a list of such")
    found = []
    for text in listed:
        if text.strip():
            host, port = split_address(text, default_port=DEFAULT_PORT)
            found.append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    if not found:
        raise Rejected("no masters are given", advice=Advice.NAME_MASTERS)
    return found


class Masters:
    """The masters of a cluster. One per client. `timeout_s` and `rounds` are the defaults for calls.

    `first_contact_s`: how long to look for a master before any has ever answered; None if the masters'
    addresses are certain. `nodes`: addresses of nodes, which are asked who the masters are if no master
    answers.
    """

    def __init__(
        self,
        pool: ChannelPool,
        addresses: Iterable[str],
        rng: random.Random | None = None,
        *,
        first_contact_s: float | None = FIRST_CONTACT_S,
        timeout_s: float = 15.0,
        rounds: int | None = None,
        nodes: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._pool = pool
        self._nodes = nodes
        self._given = list(addresses)
        self._timeout_s = timeout_s
        self._rounds = rounds
        self._first_contact_s = first_contact_s or 0.0
        self._meeting = asyncio.Lock()
        self.met = first_contact_s is None
        """Whether a master has ever answered."""
        self._unmet = (0.0, "")  # (time, reason) of the last failed first contact
        self._known: list[str] = []  # the likely leader first
        self._list_again = 0.0
        self._ask_again = 0.0
        self._by_node: dict[str, str] = {}
        self._rng = rng or random.Random()

    def learn(self, addresses: Iterable[str]) -> None:
        """Replace the list of addresses. Those given at the start stay. An empty list changes nothing."""
        newest = dict.fromkeys(a for a in addresses if a)
        if newest:
            self._known = list(dict.fromkeys([*(a for a in self._known if a in newest), *newest]))
            self._by_node = {n: a for n, a in self._by_node.items() if a in newest}

    async def call(
        self,
        method: str,
        request: Any,
        *,
        timeout_s: float | None = None,
        rounds: int | None = None,
        idempotent: bool = True,
        retry_when: Callable[[SteleError], bool] = lambda error: False,
    ) -> Any:
        """Ask the leading master. Look for it within `timeout_s`, and ask all masters at most `rounds` times.

        `idempotent`: retry also if it is not known whether the call was done. `retry_when`: other errors to
        retry on.

        Raises:
            SteleError: the leader's own answer, or the last reason why there was none. UNAVAILABLE after
                `first_contact_s` if no master ever answered.
        """
        timeout_s, rounds = timeout_s or self._timeout_s, rounds or self._rounds
        deadline = time.monotonic() + timeout_s
        if not self.met:
            await self._meet(min(timeout_s, self._first_contact_s))
        backoff_s = _BACKOFF_FIRST_S
        for number in itertools.count(1):
            error = await self._round(method, request, deadline, idempotent, retry_when)
            if not isinstance(error, SteleError):
                return error
            rest_s = deadline - time.monotonic()
            if rest_s <= backoff_s or number == rounds:
                raise error
            await asyncio.sleep(backoff_s * (0.5 + self._rng.random()))
            backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)

    async def _meet(self, patience_s: float) -> None:
        asked = time.monotonic()
        async with self._meeting:
            if self.met:
                return
            if asked < self._unmet[0]:  # callers that waited for the same attempt share its result
                raise Retryable(self._unmet[1], code=Code.UNAVAILABLE, advice=Advice.CHECK_MASTERS)
            try:
                address = await first_contact(self._pool, self._given, patience_s)
            except Retryable as exc:
                self._unmet = (time.monotonic(), str(exc.args[0]))
                raise
            self._lead(address)
            self.met = True

    async def _round(
        self,
        method: str,
        request: Any,
        deadline: float,
        idempotent: bool,
        retry_when: Callable[[SteleError], bool],
    ) -> Any:
        """Ask each master once, likely leaders first. Returns the answer, or the most specific error.

        Another cluster may answer at an address that once was a master's of ours, whose pod is gone. So this
        raises WRONG_CLUSTER only if another cluster answers at every address.
        """
        worst: SteleError = Retryable("no master answers", code=Code.UNAVAILABLE, advice=Advice.CHECK_MASTERS)
        waiting = await self._addresses()
        if not waiting:
            raise Retryable("no master address is known", code=Code.UNAVAILABLE, advice=Advice.CHECK_MASTERS)
        asked: set[str] = set()
        said: dict[str, str] = {}
        strangers: list[SteleError] = []
        while waiting:
            address = waiting.pop(0)
            if address in asked:
                continue
            asked.add(address)
            timeout_s = min(_ATTEMPT_TIMEOUT_S, max(0.05, deadline - time.monotonic()))
            try:
                answer = await self._pool.unary(
                    address, MasterServiceStub, method, request, timeout_s=timeout_s
                )
            except SteleError as error:
                retry = error.code in _NOT_DONE or retry_when(error)
                if error.code is Code.WRONG_CLUSTER:
                    strangers.append(error)
                    self._known = [a for a in self._known if a != address]
                elif not retry and not (idempotent and error.code in _MAYBE_DONE):
                    raise
                elif _says(error) >= _says(worst):
                    worst = error
                said[address] = (
                    _LEADS_NOT
                    if isinstance(error, NotLeader)
                    else str(error.args[0]).removeprefix(f"{address}: ")
                )
                # The master there may have moved. Its address is looked up again when it is named next.
                self._by_node = {n: a for n, a in self._by_node.items() if a != address}
                hint = error.leader_hint if isinstance(error, NotLeader) else ""
                if hint:
                    waiting.insert(0, await self._address_of(hint, address))
                continue
            await self._hear_of_others(address, deadline)
            self._lead(address)
            return answer
        if worst.code in (Code.UNAVAILABLE, Code.TIMED_OUT):
            await self._ask_nodes(deadline)
        if len(strangers) == len(asked) and asked.issuperset(self._known):
            raise strangers[0]
        return _summed_up(worst, said)

    async def _hear_of_others(self, leader: str, deadline: float) -> None:
        """Ask for the present list of masters. If all given ones were replaced one by one, none would answer
        later."""
        now = time.monotonic()
        if now < self._list_again or now >= deadline:
            return
        self._list_again = now + LIST_AGAIN_S
        with contextlib.suppress(SteleError):
            await self._list(leader, min(1.0, deadline - now))
            self.learn(self._by_node.values())

    async def _ask_nodes(self, deadline: float) -> None:
        """Ask nodes for the masters: all may have been replaced meanwhile, and nodes report to every new
        one."""
        now, nodes = time.monotonic(), list(self._nodes())
        if now < self._ask_again or now >= deadline:
            return
        self._ask_again = now + LIST_AGAIN_S
        timeout_s = min(1.0, deadline - now)

        async def ask(address: str) -> list[str]:
            request = tserver_pb2.GetNodeStatusRequest()
            try:
                answer = await self._pool.unary(
                    address, TabletServerServiceStub, "GetNodeStatus", request, timeout_s=timeout_s
                )
            except SteleError:
                return []
            return list(answer.masters)

        asked = self._rng.sample(nodes, min(len(nodes), NODES_ASKED))
        told = itertools.chain.from_iterable(await asyncio.gather(*(ask(address) for address in asked)))
        # The answers may include old addresses from the nodes' start, so no known address is dropped.
        self._known = list(dict.fromkeys([*self._known, *told]))

    async def _list(self, told_by: str, timeout_s: float) -> None:
        answer = await self._pool.unary(
            told_by, MasterServiceStub, "ListMasters", master_pb2.ListMastersRequest(), timeout_s=timeout_s
        )
        self._by_node = {id_from_pb(m.node_id): m.address for m in answer.masters if m.address}

    async def _addresses(self) -> list[str]:
        known = list(self._known)
        for given in self._given:
            try:
                known.extend(await resolve(given))
            except Retryable:
                known.append(given)
        return list(dict.fromkeys(known))

    async def _address_of(self, node_id: str, told_by: str) -> str:
        if node_id not in self._by_node:
            try:
                await self._list(told_by, 1.0)
            except SteleError:
                return told_by
            # It does not lead and may have an old list, so no known address is dropped.
            self._known = list(dict.fromkeys([*self._known, *self._by_node.values()]))
        return self._by_node.get(node_id, told_by)

    def _lead(self, address: str) -> None:
        if self._known[:1] != [address]:
            self._known = [address, *(a for a in self._known if a != address)]


def _summed_up(worst: SteleError, said: Mapping[str, str]) -> SteleError:
    """`worst`, or a summary of what each master said if `worst` covers only one of them. Users need to know
    which are down."""
    reasons = ", ".join(f"{address} ({said[address]})" for address in sorted(said))
    if isinstance(worst, NotLeader):
        return NotLeader(f"no master leads: {reasons}{_minority(said)}", leader_hint=worst.leader_hint)
    if worst.code in _SAYS_LITTLE:
        return Retryable(f"no master answers: {reasons}", code=worst.code)
    return worst


def _minority(said: Mapping[str, str]) -> str:
    """Say that too few masters answer to elect a leader; "" if enough answer."""
    answering, needed = list(said.values()).count(_LEADS_NOT), len(said) // 2 + 1
    if answering >= needed:
        return ""
    if any(_is_name(address) for address in said):  # it may be a Service, and no master of its own
        return "; too few masters answer: a majority of them is needed"
    answer = "answers" if answering == 1 else "answer"
    return f"; {answering} of {len(said)} {answer}, but a majority ({needed} of {len(said)}) is needed"


def _is_name(address: str) -> bool:
    """Whether the host of an address is a name. Names that the caller gave are replaced by their IP
    addresses. So this name did not resolve, or the masters listed it."""
    try:
        ipaddress.ip_address(split_address(address)[0].partition("%")[0])
    except ValueError:
        return True
    return False


def _says(error: SteleError) -> int:
    """Rank an error by how much it says about the cluster; higher is more specific."""
    return _SAYS_LITTLE.index(error.code) if error.code in _SAYS_LITTLE else len(_SAYS_LITTLE)
