"""Finding the master that leads, among masters that move."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import grpc
import pytest

from stele.model.errors import Code, NotLeader, Rejected, Retryable, SteleError
from stele.model.ids import ClusterId, NodeId, new_id
from stele.rpc.budget import ByteBudget
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.first_contact import first_contact
from stele.rpc.identity import Identity, PeerBook
from stele.rpc.masters import Masters, parse_masters
from stele.rpc.proto import master_pb2
from stele.rpc.proto.master_pb2_grpc import MasterServiceServicer, add_MasterServiceServicer_to_server
from stele.rpc.server import bind, make_server


class Group:
    """Some masters, and which of them leads."""

    def __init__(self) -> None:
        self.cluster_id = ClusterId(new_id())
        self.members: list[Member] = []
        self.leader = 0


class Member(MasterServiceServicer):
    """One master. It may be started again, at another port."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.node_id = NodeId(new_id())
        self.address = ""
        self._server: grpc.aio.Server | None = None
        group.members.append(self)

    async def start(self) -> None:
        earlier, self._server = self._server, None
        identity = Identity(self.group.cluster_id, self.node_id, 1)
        self._server = make_server(identity, PeerBook(), ByteBudget())
        add_MasterServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{await bind(self._server, '127.0.0.1:0')}"
        await self._server.start()
        if earlier is not None:
            await earlier.stop(0)

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)

    async def ListMasters(self, request: Any, context: Any) -> Any:
        answer = master_pb2.ListMastersResponse()
        for member in self.group.members:
            answer.masters.add(node_id=id_to_pb(member.node_id), address=member.address)
        return answer

    async def ListTables(self, request: Any, context: Any) -> Any:
        leader = self.group.members[self.group.leader]
        if leader is not self:
            raise NotLeader("another leads", leader_hint=leader.node_id)
        return master_pb2.ListTablesResponse()


async def told(masters: Masters, words: str) -> SteleError:
    """What a call ends with, once it says so: where the machine stood still some masters were not asked in time."""
    for _ in range(20):
        with pytest.raises(Retryable) as ended:
            await masters.call("ListTables", master_pb2.ListTablesRequest(), timeout_s=0.5)
        if re.search(words, str(ended.value)):
            break
    assert re.search(words, str(ended.value))
    return ended.value


@pytest.mark.parametrize("led", [(1,), (1, 0)])
async def test_a_leader_that_listens_elsewhere_now_is_found(led: tuple[int, ...]) -> None:
    """The others name it by its id, and where it was is known from before."""
    group = Group()
    first, second = Member(group), Member(group)
    pool = ChannelPool(Identity())
    try:
        await asyncio.gather(first.start(), second.start())
        masters = Masters(pool, [first.address])
        for leader in led:
            group.leader = leader
            await masters.call("ListTables", master_pb2.ListTablesRequest(), timeout_s=60)
        before = second.address
        await second.start()
        assert second.address != before
        group.leader = 1
        await masters.call("ListTables", master_pb2.ListTablesRequest(), timeout_s=60)
    finally:
        await pool.close()
        await asyncio.gather(first.stop(), second.stop())


async def test_masters_that_took_the_place_of_those_given_are_known() -> None:
    """One after another all that a client was given may be replaced; it has heard of the others from each leader."""
    group = Group()
    first, second = Member(group), Member(group)
    for member in (first, second):
        await member.start()
    pool = ChannelPool(Identity(group.cluster_id))
    try:
        masters = Masters(pool, [first.address])
        await masters.call("ListTables", master_pb2.ListTablesRequest(), timeout_s=60)
        group.leader = 1
        await first.stop()
        await masters.call("ListTables", master_pb2.ListTablesRequest(), timeout_s=60)
    finally:
        await pool.close()
        for member in (first, second):
            await member.stop()


class Itself(Member):
    """Does not lead, and takes itself for the one that does."""

    asked = 0

    async def ListTables(self, request: Any, context: Any) -> Any:
        self.asked += 1
        raise NotLeader("not yet", leader_hint=self.node_id)


async def test_masters_that_name_none_that_leads_are_not_asked_without_rest() -> None:
    """Each is asked once in a round. A pause is 25 ms at least, and doubles."""
    group = Group()
    itself, others = Itself(group), [Member(group) for _ in range(2)]
    members = [itself, *others]
    await asyncio.gather(*(member.start() for member in members))
    pool = ChannelPool(Identity(group.cluster_id))
    try:
        masters = Masters(pool, [member.address for member in members], first_contact_s=None)
        async with asyncio.timeout(20):
            with pytest.raises(NotLeader):
                await masters.call("ListTables", master_pb2.ListTablesRequest(), timeout_s=1.5)
        assert 2 <= itself.asked <= 8
    finally:
        await pool.close()
        await asyncio.gather(*(member.stop() for member in members))


