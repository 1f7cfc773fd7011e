"""`python -m tests.fuzz [--minutes 5] [--seed N] [--only parsers|ports]`: hostile input for every parser and every port.

First each parser alone, then a real cluster (a master and three nodes) with a bystander that goes on writing. At the end all
processes live, no replica is FAILED, no request failed because of a bug, memory stays within its limit, every row that the
bystander was told of is there, and none of its waits was longer than allowed.

Exit status 1 if it is not so; then the seed, the input or the sentence, and the folder with the logs are printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from stele.client import AsyncClient
from stele.client.admin import list_replicas
from stele.model.errors import SteleError
from stele.model.partition import HashPartition, PartitionSchema
from stele.rpc.channels import ChannelPool
from stele.rpc.convert import id_to_pb
from stele.rpc.identity import Identity
from stele.rpc.proto import common_pb2
from tests.fuzz import hunt, parsers
from tests.fuzz.draw import Draw
from tests.fuzz.ports import PREY, Attacks, Ground, Wrong, pool_of
from tests.harness import Cluster
from tests.harness.processes import Member

MEMORY_BYTES_MAX = 700 << 20
"""Resident memory of a process: a node's budget of bytes and what it takes at rest."""
_LOG_LINES_A_MINUTE = 1_000
_ATTACKERS = 6
_LOOK_EVERY_S = 2.0
_ANSWER_WITHIN_S = 20.0


class Failure(Exception):
    """What must not happen, did."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a run at the ports saw."""

    attacks: Counter[str]
    answers: Counter[str]
    bystander: dict[str, Any]
    resident_mb: dict[str, int]

    def lines(self) -> list[str]:
        """For people."""
        return [
            "attacks: " + ", ".join(f"{n} {name}" for name, n in self.attacks.most_common()),
            "answers: " + ", ".join(f"{n} {name}" for name, n in self.answers.most_common()),
            "memory: " + ", ".join(f"{name} {mb} MB at most" for name, mb in self.resident_mb.items()),
            f"bystander: {self.bystander['acknowledged']} rows acknowledged, all read back equal; longest wait "
            f"{self.bystander['longest_gap_ms']} ms",
        ]


