"""`stele table verify`: do all replicas of a table hold the same rows?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from stele.cli.errors import NO
from stele.cli.options import json_option, masters_option, timeout_option, with_client
from stele.cli.output import say, short, show_json
from stele.cli.proof import keep, record_option
from stele.model.amounts import plural
from stele.model.clock import physical_us, utc
from stele.model.errors import Code, Retryable

if TYPE_CHECKING:
    from stele.client import AsyncClient
    from stele.client.replica_sums import ReplicaSum, TabletSums


@click.command()
@click.argument("name")
@record_option
@masters_option
@timeout_option
@json_option
def verify(name: str, record: str, masters: str, timeout_s: float, as_json: bool) -> None:
    """Compare all replicas of a table with each other: each sums up its own rows as they are at one moment.

    It reads the whole table on each node, while programs write to it. No row leaves a node. Exit code 1: replicas hold other rows;
    75: some did not answer, so nobody knows. With --record the sums are kept in a file with a checksum of its own.

    \b
    Examples:
      stele table verify flights
      stele table verify flights --record s3://bucket/proofs
    """

    async def work(client: AsyncClient) -> tuple[list[TabletSums], str, str]:
        from stele.client.replica_sums import compare_replicas

        table = await client.open_table(name)
        found = await compare_replicas(client, table)
        return found, table.info.table_id, client.identity.cluster_id

    started = time.monotonic()
    found, table_id, cluster_id = with_client(masters, work, timeout_s)
    rows = sum(each.rows for each in found)
    proof = {
        "cluster": cluster_id,
        "table": name,
        "id": table_id,
        "equal": all(each.equal for each in found),
        "rows": rows,
        "tablets": [_as_json(each) for each in found],
    }
    file = keep(record, f"replicas-{table_id[:8]}", proof) if record else ""
    if as_json:
        show_json(proof | ({"record": file} if file else {}))
    for each in found:
        for line in _faults(each):
            say(line, err=True)
    if any(each.differs for each in found):
        click.get_current_context().exit(NO)
    if silent := [each for each in found if not each.equal]:
        raise Retryable(
            f"not all replicas of {plural(len(silent), 'tablet')} answered, so nobody knows whether they are equal; "
            "`stele ksck` shows what is wrong",
            code=Code.UNAVAILABLE,
        )
    if as_json:
        return
    replicas = sum(len(each.replicas) for each in found)
    moment = utc(physical_us(min(each.snapshot for each in found)))
    say(
        f"table {name}: {plural(rows, 'row')} in {plural(len(found), 'tablet')}, equal in all {replicas} replicas, as of {moment}, "
        f"in {time.monotonic() - started:.1f} s"
    )
    if file:
        say(f"recorded in {file}")


def _faults(tablet: TabletSums) -> list[str]:
    """Describe what is wrong with a tablet, with a line for each replica; empty if nothing is wrong."""
    if tablet.equal:
        return []
    return [
        f"tablet {short(tablet.tablet_id)}, node {short(each.node_id)}: {_said(each)}"
        for each in tablet.replicas
    ]


def _said(replica: ReplicaSum) -> str:
    return replica.error or f"{plural(replica.rows, 'row')} with checksum {replica.checksum:016x}"


def _as_json(tablet: TabletSums) -> dict[str, Any]:
    return {
        "id": tablet.tablet_id,
        "snapshot": str(tablet.snapshot),
        "equal": tablet.equal,
        "replicas": [
            {"node": each.node_id, "error": each.error}
            if each.error
            else {
                "node": each.node_id,
                "rows": each.rows,
                "checksum": f"{each.checksum:016x}",
                "applied": str(each.applied),
            }
            for each in tablet.replicas
        ],
    }
