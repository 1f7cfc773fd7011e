"""Checks the rules of the custom resources that a schema cannot express. Called by cluster_plan and tables.

The checks repeat the CEL rules, which not every API server runs, and compare the spec with what exists.
Invariant: all faults are found, not only the first.
"""

from __future__ import annotations

from stele.model import durations
from stele.model.bounds import HISTORY_DEFAULT_MS, HISTORY_MAX_MS, HISTORY_MIN_MS
from stele.model.notes import note_faults
from stele.model.ranges import RangeStep
from stele.model.steps import AddColumn, DropColumn, RenameColumn, SetHistory, Step
from stele_operator.api import CLUSTER_NAME_LENGTH_MAX
from stele_operator.api.group import TabletGroupSpec
from stele_operator.api.scalars import seconds
from stele_operator.plan.observation import Observation, Table
from stele_operator.plan.ranges import range_columns, range_faults, range_steps


def cluster_faults(o: Observation) -> tuple[str, ...]:
    """The faults of the TabletCluster; empty if there are none."""
    spec = o.cluster.spec
    if spec is None:
        return ("spec is missing",)
    faults = []
    if len(o.cluster.name) > CLUSTER_NAME_LENGTH_MAX:
        faults.append(
            f"metadata.name has {len(o.cluster.name)} characters; at most {CLUSTER_NAME_LENGTH_MAX} are allowed, because "
            "names of pods contain it"
        )
    if spec.masters.replicas not in (1, 3, 5):
        faults.append(f"masters.replicas is {spec.masters.replicas}; it must be 1, 3 or 5")
    for name in sorted(set(spec.nodes.retire) & set(spec.nodes.park)):
        faults.append(f"nodes.retire and nodes.park both name {name}; remove it from one of them")
    if (
        o.identity is not None
        and not o.identity.formed
        and len(o.identity.first_masters) != spec.masters.replicas
    ):
        faults.append(
            f"masters.replicas cannot change before the cluster has formed; set it back to {len(o.identity.first_masters)}"
        )
    return tuple(faults)


def group_faults(spec: TabletGroupSpec) -> tuple[str, ...]:
    """The faults of a TabletGroup's spec alone; empty if there are none."""
    faults = []
    names = [c.name for c in spec.columns]
    columns = {c.name: c for c in spec.columns}
    for name in sorted({n for n in names if names.count(n) > 1}):
        faults.append(f"columns names {name} twice")
    for name in sorted({k for k in spec.primaryKey if spec.primaryKey.count(k) > 1}):
        faults.append(f"primaryKey names {name} twice")
    for column in spec.columns:
        if column.renamedFrom is not None and column.renamedFrom in columns:
            faults.append(
                f"column {column.name} is renamedFrom {column.renamedFrom}, which columns also names"
            )
    for name in sorted({c.renamedFrom for c in spec.columns if c.renamedFrom is not None}):
        if sum(c.renamedFrom == name for c in spec.columns) > 1:
            faults.append(f"two columns are renamedFrom {name}")
    for key in spec.primaryKey:
        if key not in columns:
            faults.append(f"primaryKey names a column that columns does not have: {key}")
        elif columns[key].nullable:
            faults.append(f"a column of the primary key cannot be nullable: {key}")
        elif columns[key].type in ("float", "double"):
            faults.append(
                f"a column of the primary key cannot be {columns[key].type}: {key}; use an integer or a decimal"
            )
    for level in spec.partitioning.hash:
        for name in level.columns:
            if name not in spec.primaryKey:
                faults.append(f"partitioning.hash names a column that is not in primaryKey: {name}")
    ranged = range_columns(spec)
    for name in ranged:
        if name not in spec.primaryKey:
            faults.append(f"partitioning.range names a column that is not in primaryKey: {name}")
    for name in sorted({n for n in ranged if ranged.count(n) > 1}):
        faults.append(f"partitioning.range names {name} twice")
    if not faults:
        faults += range_faults(spec)
    kept_ms = history_ms(spec)
    if kept_ms is not None and not HISTORY_MIN_MS <= kept_ms <= HISTORY_MAX_MS:
        faults.append(f"historyRetention is {spec.historyRetention}; it must be 1m to 3650d")
    faults += note_faults(spec.owner or "", spec.comment or "")
    if spec.replicationFactor not in (1, 3, 5, 7):
        faults.append(f"replicationFactor is {spec.replicationFactor}; it must be 1, 3, 5 or 7")
    return tuple(faults)


