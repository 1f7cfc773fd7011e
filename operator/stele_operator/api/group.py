"""TabletGroup: a table, as a user asks for it. Read by observe, written to crds/ by generate.

Invariants: every field has an effect today. Published defaults never change.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from stele.model.notes import COMMENT_CHARS_MAX, OWNER_CHARS_MAX
from stele_operator.api.base import Model, rule, with_rules
from stele_operator.api.cluster import DeletionPolicy
from stele_operator.api.scalars import CLUSTER_NAME, ColumnName, Duration, KeyText

COLUMN_TYPE = (
    r"^(bool|int8|int16|int32|int64|float|double|string|binary|date|timestamp"
    r"|decimal\([1-9][0-9]?,[0-9]{1,2}\))$"
)


class ClusterRef(Model):
    """A TabletCluster in the same namespace."""

    name: Annotated[str, Field(min_length=1, max_length=40, pattern=CLUSTER_NAME)] = Field(
        description="Name of the TabletCluster."
    )


class ColumnSpec(Model):
    """A typed column."""

    name: ColumnName = Field(description="Name of the column, unique in the table.")
    type: Annotated[str, Field(max_length=32, pattern=COLUMN_TYPE)] = Field(
        description="bool, int8, int16, int32, int64, float, double, decimal(p,s), string, binary, date or timestamp. "
        "Cannot change.",
        json_schema_extra=with_rules(rule("self == oldSelf", "the type of a column cannot change")),
    )
    nullable: bool = Field(
        default=False,
        description="Whether a row may leave it out. Cannot change.",
        json_schema_extra=with_rules(rule("self == oldSelf", "nullable cannot change")),
    )
    renamedFrom: ColumnName | None = Field(
        default=None,
        description="The name that the column had. A column of the table with that name gets this one.",
    )


class HashSpec(Model):
    """Hash partitioning. Rows are spread over buckets by a hash of key columns."""

    columns: Annotated[list[ColumnName], Field(min_length=1, max_length=16)] = Field(
        description="Columns of the primary key.", json_schema_extra={"x-kubernetes-list-type": "atomic"}
    )
    buckets: int = Field(ge=2, le=1024, description="Number of buckets.")


KeyValues = Annotated[list[KeyText], Field(min_length=1, max_length=16)]


class RangeBounds(Model):
    """A range of keys. Each bound has a value for each range column."""

    from_: KeyValues | None = Field(
        default=None,
        alias="from",
        description="The first key of the range. Absent: no lower bound.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )
    to: KeyValues | None = Field(
        default=None,
        description="The first key after the range. Absent: no upper bound.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )


class RangeSpec(Model):
    """Range partitioning. Each range of keys has tablets of its own."""

    columns: Annotated[list[ColumnName], Field(min_length=1, max_length=16)] = Field(
        description="Columns of the primary key. Cannot change.",
        json_schema_extra={
            "x-kubernetes-list-type": "atomic",
            **with_rules(rule("self == oldSelf", "partitioning.range.columns cannot change")),
        },
    )
    ranges: Annotated[list[RangeBounds], Field(min_length=1, max_length=1_000)] = Field(
        description="The ranges, which may not overlap; gaps are allowed. New ones are added to the table. See "
        "allowRangeDrop for others.",
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
    )


class Partitioning(Model):
    """How rows are spread over tablets."""

    model_config = ConfigDict(
        json_schema_extra=with_rules(
            rule(
                "has(self.range) == has(oldSelf.range)",
                "partitioning cannot change, except for partitioning.range.ranges",
            )
        )
    )

    hash: Annotated[list[HashSpec], Field(max_length=4)] = Field(
        default_factory=list,
        description="One tablet per combination of buckets, in each range. Empty: one tablet. Cannot change.",
        json_schema_extra={
            "x-kubernetes-list-type": "atomic",
            **with_rules(
                rule("self == oldSelf", "partitioning cannot change, except for partitioning.range.ranges")
            ),
        },
    )
    range: RangeSpec | None = Field(
        default=None,
        description="Ranges of keys. Absent: one range with all keys. A table is made with ranges or without.",
    )


class TabletGroupSpec(Model):
    """A table of a TabletCluster."""

    model_config = ConfigDict(
        json_schema_extra=with_rules(
            rule(
                "self.primaryKey.all(k, self.columns.exists(c, c.name == k))",
                "primaryKey names a column that columns does not have",
            ),
            rule(
                "self.columns.all(c, !(c.name in self.primaryKey) || !has(c.nullable) || !c.nullable)",
                "a column of the primary key cannot be nullable",
            ),
            rule(
                "self.columns.all(c, !(c.name in self.primaryKey) || !(c.type in ['float', 'double']))",
                "a column of the primary key cannot be float or double; use an integer or a decimal",
            ),
            rule(
                "!has(self.partitioning) || !has(self.partitioning.hash) || "
                "self.partitioning.hash.all(h, h.columns.all(k, k in self.primaryKey))",
                "partitioning.hash names a column that is not in primaryKey",
            ),
            rule(
                "!has(self.partitioning) || !has(self.partitioning.range) || "
                "self.partitioning.range.columns.all(k, k in self.primaryKey)",
                "partitioning.range names a column that is not in primaryKey",
            ),
            rule(
                "has(self.tableName) == has(oldSelf.tableName)",
                "tableName cannot change; create another TabletGroup instead",
            ),
        )
    )

    clusterRef: ClusterRef = Field(
        description="The TabletCluster that holds the table, in the same namespace. Cannot change.",
        json_schema_extra=with_rules(rule("self == oldSelf", "clusterRef cannot change")),
    )
    tableName: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\s/`'\"]+$")] | None = Field(
        default=None,
        description="Name of the table. Absent: the name of this resource. Cannot change.",
        json_schema_extra=with_rules(
            rule("self == oldSelf", "tableName cannot change; create another TabletGroup instead")
        ),
    )
    replicationFactor: int = Field(
        default=3,
        description="Replicas of each tablet, each on its own machine: 1, 3, 5 or 7. After a change the replicas are added or "
        "removed one at a time, while the table is used.",
        json_schema_extra={"enum": [1, 3, 5, 7]},
    )
    columns: Annotated[list[ColumnSpec], Field(min_length=1, max_length=256)] = Field(
        description="The columns. New ones are added to the table and must be nullable. See allowColumnDrop and "
        "renamedFrom for others.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    allowColumnDrop: bool = Field(
        default=False,
        description="Whether columns of the table that this list lacks are dropped, with all their values.",
    )
    primaryKey: Annotated[list[ColumnName], Field(min_length=1, max_length=16)] = Field(
        description="The columns that identify a row. Rows are sorted by them in this order. Cannot change.",
        json_schema_extra={
            "x-kubernetes-list-type": "atomic",
            **with_rules(
                rule("self == oldSelf", "primaryKey cannot change"),
                rule("self.all(k, self.exists_one(o, o == k))", "primaryKey names a column twice"),
            ),
        },
    )
    partitioning: Partitioning = Field(
        default_factory=Partitioning,
        description="How rows are spread over tablets. Only partitioning.range.ranges can change.",
    )
    allowRangeDrop: bool = Field(
        default=False,
        description="Whether ranges of the table that are not in partitioning.range.ranges are dropped, with all their rows.",
    )
    owner: Annotated[str, Field(max_length=OWNER_CHARS_MAX)] | None = Field(
        default=None,
        description="Who the table belongs to, for people: no rights follow from it. Absent: it is left as it is.",
    )
    comment: Annotated[str, Field(max_length=COMMENT_CHARS_MAX)] | None = Field(
        default=None, description="What the table is for. Absent: it is left as it is."
    )
    historyRetention: Duration | None = Field(
        default=None,
        description="How long replaced and deleted rows stay readable at older snapshots, such as 168h; 1m to 3650d. They use disk "
        "meanwhile. Absent: 15m for a new table, and as it is for an existing one.",
    )
    deletionPolicy: DeletionPolicy = Field(
        default=DeletionPolicy.RETAIN,
        description="Retain: the table stays when this resource is deleted. Delete: it is dropped too, and can be recalled for a time with `stele table recall`.",
    )
