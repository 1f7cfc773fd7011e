"""Recognizes a folder that was copied from another one, and makes the copy a cluster of its own. Used by
`keeper` and by the command.

Owns: nothing. A copy is like a cluster that was restored from a backup: the same objects under new uids, the
same volumes, and no pods yet. So the operator sees that the claims are copies. Invariant: a folder that was
only moved keeps its identity.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stele_local.folder import STATE
from stele_local.kinds import EVENT, JOB, POD

Json = dict[str, Any]
Table = tuple[str, str]
_OF_THE_ORIGINAL = (POD.key, JOB.key, EVENT.key, ("coordination.k8s.io", "leases"))
"""Kinds whose objects a copy leaves out, because they are about processes of the original."""


def original_of(home: Path) -> Path | None:
    """The folder from which `home` was copied, if its cluster is still there; None if `home` is no copy."""
    mine = _identity(home)
    there = Path(mine.get("folder") or home)
    if there == home or _identity(there).get("token") != mine.get("token"):
        return None
    return there


def _identity(home: Path) -> Json:
    try:
        identity: Json = json.loads((home / STATE).read_text())["identity"]
        return dict(identity)
    except (OSError, ValueError, KeyError, TypeError):  # `keeper.load` says what is wrong with it
        return {}


def as_new(objects: Iterable[tuple[Table, Json]]) -> list[tuple[Table, Json]]:
    """The objects of a copy. Each gets a uid of its own, and references by uid are changed to match."""
    kept = [(table, obj) for table, obj in objects if table not in _OF_THE_ORIGINAL]
    uids = {obj["metadata"]["uid"]: str(uuid.uuid4()) for _, obj in kept}
    return [(table, _renewed(obj, uids)) for table, obj in kept]


def _renewed(obj: Json, uids: dict[str, str]) -> Json:
    metadata = {**obj["metadata"], "uid": uids[obj["metadata"]["uid"]]}
    if owners := metadata.get("ownerReferences"):
        metadata["ownerReferences"] = [
            {**owner, "uid": uids.get(owner["uid"], owner["uid"])} for owner in owners
        ]
    new = {**obj, "metadata": metadata}
    reference = (obj.get("spec") or {}).get("claimRef")
    if reference and reference.get("uid") in uids:
        new["spec"] = {**obj["spec"], "claimRef": {**reference, "uid": uids[reference["uid"]]}}
    return new
