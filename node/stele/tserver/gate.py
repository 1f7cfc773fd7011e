"""Refuses features until the cluster's version is finalized, because members of the release before would
misread them.

Invariant: a node that has not heard a leading master since its start allows nothing new.
"""

from __future__ import annotations

from stele.model.errors import Code, Rejected, Retryable


def require_version(present: int, needed: int, what: str) -> None:
    """Refuse `what` unless the cluster version `present` is high enough. `present` 0: not heard yet.

    Raises:
        Retryable: NOT_READY, not heard yet.
        Rejected: UNSUPPORTED_VERSION, with what to do.
    """
    if not present:
        raise Retryable(
            f"{what}: this node has not heard a leading master since its start, so it does not know the cluster version; "
            "try again",
            code=Code.NOT_READY,
        )
    if present < needed:
        raise Rejected(
            f"{what}: this needs cluster version {needed}, but the cluster has {present}, so that the release "
            "before can come back; once all masters and nodes run this release, `stele cluster finalize` allows it",
            code=Code.UNSUPPORTED_VERSION,
        )
