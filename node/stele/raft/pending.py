"""The membership change and the transfer that callers wait for. Shared by all roles.

Both outlive the leader that began them: a change may commit under the next leader, and a transfer succeeds
when its target leads.

Invariant: at most one of each is under way, and each is answered once.
"""

from __future__ import annotations

from stele.model.errors import Code
from stele.model.ids import OpId, ReplicaId
from stele.raft.effects import ChangeCommitted, ChangeRefused, TransferDone, TransferFailed
from stele.raft.log import LogView
from stele.raft.outbox import Outbox


class PendingChange:
    """A configuration that this replica appended as leader at `opid`. `context` is None for its own
    promotions.

    `cause`: what made the leader append it.
    """

    __slots__ = ("cause", "context", "opid")

    def __init__(self, context: int | None, opid: OpId, cause: str) -> None:
        self.context = context
        self.opid = opid
        self.cause = cause


class Transfer:
    """A transfer of leadership to `target`. `context` is None if the leader began it by itself. `cause`: as
    `TransferLeadership.cause`.

    `asked`: a TimeoutNow was sent at least once, so the target may win an election. `sent`: it was sent since the
    last tick, and need not be sent again yet.
    """

    __slots__ = ("asked", "cause", "context", "due_ms", "sent", "target")

    def __init__(self, context: int | None, target: ReplicaId, due_ms: int, cause: str) -> None:
        self.context = context
        self.cause = cause
        self.target = target
        self.due_ms = due_ms
        self.asked = False
        self.sent = False


class Pending:
    """The change and the transfer under way."""

    __slots__ = ("_log", "_outbox", "change", "transfer")

    def __init__(self, log: LogView, outbox: Outbox) -> None:
        self._log = log
        self._outbox = outbox
        self.change: PendingChange | None = None
        self.transfer: Transfer | None = None

    def cause_of_commit(self, commit_index: int) -> str:
        """The cause of the change, if a commit index of `commit_index` commits it; else ""."""
        change = self.change
        return change.cause if change is not None and change.opid.index <= commit_index else ""

    def committed(self, commit_index: int) -> None:
        """Answer the change, if its entry is committed now."""
        change = self.change
        if change is not None and change.opid.index <= commit_index:
            self.change = None
            if change.context is not None:
                config = self._log.config_at(change.opid.index)
                self._outbox.others.append(ChangeCommitted(change.context, config))

    def truncated(self, from_index: int) -> None:
        """Refuse the change, if its entry was dropped."""
        change = self.change
        if change is not None and change.opid.index >= from_index:
            self.change = None
            if change.context is not None:
                message = f"the entry {change.opid} of this change was replaced by another leader's; ask that leader"
                self._outbox.others.append(ChangeRefused(change.context, Code.NOT_LEADER, message))

    def leader_known(self, leader: ReplicaId) -> None:
        """A leader is known: complete or refuse the pending leadership transfer."""
        transfer = self.transfer
        if transfer is not None:
            if leader == transfer.target:
                self.end_transfer(None, "")
            else:
                message = f"replica {leader} leads now, not {transfer.target}"
                self.end_transfer(Code.UNAVAILABLE, message)

    def transfer_times_out(self, now_ms: int) -> bool:
        """Give the transfer up if its time is over. Returns whether it was."""
        transfer = self.transfer
        if transfer is None or now_ms < transfer.due_ms:
            return False
        self.end_transfer(Code.TIMED_OUT, f"replica {transfer.target} did not take over in time")
        return True

    def end_transfer(self, code: Code | None, message: str) -> None:
        """End the transfer, if there is one, and answer its caller.

        `code`: why it failed; None if the target leads.
        """
        transfer, self.transfer = self.transfer, None
        if transfer is not None and transfer.context is not None:
            if code is None:
                self._outbox.others.append(TransferDone(transfer.context))
            else:
                self._outbox.others.append(TransferFailed(transfer.context, code, message))
