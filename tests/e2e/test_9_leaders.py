"""Every node's pod is deleted in turn: it hands its leaders over and comes back, and within a minute leaders are spread."""

from __future__ import annotations

import json
import time
from collections import Counter
from functools import partial

from stele.driver.leader_balance import Group, shares
from tests.e2e.bench import CLUSTER, Bench

MASTERS = f"{CLUSTER}-masters:7051"
WITHIN_S = 60.0


def groups(bench: Bench, pod: str = "") -> list[Group]:
    """The table's tablets: who leads each, and which nodes have replicas of it. By the masters' view, asked in `pod`, with one
    command: each takes seconds on a busy machine."""
    pod = pod or bench.pods("node")[0].metadata.name
    found = []
    for tablet in json.loads(bench.execute(pod, "stele", "ksck", "--json", "--masters", MASTERS))["tablets"]:
        if tablet["table_name"] == "(catalog)":
            continue
        if tablet["leader"] not in tablet["members"]:
            return []  # between two leaders
        places = tuple(sorted(tablet["members"]))
        found.append(Group(tablet["tablet_id"], tablet["table_name"], tablet["leader"], places))
    return found


def spread(bench: Bench) -> bool:
    """Whether no node leads more than one tablet above its share."""
    found = groups(bench)
    share, load = shares(found), Counter(g.leader for g in found)
    return bool(found) and all(load[n] <= share[n] + 1 for n in load)


def spread_soon(bench: Bench) -> None:
    """Wait until they are spread: within a minute after anything that was done to the cluster."""
    bench.until("no node leads more than one above its share", lambda: spread(bench), WITHIN_S)


def back(bench: Bench, name: str, uid: str) -> bool:
    """Whether another pod of this name serves, and the cluster is whole."""
    pod = bench.pod(name)
    return bool(pod) and pod.metadata.uid != uid and bench.whole()


def test_leaders_are_spread_after_the_restart_of_each_node(bench: Bench) -> None:
    bench.have(patient=True)
    for name in sorted(p.metadata.name for p in bench.pods("node")):
        uid = bench.pod(name).metadata.uid
        bench.core.delete_namespaced_pod(name, bench.kube.namespace)
        bench.until(f"{name} is back", partial(back, bench, name, uid), 240)
    started = time.time()
    spread_soon(bench)
    bench.note(f"          leaders: {sorted(Counter(g.leader for g in groups(bench)).values())}")
    moved = bench.told("LeadersMoved", started - 600)
    assert all("leaders in " in m or "1 leader in " in m for m in moved), moved
