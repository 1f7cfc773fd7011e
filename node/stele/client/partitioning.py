"""`stele.hash` and `stele.range`, and checks of the partitioning that `create_table` gets. Pure; asks nobody.

The two functions have the names that users write, so this file does not use the builtins of those names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from stele.client.arguments import refusal, whole_number
from stele.model.column import shown
from stele.model.errors import Rejected
from stele.model.partition import PartitionSchema
from stele.model.partitioning import HashPartitioning, Partitioning, RangePartitioning, by_ids
from stele.model.schema import Schema

Partitionings: TypeAlias = Partitioning | Sequence[Partitioning] | PartitionSchema | None
"""What `create_table` accepts: one, several, or None for one tablet. The command line passes a
PartitionSchema."""

_EXPECTED = "stele.hash(...), stele.range(...), or a list of these"
_KINDS = (HashPartitioning, RangePartitioning)
_SEED_MAX = (1 << 32) - 1


def hash(*columns: str, buckets: int, seed: int = 0) -> HashPartitioning:
    """Spread the rows of a new table over tablets by the hash of these key columns.

    Args:
        columns: Names of key columns.
        buckets: How many tablets, 2 or more.
        seed: A 32-bit number. Tables with different seeds place the same row differently.

    Raises:
        Rejected: A column is not text, there is no column, or a number is out of bounds.

    Example:
        >>> schema = stele.Schema.make([("day", "date"), ("name", "string")], key=["day", "name"])
        >>> table = client.create_table("by_hash", schema, stele.hash("day", "name", buckets=4))
        >>> client.describe("by_hash").tablets
        4
    """
    return HashPartitioning(
        _names("hash", columns),
        whole_number(buckets, "buckets", least=2),
        whole_number(seed, "seed", least=0, most=_SEED_MAX),
    )


def range(
    *columns: str, split_at: Iterable[Any] = (), ranges: Iterable[Sequence[Any]] = ()
) -> RangePartitioning:
    """Split a new table at these values: the rows from one value up to the next are one tablet. Or name its ranges.

    Args:
        columns: Names of key columns.
        split_at: Ascending values; each is the first of its range. With several columns each is a tuple.
        ranges: In place of `split_at`: pairs like (0, 1000), from inclusive and to exclusive; None for no bound.
            Rows in none of them are refused. Table.alter adds and drops ranges later.

    Raises:
        Rejected: A column is not text, there is no column, or `split_at` or `ranges` is not a list.

    Example:
        >>> schema = stele.Schema.make([("n", "int64"), ("text", "string")], key=["n"])
        >>> table = client.create_table("by_range", schema, stele.range("n", split_at=[1000, 2000]))
        >>> client.describe("by_range").tablets
        3
    """
    if isinstance(split_at, (str, bytes)) or not isinstance(split_at, Iterable):
        raise refusal("split_at", split_at, "a list of values, like [1000, 2000]")
    if isinstance(ranges, (str, bytes)) or not isinstance(ranges, Iterable):
        raise refusal("ranges", ranges, "a list of pairs, like [(0, 1000), (1000, None)]")
    pairs: list[Any] = [tuple(pair) if isinstance(pair, list) else pair for pair in ranges]
    return RangePartitioning(_names("range", columns), tuple(split_at), tuple(pairs))


def _names(kind: str, columns: Sequence[Any]) -> tuple[str, ...]:
    if columns and all(isinstance(name, str) for name in columns):
        return tuple(columns)
    given = ", ".join(map(shown, columns)) or "no columns"
    raise Rejected(f"{kind} of {given}: expected names of key columns, like {kind}('day', ...)")


def partition_schema(given: Any, schema: Schema) -> PartitionSchema:
    """The caller's partitioning, by column ids.

    Raises:
        Rejected: it is not a partitioning, or has faults; lists all of them.
    """
    if isinstance(given, PartitionSchema):
        if faults := given.faults(schema):
            raise Rejected("partitioning: " + "; ".join(faults))
        return given
    try:
        return by_ids(_parts(given), schema)
    except Rejected as exc:
        raise Rejected(f"partitioning: {exc.args[0]}") from None


def _parts(given: Any) -> list[Partitioning]:
    if given is None:
        return []
    if isinstance(given, _KINDS):
        return [given]
    found = given if isinstance(given, (list, tuple)) else [given]
    for part in found:
        if not isinstance(part, _KINDS):
            raise Rejected(f"{shown(part)}: expected {_EXPECTED}")
    return list(found)