class Siege:
    """A cluster, a bystander and the attackers."""

    def __init__(self, cluster: Cluster, draw: Draw) -> None:
        self._cluster = cluster
        self._draw = draw
        self._resident: dict[str, int] = {}
        self._began = time.monotonic()

    async def run(self, seconds: float) -> Report:
        """Attack for so long.

        Raises:
            Failure: with what was wrong.
        """
        ground = await self._ground()
        async with self._bystander() as bystander:
            self._began = time.monotonic()
            attacks = Attacks(self._draw, ground)
            tasks = [asyncio.create_task(self._attack(attacks, seconds)) for _ in range(_ATTACKERS)]
            tasks.append(asyncio.create_task(self._watch(seconds)))
            try:
                for task in asyncio.as_completed(tasks):
                    await task
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await attacks.close()
            told = await self._ended(bystander)
        await self._look(final=True)
        return Report(ground.done, ground.answers, told, {n: b >> 20 for n, b in self._resident.items()})

    async def _ground(self) -> Ground:
        cluster = self._cluster
        async with AsyncClient(cluster.master_addresses, timeout_s=60, first_contact_s=60) as client:
            spread = PartitionSchema((HashPartition((0,), 4, 0),), None)
            table = await client.create_table(PREY, parsers.SCHEMA, spread)
            await table.put({"id": 1})
            places = await client.locate(PREY, 60)
        tablets = [id_to_pb(tablet.tablet_id) for tablet in places.tablets]
        pool = pool_of(cluster.members, [id_to_pb(places.table_id)], tablets)
        self._draw = Draw(self._draw.rng, pool)
        return Ground(parsers.ClusterId(cluster.cluster_id), cluster.masters, cluster.nodes, pool)

    async def _attack(self, attacks: Attacks, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                await attacks.step()
            except Wrong as exc:
                raise Failure(str(exc)) from None

    async def _watch(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await self._look()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _look(self, *, final: bool = False) -> None:
        for member in self._cluster.members:
            if not member.running:
                code = member.process.returncode if member.process else None
                raise Failure(f"{member.name} ended with {code}\n{member.tail()}")
            await self._answers(member)
            resident = self._cluster.resident_bytes(member)
            self._resident[member.name] = max(resident, self._resident.get(member.name, 0))
            if resident > MEMORY_BYTES_MAX:
                raise Failure(f"{member.name} takes {resident >> 20} MB, {MEMORY_BYTES_MAX >> 20} MB at most")
            self._read_log(member)
        if final:
            await self._replicas()

    async def _answers(self, member: Member) -> None:
        began = time.monotonic()
        while (await self._cluster.http(member, "/livez"))[0] != 200:
            if time.monotonic() - began > _ANSWER_WITHIN_S:
                raise Failure(
                    f"{member.name}: /livez has not answered for {_ANSWER_WITHIN_S:.0f} s\n{member.tail()}"
                )
            await asyncio.sleep(0.2)

    def _read_log(self, member: Member) -> None:
        lines = member.log_path.read_text(errors="replace").splitlines()
        wrong = [line for line in lines if "unexpectedly" in line or "Traceback" in line]
        if wrong:
            raise Failure(f"{member.name} logged: {wrong[0][:3_000]}")
        minutes = 1 + (time.monotonic() - self._began) / 60
        if len(lines) > _LOG_LINES_A_MINUTE * minutes:
            raise Failure(
                f"{member.name} has logged {len(lines)} lines in {minutes:.1f} minutes; see {member.log_path}"
            )

    async def _replicas(self) -> None:
        """None is FAILED."""
        pool = ChannelPool(Identity())
        try:
            for member in self._cluster.nodes:
                for replica in await list_replicas(pool, member.address):
                    if replica.state == common_pb2.FAILED:
                        raise Failure(f"{member.name}: {replica}\n{member.tail()}")
        except SteleError as exc:
            raise Failure(f"{member.name} does not tell its replicas: {exc}") from exc
        finally:
            await pool.close()

    @contextlib.asynccontextmanager
    async def _bystander(self) -> AsyncIterator[asyncio.subprocess.Process]:
        masters = ",".join(self._cluster.master_addresses)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.fuzz.bystander", masters), stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(120):
                if not await process.stdout.readline():
                    raise Failure(f"the bystander ended with {await process.wait()}")
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _ended(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        if process.returncode is not None:
            raise Failure(f"the bystander ended by itself with {process.returncode}")
        process.terminate()
        async with asyncio.timeout(180):
            said = await process.stdout.read()
            code = await process.wait()
        if not said:
            raise Failure(f"the bystander ended with {code}")
        told: dict[str, Any] = json.loads(said)
        if told["lost"]:
            raise Failure(f"rows that were acknowledged are not there: {told}")
        return told


async def besiege(folder: Path, seconds: float, rng: random.Random) -> Report:
    """A siege of a new cluster below `folder`."""
    async with Cluster(folder, masters=1, nodes=3) as cluster:
        return await Siege(cluster, Draw(rng)).run(seconds)


def spoil_all(seconds: float, rng: random.Random) -> dict[str, int]:
    """Feed all parsers for so long; how many inputs each got. Raises `hunt.Finding`."""
    return hunt.hunt(Draw(rng), parsers.table(), until_s=time.monotonic() + seconds)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--minutes", default=5.0, show_default=True, help="How long, parsers and ports together.")
@click.option("--seed", type=int, help="Repeat a run's inputs; drawn if absent.")
@click.option("--only", type=click.Choice(["parsers", "ports"]), help="One half alone, for all of the time.")
@click.option("--longest-wait-ms", default=500, show_default=True, help="Of the bystander's writes; 0: any.")
def main(minutes: float, seed: int | None, only: str | None, longest_wait_ms: int) -> None:
    """Hostile input for every parser and every port."""
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    folder = Path(tempfile.mkdtemp(prefix="stele-fuzz-"))
    click.echo(f"seed {seed}, logs in {folder}")
    seconds = minutes * 60 * (1 if only else 0.5)
    try:
        if only != "ports":
            counts = spoil_all(seconds, random.Random(seed))
            click.echo(f"parsers: {len(counts)}, {sum(counts.values()):,} inputs, none of which got through")
        if only != "parsers":
            report = asyncio.run(besiege(folder / "cluster", seconds, random.Random(seed + 1)))
            click.echo("\n".join(report.lines()))
            if longest_wait_ms and report.bystander["longest_gap_ms"] > longest_wait_ms:
                raise Failure(f"the bystander waited longer than {longest_wait_ms} ms")
    except (Failure, hunt.Finding) as exc:
        click.echo(f"FAILED with seed {seed}: {exc}\nlogs are in {folder}")
        sys.exit(1)
    shutil.rmtree(folder)
    click.echo("1 passed, 0 failed")


if __name__ == "__main__":
    main()
