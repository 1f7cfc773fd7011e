"""Converts schemas and partitionings to messages and back. Called by master, node, client and command line.

Invariant: `x_from_pb(x_to_pb(x)) == x`. A message that is not a valid schema is a `Rejected` that lists all
faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stele.model.column import Column
from stele.model.errors import Rejected
from stele.model.ids import ColumnId, SchemaVersion
from stele.model.partition import HashPartition, Partition, PartitionSchema, RangePartition
from stele.model.ranges import AddRange, DropRange, RangeStep
from stele.model.schema import Schema
from stele.model.steps import AddColumn, ChangeDefault, DropColumn, RenameColumn, SetHistory, Step
from stele.rpc.proto import common_pb2, master_pb2


def schema_to_pb(schema: Schema) -> common_pb2.SchemaPB:
    """A schema as a message."""
    return common_pb2.SchemaPB(
        version=schema.version,
        columns=[
            common_pb2.ColumnPB(
                id=column.id,
                name=column.name,
                type=column.type,
                nullable=column.nullable,
                default_value=_bytes_of(column.default),
                read_default=_bytes_of(column.read_default),
            )
            for column in schema.columns
        ],
        key_column_ids=schema.key_column_ids,
        next_column_id=schema.next_column_id,
        history_ms=schema.history_ms,
    )


def schema_from_pb(pb: common_pb2.SchemaPB) -> Schema:
    """A schema.

    Raises:
        Rejected: INVALID_ARGUMENT; lists all faults of the schema.
    """
    return Schema(
        version=SchemaVersion(pb.version),
        columns=tuple(
            Column(
                ColumnId(column.id),
                column.name,
                column.type,
                column.nullable,
                _text_of(column.default_value),
                _text_of(column.read_default),
            )
            for column in pb.columns
        ),
        key_column_ids=tuple(ColumnId(i) for i in pb.key_column_ids),
        next_column_id=ColumnId(pb.next_column_id),
        history_ms=pb.history_ms,
    )


def steps_to_pb(steps: Sequence[Step | RangeStep]) -> list[master_pb2.AlterStepPB]:
    """Changes of columns and ranges as messages."""
    found = []
    for step in steps:
        pb = master_pb2.AlterStepPB()
        match step:
            case AddColumn():
                pb.add_column.CopyFrom(
                    common_pb2.ColumnPB(
                        name=step.name,
                        type=step.type,
                        nullable=step.nullable,
                        default_value=_bytes_of(step.default),
                    )
                )
            case DropColumn():
                pb.drop_column = step.name
            case RenameColumn():
                pb.rename_column.name, pb.rename_column.new_name = step.name, step.new_name
            case ChangeDefault():
                pb.change_default.name = step.name
                pb.change_default.default_value = _bytes_of(step.default)
            case SetHistory():
                pb.set_history_ms = step.history_ms
            case AddRange():
                pb.add_range.CopyFrom(master_pb2.RangePB(range_start=step.start, range_end=step.end))
            case DropRange():
                pb.drop_range.CopyFrom(master_pb2.RangePB(range_start=step.start, range_end=step.end))
        found.append(pb)
    return found


def steps_from_pb(pbs: Iterable[master_pb2.AlterStepPB]) -> tuple[list[Step], list[RangeStep]]:
    """Changes of columns, and changes of ranges.

    Raises:
        Rejected: a step that this program does not know.
    """
    found: list[Step] = []
    ranges: list[RangeStep] = []
    for pb in pbs:
        match pb.WhichOneof("step"):
            case "add_column":
                column = pb.add_column
                default = _text_of(column.default_value)
                found.append(AddColumn(column.name, column.type, column.nullable, default))
            case "drop_column":
                found.append(DropColumn(pb.drop_column))
            case "rename_column":
                found.append(RenameColumn(pb.rename_column.name, pb.rename_column.new_name))
            case "change_default":
                change = pb.change_default
                found.append(ChangeDefault(change.name, _text_of(change.default_value)))
            case "set_history_ms":
                found.append(SetHistory(pb.set_history_ms))
            case "add_range":
                ranges.append(AddRange(pb.add_range.range_start, pb.add_range.range_end))
            case "drop_range":
                ranges.append(DropRange(pb.drop_range.range_start, pb.drop_range.range_end))
            case _:
                raise Rejected(
                    "alter: a change of a kind that this program does not know; expected add, drop, rename, default or history"
                )
    return found, ranges


def _bytes_of(default: str | None) -> bytes:
    return b"" if default is None else default.encode()


def _text_of(default: bytes) -> str | None:
    return default.decode("utf-8", "replace") if default else None


def partitioning_to_pb(partitioning: PartitionSchema) -> common_pb2.PartitioningPB:
    """A partitioning as a message."""
    pb = common_pb2.PartitioningPB(
        hash=[
            common_pb2.HashPartitionPB(column_ids=part.column_ids, buckets=part.buckets, seed=part.seed)
            for part in partitioning.hash
        ]
    )
    if partitioning.range is not None:
        pb.range.column_ids.extend(partitioning.range.column_ids)
        pb.range.split_keys.extend(partitioning.range.split_keys)
        pb.range.numbers.extend(partitioning.range.numbers)
        pb.range.first, pb.range.next_number = partitioning.range.first, partitioning.range.next_number
    return pb


def partitioning_from_pb(pb: common_pb2.PartitioningPB) -> PartitionSchema:
    """A partitioning. `PartitionSchema.faults` checks whether it fits a schema."""
    ranged = None
    if pb.HasField("range"):
        ranged = RangePartition(
            tuple(pb.range.column_ids),
            tuple(pb.range.split_keys),
            tuple(pb.range.numbers),
            pb.range.first,
            pb.range.next_number,
        )
    return PartitionSchema(
        tuple(HashPartition(tuple(h.column_ids), h.buckets, h.seed) for h in pb.hash), ranged
    )


def partition_to_pb(partition: Partition) -> common_pb2.PartitionPB:
    """A tablet's partition as a message."""
    return common_pb2.PartitionPB(
        hash_buckets=partition.hash_buckets,
        range_start=partition.range_start,
        range_end=partition.range_end,
    )


def partition_from_pb(pb: common_pb2.PartitionPB) -> Partition:
    """A tablet's partition."""
    return Partition(tuple(pb.hash_buckets), pb.range_start, pb.range_end)
