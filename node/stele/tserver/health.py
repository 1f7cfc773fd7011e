"""What probes and /identity answer for a node. Asks nobody and waits for nothing.

Invariant: liveness never depends on quorum, peers or disks, so that a sick cluster is not restarted in circles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stele.consensus.replica import Replica, ReplicaState
from stele.tserver.facts import NodeFacts
from stele.tserver.heartbeater import Heartbeater
from stele.tserver.replicas import Replicas
from stele.tserver.startup import Startup

READY_AFTER_MS = 30_000
"""A replica that finds no leader for so long no longer keeps a started node from being ready."""


class NodeHealth:
    """Health of one node. `ending` says "" or why it serves no more; `extra_ready` "" or why it is not ready: a master's own."""

    def __init__(
        self,
        facts: NodeFacts,
        replicas: Replicas,
        heartbeater: Heartbeater,
        startup: Startup,
        now_ms: Callable[[], int],
        *,
        ending: Callable[[], str],
        extra_ready: Callable[[], str],
    ) -> None:
        self._facts = facts
        self._replicas = replicas
        self._heartbeater = heartbeater
        self._startup = startup
        self._now_ms = now_ms
        self._ending = ending
        self._extra_ready = extra_ready
        self._caught_up = False

    def live(self) -> str:
        """The event loop answers."""
        return ""

    def started(self) -> str:
        """Whether replay is done."""
        return "" if self._replicas.opened else "replicas are being opened"

    def ready(self) -> str:
        """Serving and caught up."""
        if ending := self._ending():
            return ending
        if not self._replicas.opened:
            return "replicas are being opened"
        if not self._facts.formed:
            return "formation is not confirmed"
        why = "" if self._caught_up else self._behind()
        self._caught_up = not why
        return why or self._extra_ready()

    def _behind(self) -> str:
        waiting = [r for r in self._replicas if _starts(r)]
        if waiting and self._now_ms() - self._startup.opened_ms < READY_AFTER_MS:
            return f"{len(waiting)} replicas have not caught up"
        options = self._facts.options
        if options.role == "node" and options.masters and not self._heartbeater.leader_heard:
            return "no leader master has heard this node yet"
        return ""

    def identity(self) -> Mapping[str, Any]:
        """What /identity shows."""
        return self._facts.shown()


def _starts(replica: Replica) -> bool:
    """Whether it is to find a leader soon. None looks for a replica that the configuration does not name: a copy that is not
    added yet, or one that was removed."""
    if replica.state is ReplicaState.CONFIGURING:
        return replica.config.peer(replica.replica_id) is not None
    return replica.state is ReplicaState.BOOTSTRAPPING
