"""Batches of a key space that are proposed but not applied yet: the keys that they change, the bytes that they add.

Owned by KeySpace; only the owner's thread calls. Invariant: no two such batches change the same key, and all of
them together fit into the key space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from stele.model.errors import Code, Rejected
from stele.model.kvop import LEASE_OPS, KeyOp, KeyOperation
from stele.tablet.pairs import PAIR_BYTES, Pairs, size_of


@dataclass(slots=True)
class _Claim:
    """What one batch changes: `written`, the keys that only it may change; `growth`, the bytes that it adds."""

    written: Sequence[bytes]
    growth: int = 0


class Claims:
    """The claims of one key space. `pairs`: its keys and values."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self._owner: dict[bytes, int] = {}  # by key: the token of the batch that changes it
        self._claims: dict[int, _Claim] = {}
        self._growth = 0
        self._next_token = 1

    def __len__(self) -> int:
        return len(self._claims)

    def growth_of(self, operations: Sequence[KeyOperation], bytes_max: int) -> int:
        """By how many bytes the key space grows with a batch. 0 if it shrinks.

        Raises:
            Rejected: TOO_LARGE: with all claimed batches it would exceed `bytes_max`.
        """
        growth = max(0, sum(map(self._grows_by, operations)))
        held = self._pairs.bytes + self._growth
        if growth and held + growth > bytes_max:
            raise Rejected(
                f"the key space has {held} bytes and would grow by {growth}, counting {PAIR_BYTES} more for "
                f"each key; at most {bytes_max} are allowed; delete keys, or use another key space for some",
                code=Code.TOO_LARGE,
            )
        return growth

    def _grows_by(self, operation: KeyOperation) -> int:
        old = self._pairs.get(operation.key)
        held = 0 if old is None else size_of(operation.key, old[0])
        match operation.op:
            case KeyOp.DELETE:
                return -held
            case KeyOp.REPLACE | KeyOp.CAS:
                return size_of(operation.key, operation.value) - held
            case KeyOp.INSERT:
                # If a delete of the key, or an insert that may be refused, is pending, this insert may still
                # succeed.
                there = old is not None and operation.key not in self._owner
                return 0 if there else size_of(operation.key, operation.value)
            case KeyOp.CHECK | KeyOp.GRANT | KeyOp.REVOKE:
                return 0
            case _:
                assert_never(operation.op)

    def begin(self, operations: Sequence[KeyOperation]) -> int:
        """Claim the keys that a batch changes. Returns a token for `reserve` and `end`.

        Raises:
            Rejected: CHANGE_IN_PROGRESS: another batch changes one of the keys. ALREADY_PRESENT: an insert of a
                key that is present.
        """
        for operation in operations:
            if operation.op in LEASE_OPS:
                continue
            if operation.key in self._owner:
                raise Rejected(
                    f"key {_shown(operation.key)}: another change of it is in progress; try again",
                    code=Code.CHANGE_IN_PROGRESS,
                )
            if operation.op is KeyOp.INSERT and operation.key in self._pairs:
                raise Rejected(f"key {_shown(operation.key)} is present", code=Code.ALREADY_PRESENT)
        token = self._next_token
        self._next_token += 1
        written = [o.key for o in operations if o.op is not KeyOp.CHECK and o.op not in LEASE_OPS]
        self._owner.update(dict.fromkeys(written, token))
        self._claims[token] = _Claim(written)
        return token

    def reserve(self, token: int, growth: int) -> None:
        """Count the bytes that a batch adds, until `end`."""
        self._claims[token].growth = growth
        self._growth += growth

    def end(self, token: int) -> None:
        """Release a claim: the batch was applied, or will never be. Does nothing for an unknown token."""
        claim = self._claims.pop(token, None)
        if claim is None:
            return
        for key in claim.written:
            del self._owner[key]
        self._growth -= claim.growth


def _shown(key: bytes) -> str:
    """A key as its caller wrote it, as text if possible."""
    return repr(key.decode("utf-8", "backslashreplace"))
