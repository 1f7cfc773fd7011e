"""From release 0.1.0 to this one and back, and again, then finalized: processes, one at a time, under clients of both.

No call of a client fails, and what was acknowledged is there at the end. Waits end when nothing changes any more, not by the
clock: a process may need a minute to start on a busy machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from stele.client import AsyncClient
from stele.client.admin import cluster_versions, cluster_view, finalize_version
from stele.client.columns import column
from stele.client.health import examine
from stele.client.partitioning import hash as hashed
from stele.model.cluster_version import CLUSTER_VERSION
from stele.model.errors import Code, Rejected, SteleError
from stele.model.schema import Schema
from stele.rpc.convert import id_from_pb
from tests.harness.compare import rows_that_all_replicas_hold
from tests.harness.processes import Cluster, Member
from tests.upgrade.programs import HEAD, WriterProcess, stele
from tests.upgrade.release import ARCHIVE, contents, is_tagged, tagged, unpacked

SCHEMA = Schema.make(
    [("k", "string"), ("owner", "string"), ("n", "int64"), ("text", "string", True)], key=["k"]
)
STALLED_S = 240.0
"""A wait fails if what it waits for does not change for so long."""
ENDS_WITHIN_S = 300.0
MORE = column("more", "int64", default=7)
CANNOT_READ = 2
"""Exit code of a process whose volume a later release wrote."""


class Roll:
    """A cluster whose members change their release, and two programs that use it meanwhile."""

    def __init__(self, cluster: Cluster, old: Path, client: AsyncClient) -> None:
        self.cluster = cluster
        self.old = old
        self.client = client
        self.writers: list[WriterProcess] = []
        self._began = time.monotonic()

    def note(self, words: str) -> None:
        """A line of the story."""
        print(f"{time.monotonic() - self._began:7.1f} {words}")

    async def until(self, missing: Callable[[], Awaitable[str]]) -> None:
        """Wait until nothing is missing. Fails with what is, once that no longer changes, or if a client failed."""
        last, since = "", time.monotonic()
        while why := await missing():
            for writer in self.writers:
                writer.must_run()
            if why != last:
                last, since = why, time.monotonic()
            assert time.monotonic() - since < STALLED_S, f"nothing changes for {STALLED_S:.0f} s: {why}"
            await asyncio.sleep(0.1)

    async def not_whole(self) -> str:
        """What the operator would wait for before it takes another pod."""
        for member in self.cluster.members:
            assert member.running, f"{member.name} ended by itself\n{member.tail()}"
            status, body = await self.cluster.http(member, "/readyz")
            if status != 200:
                return f"{member.name} is not ready: {body}"
        try:
            health = examine(await cluster_view(self.client.masters))
        except SteleError as exc:
            return exc.code.name
        if not health.settled:
            return "the leading master is new"
        away = [f"{node.label} is {node.state}" for node in health.nodes if node.state != "alive"]
        weak = [
            f"{t.table_name} {t.tablet_id[:8]}: {t.state}" for t in health.tablets if t.state != "healthy"
        ]
        return "; ".join([*away, *weak, *health.intents])

    async def next(self, program: Path | None, *, of: list[Member]) -> Member:
        """Masters first, the leading one last of them; then nodes, by name. As the operator takes them."""
        leader = id_from_pb((await cluster_view(self.client.masters)).leader)
        waiting = [m for m in of if m.program != program]
        return min(waiting, key=lambda m: (m.role != "master", m.node_id == leader, m.name))

    async def roll(self, phase: str, program: Path | None, members: list[Member]) -> None:
        """Give these members that release, one at a time."""
        for writer in self.writers:
            await writer.ask(f"phase {phase}")
        for _ in members:
            await self.change(await self.next(program, of=members), program)

    async def change(self, member: Member, program: Path | None) -> None:
        """Stop a member, start it with that release, and wait until all is whole."""
        code = await self.cluster.stop(member, ENDS_WITHIN_S)
        assert code == 0, f"{member.name} ended with {code}\n{member.tail()}"
        member.program = program
        self.cluster.restart(member)
        await self.until(self.not_whole)
        self.note(f"{member.name} runs {'this release' if program is None else 'the release before'}")

    async def both_work(self, state: str, *, commands: bool = False) -> None:
        """Clients of both releases use the catalog; with `commands`, the commands of both see a healthy cluster."""
        await asyncio.gather(*(writer.ask(f"table t-{writer.name}-{state}") for writer in self.writers))
        for program in (self.old, HEAD) if commands else ():
            await self.until(lambda program=program: self._ill_says(program))  # type: ignore[misc]
            code, out = await stele(program, self.cluster, "table", "list")
            assert code == 0 and "rows" in out, out
        self.note(f"clients of both releases work: {state}")

    async def _ill_says(self, program: Path) -> str:
        code, out = await stele(program, self.cluster, "ksck", "--timeout", "60")
        return "" if code == 0 else out

    async def nothing_new_is_allowed(self, lagging: Member | None) -> None:
        """What the release before would misread is refused, and so is the end of the upgrade while this member lags."""
        table = await self.client.open_table("rows")
        with pytest.raises(Rejected) as failure:
            await table.alter(add=[MORE])
        assert failure.value.code is Code.UNSUPPORTED_VERSION, failure.value
        assert (await cluster_versions(self.client.masters)).finalized == 1
        if lagging is None:
            return
        with pytest.raises(Rejected) as failure:
            await finalize_version(self.client.masters)
        said = f"{lagging.role} {lagging.node_id[:8]} runs release 0.1.0, which reads cluster version 1; upgrade it"
        assert failure.value.code is Code.UNSAFE_CHANGE and said in str(failure.value), failure.value

    async def end(self) -> dict[str, dict[str, object]]:
        """End the writers; all rows that they know of. Prints how long writes waited."""
        rows: dict[str, dict[str, object]] = {}
        every: list[float] = []
        for writer in self.writers:
            told = await writer.ask("end")
            assert await writer.process.wait() == 0, writer.log.read_text()
            rows |= told["rows"]
            for phase, waits_s in told["waits_s"].items():
                self.note(f"client {writer.name}, {phase or 'before'}: {_shown(waits_s)}")
                every += waits_s
            self.note(f"client {writer.name}: {told['reads']} reads and scans, {len(told['keys'])} keys")
        self.note(f"in all: {_shown(every)}")
        return rows


def _shown(waits_s: list[float]) -> str:
    ordered = sorted(waits_s)
    p99 = ordered[int(len(ordered) * 0.99)] * 1_000
    return f"{len(ordered)} writes, p99 {p99:.0f} ms, longest wait {ordered[-1] * 1_000:.0f} ms"


@pytest.mark.timeout(3600)
async def test_a_roll_to_this_release_and_back_under_clients_of_both(tmp_path: Path) -> None:
    old = unpacked(tmp_path / "release")
    cluster = Cluster(tmp_path / "cluster")
    for member in cluster.members:
        member.program = old
    masters, nodes = cluster.masters, cluster.nodes
    async with cluster, AsyncClient(cluster.master_addresses, timeout_s=240.0) as client:
        roll = Roll(cluster, old, client)
        await client.create_table("rows", SCHEMA, [hashed("k", buckets=3)], timeout_s=ENDS_WITHIN_S)
        await client.create_keyspace("keys", timeout_s=ENDS_WITHIN_S)
        try:
            for name, program in (("old", old), ("new", HEAD)):
                roll.writers.append(await WriterProcess.start(name, cluster, program))
            await roll.until(roll.not_whole)
            await roll.both_work("before")

            await roll.roll("forth", None, masters)
            await roll.both_work("masters")
            await roll.nothing_new_is_allowed(nodes[0])
            await roll.roll("forth", None, nodes[:1])
            await roll.both_work("half-way", commands=True)
            await roll.nothing_new_is_allowed(nodes[1])

            await roll.roll("back", old, [*masters, *nodes[:1]])
            await roll.both_work("back")
            await roll.nothing_new_is_allowed(None)

            await roll.roll("again", None, cluster.members)
            await roll.both_work("whole")
            await roll.nothing_new_is_allowed(None)

            for writer in roll.writers:
                await writer.ask("phase finalized")
            assert await finalize_version(client.masters) == CLUSTER_VERSION
            roll.note("finalized")
            await (await client.open_table("rows")).alter(add=[MORE], timeout_s=ENDS_WITHIN_S)
            await roll.both_work("finalized")
            await _an_old_node_is_refused(roll, nodes[2])
            await _an_old_master_ends(roll, await roll.next(old, of=masters))
            await roll.both_work("end", commands=True)

            wanted = {k: {**row, "more": 7} for k, row in (await roll.end()).items()}
        finally:
            for writer in roll.writers:
                await writer.kill()
        table = await client.open_table("rows")
        found = {row["k"]: row for row in (await table.scan().to_table()).to_pylist()}
        assert found == wanted
        assert await rows_that_all_replicas_hold(client, table, timeout_s=ENDS_WITHIN_S) == len(wanted)
        roll.note(f"{len(wanted)} rows, the same in all replicas")


async def _an_old_node_is_refused(roll: Roll, node: Member) -> None:
    """It does not serve, and its log says why. With this release it goes on, on the same volume."""
    said = (
        f"node {node.node_id} runs release 0.1.0, which reads cluster version 1, but {CLUSTER_VERSION} is finalized; "
        "start it with a newer release on the same volume"
    )
    assert await roll.cluster.stop(node, ENDS_WITHIN_S) == 0
    node.log_path.rename(node.log_path.with_suffix(".before"))
    node.program = roll.old
    roll.cluster.restart(node)

    async def untold() -> str:
        assert node.running, node.tail()
        return "" if said in node.log_path.read_text() else f"{node.name} has not said why it is refused"

    await roll.until(untold)
    status, body = await roll.cluster.http(node, "/readyz")
    assert status != 200, body
    roll.note(f"{node.name} of the release before is refused")
    await roll.change(node, None)


async def _an_old_master_ends(roll: Roll, master: Member) -> None:
    """It leaves its volume as it is: with this release it goes on."""
    assert await roll.cluster.stop(master, ENDS_WITHIN_S) == 0
    master.program = roll.old
    roll.cluster.restart(master)

    async def runs() -> str:
        return f"{master.name} still runs" if master.running else ""

    await roll.until(runs)
    assert master.process is not None and master.process.returncode == CANNOT_READ, master.tail()
    assert "upgrade this program" in master.tail(), master.tail()
    roll.note(f"{master.name} of the release before ended")
    master.program = None
    roll.cluster.restart(master)
    await roll.until(roll.not_whole)


def test_the_committed_release_is_that_of_the_tag() -> None:
    if not is_tagged():
        pytest.skip("the tag is not in this clone; `git fetch --tags` brings it")
    assert dict(contents(ARCHIVE.read_bytes())) == dict(tagged())