def table_differences(spec: TabletGroupSpec, table: Table) -> tuple[str, ...]:
    """How an existing table differs from its TabletGroup in columns, key and partitions; empty if it does not."""
    differences: list[str] = []
    wanted = {c.name: (c.type.replace(" ", ""), c.nullable) for c in spec.columns}
    there = {c.name: (c.type.replace(" ", ""), c.nullable) for c in table.columns}
    for name in [*wanted, *(n for n in there if n not in wanted)]:
        if name not in there:
            differences.append(f"column {name} is not in the table")
        elif name not in wanted:
            differences.append(f"the table has a column {name} that the TabletGroup lacks")
        elif wanted[name] != there[name]:
            differences.append(
                f"column {name} is {_typed(there[name])} in the table, but {_typed(wanted[name])} in the TabletGroup"
            )
    others = other_differences(spec, table)
    if not others and range_steps(spec, table) != ((), ()):
        others = ("the table has other ranges",)
    return (*differences, *others)


def table_steps(spec: TabletGroupSpec, table: Table) -> tuple[tuple[Step | RangeStep, ...], tuple[str, ...]]:
    """The changes that give a table the columns and ranges of its TabletGroup, and why others cannot be made."""
    wanted = {c.name: c for c in spec.columns}
    there = {c.name: c for c in table.columns}
    steps: list[Step] = []
    faults: list[str] = []
    for name, column in wanted.items():
        before = column.renamedFrom
        if before is not None and name not in there and before in there and before not in table.primary_key:
            steps.append(RenameColumn(before, name))
            there[name] = there.pop(before)
    for name, column in wanted.items():
        found, asked = there.get(name), (column.type.replace(" ", ""), column.nullable)
        if found is None and column.nullable:
            steps.append(AddColumn(name, column.type, nullable=True))
        elif found is None:
            faults.append(
                f"column {name} cannot be added: stored rows need a value; make it nullable, or add it with a default by "
                "`stele table alter`"
            )
        elif (found.type.replace(" ", ""), found.nullable) != asked:
            is_now = (found.type.replace(" ", ""), found.nullable)
            faults.append(
                f"column {name} is {_typed(is_now)} in the table, but {_typed(asked)} in the TabletGroup; that cannot change"
            )
    left = [name for name in there if name not in wanted and name not in table.primary_key]
    if spec.allowColumnDrop:
        steps[:0] = [DropColumn(name) for name in left]
    else:
        faults += [
            f"the table has a column {name} that the TabletGroup lacks; set allowColumnDrop to drop it with all values, "
            "or renamedFrom where it has another name now"
            for name in left
        ]
    if other_differences(spec, table):
        return tuple(steps), tuple(faults)
    ranges, more = range_steps(spec, table)
    return (*steps, *ranges), (*faults, *more)


def history_ms(spec: TabletGroupSpec) -> int | None:
    """The history retention that a TabletGroup asks for, in ms; None if it asks for none."""
    return None if spec.historyRetention is None else round(seconds(spec.historyRetention) * 1000)


def history_steps(spec: TabletGroupSpec, table: Table) -> tuple[Step, ...]:
    """The change that gives a table the history retention of its TabletGroup."""
    wanted, present = history_ms(spec), table.history_ms or HISTORY_DEFAULT_MS
    return (SetHistory(wanted),) if wanted is not None and wanted != present else ()


def other_notes(spec: TabletGroupSpec, table: Table) -> tuple[tuple[str, str], ...]:
    """Owner and comment that the TabletGroup asks for, as pairs of name and text, where the table has another
    text.
    """
    asked = (("owner", spec.owner, table.owner), ("comment", spec.comment, table.comment))
    return tuple((name, wanted) for name, wanted, is_now in asked if wanted is not None and wanted != is_now)


def _quoted(text: str) -> str:
    from stele.model.column import (
        shown,
    )  # with its libraries it takes 50 MB, for a text that is rarely needed

    return shown(text)


def note_differences(spec: TabletGroupSpec, table: Table) -> tuple[str, ...]:
    """How a table differs from its TabletGroup in owner, comment and history retention, in words."""
    present = {"owner": table.owner, "comment": table.comment}
    found = [
        f"the {name} of the table is {_quoted(present[name]) if present[name] else 'empty'}"
        for name, _ in other_notes(spec, table)
    ]
    if history_steps(spec, table):
        kept = durations.text(table.history_ms or HISTORY_DEFAULT_MS)
        found.append(f"the history retention of the table is {kept}")
    return tuple(found)


def other_differences(spec: TabletGroupSpec, table: Table) -> tuple[str, ...]:
    """How a table differs from its TabletGroup in the key and the partitions, which cannot change."""
    differences = []
    if tuple(spec.primaryKey) != table.primary_key:
        differences.append(f"the primary key of the table is ({', '.join(table.primary_key)})")
    hashes = tuple((tuple(h.columns), h.buckets) for h in spec.partitioning.hash)
    if (hashes, range_columns(spec)) != (table.hash, table.range.columns if table.range is not None else ()):
        differences.append("the table is partitioned in another way")
    return tuple(differences)


def _typed(column: tuple[str, bool]) -> str:
    return f"{column[0]}{' nullable' if column[1] else ''}"
