"""Clients whose answers the power took: each sends again what it has no answer for, under the same number, and it is done once.

Called by checks.py. What is answered is noted in the story: it must be there whatever comes next.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

from stele.client import AsyncClient
from stele.client.sequencer import Sequencer
from stele.model import writeop
from stele.model.block import RowOp, decode_block
from stele.model.errors import Code
from stele.model.writeop import WriteHeader
from tests.consensus.cluster import TestNode, leads, table, wait_until
from tests.power.story import Sent, Story
from tests.power.workload import SCHEMA


@functools.cache
def _inserted(block: bytes) -> dict[int, tuple[int, int]]:
    """(key, value) of each of its rows that is an insert, by position."""
    found = decode_block(block, SCHEMA)
    ops = [found.op] * found.rows if found.row_ops is None else found.row_ops.tolist()
    rows = found.batch.to_pylist()
    return {row: (rows[row]["id"], rows[row]["v"]) for row, op in enumerate(ops) if op == RowOp.INSERT}


Answer = tuple[int, tuple[tuple[int, str], ...]]
"""The hybrid time of a block, and its rows that were refused, with why."""


def _answered(sent: Sent, answers: Sequence[Answer], story: Story) -> list[str]:
    """Note the answers to the same block; what is wrong with them."""
    (timestamp, refused), *again = answers
    sent.ended_s, sent.timestamp = time.monotonic(), timestamp
    which = f"{sent.table}: block {sent.sequence} of client {sent.client_id.hex()[:8]}"
    faults = [f"{which} was done twice: {first} and {answers[0]}" for first in again if first != answers[0]]
    inserted = _inserted(sent.block)
    faults += [f"{which}: row {inserted[row]} is {why}" for row, why in refused if row in inserted]
    for key, _ in inserted.values():
        story.rows[sent.table, key][-1].told_s = sent.ended_s
    return faults


async def to_replicas(node: TestNode, story: Story) -> list[str]:
    """Send to the replicas of a node that are the only ones of their tablets, which need no other member. What is wrong with
    the answers, and with the rows that were inserted before."""
    faults = []
    for tablet_id in dict.fromkeys(sent.tablet_id for sent in story.sent):
        replica = node.replicas.current(tablet_id)
        if replica is None or not replica.running or len(replica.config.voters) > 1:
            continue
        await wait_until(lambda replica=replica: leads(replica) or not replica.running)
        if not replica.running:
            continue  # it has FAILED, and is told of
        machine: Any = replica.machine
        for (of, _), waiting in story.unanswered().items():
            for sent in waiting if of == tablet_id else ():
                header = WriteHeader(
                    sent.client_id,
                    sent.sequence,
                    waiting[0].sequence,
                    sent.made_us,
                    writeop.digest(sent.block),
                    machine.schema.version,
                    plain=machine.check_block(sent.block),
                )
                payload = writeop.encode(header, sent.block)
                outcomes = [await replica.writes.propose(payload) for _ in range(2)]
                answers = [(o.timestamp, tuple((e.row, e.code.name) for e in o.row_errors)) for o in outcomes]
                faults += [f"{sent.table}: a block is refused: {o.message}" for o in outcomes if o.code]
                faults += _answered(sent, answers, story)
        rows = table(replica)
        there = [sent for sent in story.sent if sent.tablet_id == tablet_id and sent.timestamp]
        faults += [
            f"{sent.table}: row {key} is {rows.get(key)}, and {value} was inserted"
            for sent in there
            for row, (key, value) in _inserted(sent.block).items()
            if rows.get(key) != value
        ]
    return faults


async def to_cluster(client: AsyncClient, tables: Sequence[str], story: Story) -> list[str]:
    """Send through a client as it is, to all tablets of `tables`. What is wrong with the answers."""
    faults = []
    for (tablet_id, client_id), waiting in story.unanswered().items():
        name = waiting[0].table
        if name not in tables:
            continue
        found = await client.open_table(name)
        await found.wait_ready()
        tablets = (found.tablet(ordinal) for ordinal in range(found.partition_schema.tablets))
        tablet = next(tablet for tablet in tablets if tablet.place.tablet_id == tablet_id)
        for sent in waiting:
            answers = []
            for _ in range(2):
                tablet._latest = Sequencer(
                    client_id,
                    sent.made_us,
                    known=True,
                    _next=sent.sequence,
                    _unfinished={waiting[0].sequence: None},
                    _used_at=time.monotonic(),
                )
                answer = await tablet.write(sent.block, timeout_s=60)
                refused = tuple((e.row, Code(e.code).name) for e in answer.row_errors)
                answers.append((answer.timestamp, refused))
            faults += _answered(sent, answers, story)
    return faults
