"""Finds out which streams may have lost records at a damaged place of the log. Called by recovery; pure.

A stream has lost nothing there if one of these is true:
- It was created in a later segment.
- The segment's footer says that the stream has no groups there.
- The metadata was written after everything there, and the stream needs no entry from there any more.

Invariant: every other stream becomes FAILED.
"""

from __future__ import annotations

from stele.wal.link import Damage
from stele.wal.metadata import Metadata, Position
from stele.wal.replay import Raw, Replay
from stele.wal.state import Saved, State

_FAR = 1 << 62
_HEAL = "the replica is FAILED and will be copied from its peers"


class Suspects:
    """Decides which streams may be damaged, given the damage that a replay has found."""

    def __init__(self, replay: Replay, metadata: Metadata | None) -> None:
        self._replay = replay
        self._position = metadata.position if metadata is not None else Position(0, 0)
        self._saved: dict[Raw, Saved] = {}
        if metadata is not None:
            for s in metadata.streams:
                self._saved[(bytes.fromhex(s.key.tablet_id), int(s.key.replica_id))] = s

    def judge(self, damages: list[Damage]) -> dict[Raw, str]:
        """The reason for each stream that cannot be trusted."""
        failed: dict[Raw, str] = {}
        for raw, why in self._replay.broken.items():
            failed[raw] = f"{why}; {_HEAL}"
        for raw, state in self._replay.states.items():
            if state.tombstoned:
                # It stays removed whatever was lost. But a vote may be lost, so it must not vote again.
                state.damaged |= any(not self._cleared(raw, state, d) for d in damages)
                failed.pop(raw, None)
                continue
            if state.damaged:
                failed.setdefault(raw, f"its log was found damaged at an earlier start; {_HEAL}")
            for damage in damages:
                if not self._cleared(raw, state, damage):
                    failed.setdefault(raw, f"{damage.what}; {_HEAL}")
        for damage in damages:
            if damage.footer is None or self._covers(damage):
                continue
            for raw in damage.footer:
                if raw not in self._replay.states and raw not in self._replay.forgotten:
                    failed.setdefault(raw, f"{damage.what}; {_HEAL}")
        return failed

    def _covers(self, damage: Damage) -> bool:
        """Whether the metadata was written after everything in the damaged place, so that it holds the hard
        state of all records there."""
        end = _FAR if damage.end is None else damage.end
        return (self._position.sequence, self._position.offset) >= (damage.sequence, end)

    def _cleared(self, raw: Raw, state: State, damage: Damage) -> bool:
        if state.created > damage.sequence:
            return True
        covered = self._covers(damage)
        if damage.footer is not None:
            row = damage.footer.get(raw)
            if row is None or row.last_offset < damage.offset:
                return True
            if damage.end is not None and row.first_offset >= damage.end:
                return True
            if covered and (row.last is None or row.last.index <= state.start.index):
                return True
        if not covered:
            return False
        if state.tombstoned:
            return True
        if len(state.extents):
            first = state.extents[0]
            return (first.sequence, first.offset) > (damage.sequence, damage.offset)
        saved = self._saved.get(raw)
        return saved is not None and saved.last == saved.start