class Unsure(Member):
    """Ends its calls as `ends` says, one after another; None is an answer."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.ends: list[Code | None] = []

    async def DeleteTable(self, request: Any, context: Any) -> Any:
        if (code := self.ends.pop(0)) is not None:
            raise Retryable("no answer to the batch", code=code)
        return master_pb2.DeleteTableResponse()


@pytest.mark.parametrize("code", [Code.UNKNOWN_OUTCOME, Code.TIMED_OUT])
async def test_what_may_have_been_done_is_asked_again_only_where_it_may_be_done_twice(code: Code) -> None:
    group = Group()
    master = Unsure(group)
    await master.start()
    pool = ChannelPool(Identity(group.cluster_id))
    try:
        masters, request = Masters(pool, [master.address]), master_pb2.DeleteTableRequest(name="t")
        master.ends = [Code.NO_QUORUM, code, None]  # the first one says that nothing was done
        with pytest.raises(Retryable) as ended:
            await masters.call("DeleteTable", request, timeout_s=60, idempotent=False)
        assert ended.value.code is code and master.ends == [None]
        master.ends = [code, None]
        await masters.call("DeleteTable", request, timeout_s=60)
        assert not master.ends
    finally:
        await pool.close()
        await master.stop()


async def test_an_address_that_another_cluster_has_by_now_is_forgotten() -> None:
    """A pod's address may be given to any pod once it is gone: that hides no master."""
    group, another = Group(), Group()
    members = [Member(group), Member(another)]
    for member in members:
        await member.start()
    ours, stranger = (member.address for member in members)
    pool = ChannelPool(Identity(group.cluster_id))
    try:
        masters = Masters(pool, [ours])
        await masters.call("ListTables", master_pb2.ListTablesRequest(), timeout_s=60)
        masters._lead(stranger)
        await masters.call("ListTables", master_pb2.ListTablesRequest(), timeout_s=60)
        assert stranger not in masters._known
        await members[0].stop()
        masters.learn([stranger])
        await told(masters, r"no master answers: .*refused")
    finally:
        await pool.close()
        for member in members:
            await member.stop()


@pytest.mark.parametrize("first_contact_s", [None, 5.0])
async def test_who_was_given_another_clusters_masters_alone_is_told_so_at_once(
    first_contact_s: float | None,
) -> None:
    group = Group()
    members = [Member(group) for _ in range(2)]
    for member in members:
        await member.start()
    pool = ChannelPool(Identity(ClusterId(new_id())))
    try:
        masters = Masters(pool, [m.address for m in members], first_contact_s=first_contact_s)
        async with asyncio.timeout(60):
            with pytest.raises(Rejected, match=f"this is cluster {group.cluster_id[:8]}") as refused:
                await masters.call("ListTables", master_pb2.ListTablesRequest(), timeout_s=600)
        assert refused.value.code is Code.WRONG_CLUSTER
    finally:
        await pool.close()
        for member in members:
            await member.stop()


class Stranger(Member):
    """It refuses who asks first, and then is asked in vain."""

    asked = 0

    async def ListMasters(self, request: Any, context: Any) -> Any:
        self.asked += 1
        if self.asked == 1:
            raise Rejected("masters and nodes serve different requests", code=Code.UNSUPPORTED_VERSION)
        await asyncio.Event().wait()


async def test_what_an_address_has_said_is_told_though_it_is_silent_since() -> None:
    """It is asked again and again: a machine that stood still while the last question was under way was told of silence."""
    stranger = Stranger(Group())
    await stranger.start()
    pool = ChannelPool(Identity())
    try:
        for patience_s in (1.0, 4.0, 16.0, 64.0):  # for machines of any speed
            stranger.asked = 0
            with pytest.raises(Retryable) as caught:
                await first_contact(pool, [stranger.address], patience_s)
            if stranger.asked > 1:
                break
        assert f"{stranger.address} (masters and nodes serve different requests)" in str(caught.value)
    finally:
        await pool.close()
        await stranger.stop()


async def test_while_no_master_leads_it_is_said_which_do_not_answer() -> None:
    """Two of three are down: that the third does not lead is their doing, not its own."""
    group = Group()
    members = [Member(group) for _ in range(3)]
    for member in members:
        await member.start()
    pool = ChannelPool(Identity(group.cluster_id))
    try:
        masters = Masters(pool, [m.address for m in members])
        await masters.call("ListTables", master_pb2.ListTablesRequest(), timeout_s=60)
        await members[0].stop()
        await members[1].stop()
        error = await told(masters, r"refused.*refused")
        assert isinstance(error, NotLeader)
        said = str(error)
        assert said.startswith("NOT_LEADER: no master leads: ")
        assert said.count("(does not lead)") == 1 and f"{members[2].address} (does not lead)" in said
        assert said.count("(connection refused)") == 2
        assert said.endswith("; 1 of 3 answers, but a majority (2 of 3) is needed")
        learned = [m.address for m in members[1:]]  # and a Service, whose name nobody knows here
        named = Masters(pool, [*learned, "masters.flights.invalid:7051"], first_contact_s=None)
        said = str(await told(named, r"masters\.flights\.invalid"))
        assert said.endswith("; too few masters answer: a majority of them is needed")
        await members[2].stop()
        await told(masters, r"no master answers: .*refused.*refused.*refused")
    finally:
        await pool.close()
        for member in members:
            await member.stop()


@pytest.mark.parametrize("address", ["http://localhost:7051", "https://h", "h:7051/"])
def test_an_address_is_no_url(address: str) -> None:
    with pytest.raises(
        Rejected, match=f"address '{address}': expected HOST:PORT, like 10.0.0.1:7051, without http://"
    ):
        parse_masters(address)
