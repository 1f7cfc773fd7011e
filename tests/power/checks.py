"""What must hold on a disk after the power went. Each check starts what lies there, and so changes it; what clients and nodes
are told then is noted in the story."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from stele.client import AsyncClient
from stele.consensus.replica import ReplicaState
from stele.model.errors import SteleError
from stele.tserver.volume import Fate, lock_directory, open_volume
from tests.consensus.cluster import Network, TestNode
from tests.power import resend
from tests.power.story import NEVER_S, Story, possible
from tests.power.workload import SPACE, cluster_on

READY_WITHIN_S = 100.0
"""On a machine that has other work: it is some 3 s where it has none."""


async def member(directory: Path, name: str, story: Story) -> list[str]:
    """What is wrong with one member's volume, started alone: its record, its log and every replica."""
    faults = []
    node_id, role = story.ids[name], "master" if name == "master" else "node"
    try:
        volume = open_volume(directory, lock_directory(directory), story.cluster_id, node_id, role)
    except (Fate, OSError) as exc:
        return [f"its volume is not opened: {exc!r}"]
    incarnation, told = volume.record.incarnation, story.incarnation(name)
    volume.close()
    story.incarnations.append((time.monotonic(), name, incarnation))
    if incarnation <= told:
        faults.append(f"it starts as incarnation {incarnation}, and had said {told}")
    node = TestNode(Network(), directory, node_id)
    try:
        await node.start()
        faults += _log(node, name, story)
        faults += [
            f"replica {r.superblock.key} of {r.superblock.table_name} is FAILED: {r.error}"
            for r in node.replicas
            if r.state is ReplicaState.FAILED
        ]
        faults += await resend.to_replicas(node, story)
    except SteleError as exc:
        faults.append(f"it does not start: {exc!r}")
    finally:
        await node.stop()
    return faults


def _log(node: TestNode, name: str, story: Story) -> list[str]:
    """Whether all that replicas had said of their logs is still so."""
    report = node.log.recovery
    faults = [f"stream {key} has failed: {why}" for key, why in report.failed.items()]
    faults += [f"its log is damaged: {damage}" for damage in report.damages]
    for key, promises in story.said(name).items():
        state = report.streams.get(key)
        if state is None:
            faults.append(f"the stream {key} is gone; it had said {promises[-1]}")
            continue
        for promise in promises:
            broken = (
                promise.term > state.term
                or promise.received > state.last
                or (promise.voted_for not in (None, state.voted_for) and promise.term == state.term)
            )
            if broken and not state.tombstoned:
                faults.append(f"the stream {key} is {state}; it had said {promise}")
                break
    return faults


async def cluster(directory: Path, story: Story) -> list[str]:
    """What is wrong with all members' volumes, started together: which tables are there, and every row of them."""
    faults: list[str] = []
    started = cluster_on(directory, story)
    try:
        for name in story.ids:
            await started.launch(name)
        deadline = time.monotonic() + READY_WITHIN_S
        while any(node.health.ready() for node in started.running.values()):
            if time.monotonic() > deadline:
                return [f"{n}: {node.health.ready()}" for n, node in started.running.items()]
            await asyncio.sleep(0.05)
        async with started.client() as client:
            faults += await _tables(client, story)
            tables = [name for name in story.created if _is_there(story, name)]
            faults += await resend.to_cluster(client, tables, story)
            for name in tables:
                faults += await _rows(client, name, story)
            space = await client.keyspace(SPACE)
            for (table, key), history in story.rows.items():
                if table == SPACE:
                    found = await space.read(f"k{key}")
                    value = None if found is None else int(found)
                    if value not in possible(history):
                        faults.append(f"key {key} is {value}; it may be {possible(history)}")
    except (SteleError, Fate, OSError) as exc:
        faults.append(f"it does not come back: {exc!r}")
    finally:
        await started.close()
    return faults


def _is_there(story: Story, name: str) -> bool:
    """Whether a table must be there: made, and nobody asked for its end."""
    gone = story.deleted.get(name)
    return story.created[name].told_s < NEVER_S and gone is None


async def _tables(client: AsyncClient, story: Story) -> list[str]:
    there = {table.name for table in await client.list_tables()}
    faults = [f"table {n} is gone" for n in story.created if _is_there(story, n) and n not in there]
    ended = (n for n, deed in story.deleted.items() if deed.told_s < NEVER_S and n in there)
    return faults + [f"table {n} was deleted and is there" for n in ended]


async def _rows(client: AsyncClient, name: str, story: Story) -> list[str]:
    table = await client.open_table(name)
    await table.wait_ready(timeout_s=READY_WITHIN_S)
    found = (await table.scan(["id", "v"]).to_table()).to_pydict()
    rows = dict(zip(found["id"], found["v"]))
    faults = [] if len(rows) == len(found["id"]) else [f"{name}: a key is there twice"]
    for (of, key), history in story.rows.items():
        if of == name and (value := rows.pop(key, None)) not in possible(history):
            faults.append(f"{name}: row {key} is {value}; it may be {possible(history)}")
    return faults + [f"{name}: row {key} is {value}, which nobody wrote" for key, value in rows.items()]
