"""Keeps the cluster's state across restarts, in `state.json` of the folder. From it `up` brings back the
cluster that `down` stopped.

Owns: the file. Must not know what objects mean. Invariant: the file is one moment of the store, replaced as a
whole. A kill -9 loses at most the last second's writes, as if the API server had been restored from a backup
of that moment.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stele_local import folder
from stele_local.copies import as_new, original_of
from stele_local.kinds import EVENT
from stele_local.store import Store

Json = dict[str, Any]
PAUSE_SECONDS = 0.5  # between two writes of the file: one takes some milliseconds
_SKIPPED_VERSIONS = 100_000  # a lost write's version is never given to another one
_FORMAT = 1


class StateUnreadable(Exception):
    """The kept state cannot be read. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a cluster keeps beside its objects. `operator`: whether it runs one. `folder`: the cluster's
    folder; "" if an older version of stele_local wrote the state.
    """

    network: str
    token: str
    machines: int
    zones: int
    operator: bool = False
    folder: str = ""


def load(home: Path, store: Store) -> Identity | None:
    """Fill the store with the kept state. If there is none, return None and leave the store empty. If the
    folder is a copy, all objects are new, and the identity names the folder of the original.

    Raises:
        StateUnreadable: the state cannot be read.
    """
    path = home / folder.STATE
    try:
        state = json.loads(path.read_text())
        if state["format"] != _FORMAT:
            raise ValueError(f"format {state['format']} instead of {_FORMAT}")
        identity = Identity(**state["identity"])
        objects = [((group, plural), obj) for group, plural, obj in state["objects"]]
        if original_of(home) is not None:
            objects = as_new(objects)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        remedy = f"`{folder.as_called(home)} down --wipe` removes the cluster and its data"
        raise StateUnreadable(f"{path} cannot be read ({error}): {remedy}") from error
    store.restore(state["version"] + _SKIPPED_VERSIONS, objects)
    return identity


class Keeper:
    """Writes the file whenever something changed. Events are not kept."""

    def __init__(self, home: Path, store: Store, identity: Callable[[], Identity]) -> None:
        self._path, self._store, self._identity = home / folder.STATE, store, identity
        self._written: tuple[int, Identity] | None = None

    def step(self) -> None:
        current = self._store.version, self._identity()
        if current == self._written:
            return
        objects = [(*table, obj) for table, obj in self._store.everything() if table != EVENT.key]
        state = {"format": _FORMAT, "version": current[0], "identity": asdict(current[1]), "objects": objects}
        folder.write_private(self._path, json.dumps(state))
        self._written = current
