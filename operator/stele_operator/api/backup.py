"""TabletBackup, TabletBackupSchedule and TabletRestore, as a user asks for them. Read by errands, written to
crds/ by generate.

Invariants: every field has an effect today. Published defaults never change. Fields from which a Job was made
cannot change.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field

from stele_operator.api.base import Model, rule, with_rules
from stele_operator.api.cluster import DeletionPolicy, Resources
from stele_operator.api.group import ClusterRef, HashSpec, RangeBounds
from stele_operator.api.pods import NodeSelector, Tolerations
from stele_operator.api.scalars import ColumnName, Duration, ObjectName

TableName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\s/`'\"=-][^\s/`'\"=]*$")]
_ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}


class BackupType(StrEnum):
    """What a backup holds."""

    FULL = "Full"
    INCREMENTAL = "Incremental"
    AUTO = "Auto"


class ConcurrencyPolicy(StrEnum):
    """What happens when a backup is due while the previous one still runs."""

    FORBID = "Forbid"
    REPLACE = "Replace"


class SecretRef(Model):
    """A Secret in the same namespace."""

    name: ObjectName = Field(description="Name of the Secret.")


class Target(Model):
    """The folder that holds backups."""

    model_config = ConfigDict(
        json_schema_extra=with_rules(
            rule("has(self.uri) != has(self.claimName)", "give either uri or claimName"),
            rule(
                "!has(self.path) || has(self.claimName)",
                "path is a folder of the volume, so it needs claimName",
            ),
        )
    )

    uri: (
        Annotated[str, Field(min_length=1, max_length=1_024, pattern=r"^[a-z][a-z0-9+.-]*://\S+$")] | None
    ) = Field(
        default=None, description="URI of the folder, such as s3://bucket/stele. Without secrets in it."
    )
    claimName: ObjectName | None = Field(
        default=None, description="A PersistentVolumeClaim in the same namespace that holds the folder."
    )
    path: (
        Annotated[
            str,
            Field(
                min_length=1,
                max_length=512,
                pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$",
            ),
        ]
        | None
    ) = Field(default=None, description="The folder on the volume of claimName. Absent: its root.")
    credentialsSecret: SecretRef | None = Field(
        default=None,
        description="A Secret whose keys are environment variables of the Job, such as AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY. The operator does not read it.",
    )


_SPARK = "Spark does the work. Absent: one process of the image of the cluster does."


class JobSettings(Model):
    """How the Job runs, and when it counts as failed."""

    backoffLimit: int = Field(
        default=3,
        ge=0,
        le=20,
        description="How often the Job is tried again after a failure that may pass. Each try continues where the one before ended.",
    )
    deadline: Duration = Field(
        default="6h", description="How long all tries may take together. After that the Job has failed."
    )
    resources: Resources | None = Field(default=None, description="CPU and memory of the Job's pod.")
    nodeSelector: NodeSelector | None = Field(
        default=None, description="Labels that a machine must have to run the pod."
    )
    tolerations: Tolerations | None = Field(
        default=None, description="Taints of machines that the pod tolerates."
    )
    serviceAccountName: ObjectName | None = Field(
        default=None,
        description="ServiceAccount of the Job's pod, for stores that grant rights by it. Its Kubernetes token is mounted only with executors of Spark. Absent: that of "
        "the cluster's pods.",
    )


def _of_spark(conf: dict[str, str]) -> dict[str, str]:
    if wrong := [key for key in conf if not key.startswith("spark.") or "=" in key]:
        raise ValueError(f"{wrong[0]}: expected a setting of Spark, which begins with spark.")
    return conf


Conf = Annotated[
    dict[str, Annotated[str, Field(max_length=4_096)]],
    Field(
        max_length=64,
        json_schema_extra=with_rules(
            rule(
                "self.all(k, k.startsWith('spark.'))",
                "conf has a key that is no setting of Spark; all begin with spark.",
            )
        ),
    ),
    AfterValidator(_of_spark),
]


class SparkSettings(Model):
    """Spark does the work, with a task for each tablet."""

    image: Annotated[str, Field(min_length=1, max_length=512)] = Field(
        description="Image with Spark: the target `spark` of Stele's Dockerfile, or one that is built on it."
    )
    executors: int = Field(
        default=0,
        ge=0,
        le=200,
        description="Pods that do the work. 0: the Job's own pod does it on all its cores. Otherwise job.serviceAccountName must have "
        "the rights that Spark needs, and its token is mounted.",
    )
    conf: Conf = Field(
        default_factory=dict,
        description="Settings of Spark, such as spark.executor.memory. Settings that the operator gives take precedence.",
    )


class Retention(Model):
    """Which backups of the folder to keep: each that at least one of the two fields keeps."""

    keepFull: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="How many full backups to keep of each set of tables. Whatever is newer than the oldest of them is kept.",
    )
    keepDays: int | None = Field(
        default=None, ge=1, le=36_500, description="Keep backups that are at most this many days old."
    )


Names = Annotated[list[TableName], Field(max_length=256)]
Groups = Annotated[list[ObjectName], Field(max_length=256)]


class BackupBody(Model):
    """What is backed up, how, and to which folder."""

    clusterRef: ClusterRef = Field(description="The TabletCluster, in the same namespace.")
    groups: Groups = Field(
        default_factory=list,
        description="TabletGroups whose tables are backed up.",
        json_schema_extra=_ATOMIC,
    )
    tables: Names = Field(
        default_factory=list,
        description="Tables that are backed up, by name. groups and tables both empty: all tables of the cluster.",
        json_schema_extra=_ATOMIC,
    )
    target: Target = Field(description="Where the backup goes.")
    type: BackupType = Field(
        default=BackupType.FULL,
        description="Full: all rows. Incremental: what changed since the newest backup of the same tables in the folder. Auto: "
        "Incremental, or Full where no incremental one is possible.",
    )
    holdFor: Duration | None = Field(
        default=None,
        description="How long the tables' history is kept afterwards, so that an incremental backup can follow. Absent: 2d unless "
        "type is Full, and in a schedule twice the time until the next one.",
    )
    retention: Retention = Field(
        default_factory=Retention,
        description="Which older backups of the folder are removed afterwards. Absent: none.",
    )
    job: JobSettings = Field(default_factory=JobSettings, description="How the Job runs.")
    spark: SparkSettings | None = Field(default=None, description=_SPARK)


_SAME = "a TabletBackup cannot change, except for deletionPolicy; create another one"


class TabletBackupSpec(BackupBody):
    """One backup of tables of a TabletCluster."""

    model_config = ConfigDict(
        json_schema_extra=with_rules(
            rule(
                "self.clusterRef == oldSelf.clusterRef && self.target == oldSelf.target && self.type == oldSelf.type",
                _SAME,
            ),
            rule("self.groups == oldSelf.groups && self.tables == oldSelf.tables", _SAME),
            rule("has(self.at) == has(oldSelf.at) && (!has(self.at) || self.at == oldSelf.at)", _SAME),
        )
    )

    at: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        default=None,
        description="The moment whose rows are backed up, in ISO 8601. It must lie within the tables' history. Absent: when the backup begins.",
    )
    deletionPolicy: DeletionPolicy = Field(
        default=DeletionPolicy.RETAIN,
        description="Retain: the data stay when this resource is deleted. Delete: they are removed first, unless another backup builds "
        "on them.",
    )


Cron = Annotated[str, Field(min_length=9, max_length=256, pattern=r"^\S+( +\S+){4}$")]


class HistoryLimit(Model):
    """How many finished TabletBackups stay as objects. Their data stay independently of this."""

    succeeded: int = Field(default=10, ge=1, le=100, description="How many that succeeded stay.")
    failed: int = Field(default=3, ge=1, le=100, description="How many that failed stay.")


class Drill(Model):
    """A restore for practice. The tables get other names, are compared with the backup, and are deleted."""

    schedule: Cron = Field(
        description="When: minute, hour, day of month, month, day of week; in the timeZone of the schedule."
    )
    replicationFactor: int | None = Field(
        default=None,
        description="Replicas of the tables of the drill. Absent: as in the backup.",
        json_schema_extra={"enum": [1, 3, 5, 7]},
    )
    job: JobSettings = Field(default_factory=JobSettings, description="How the Job runs.")


class TabletBackupScheduleSpec(Model):
    """Backups of tables of a TabletCluster at regular times."""

    schedule: Cron = Field(
        description="When: minute, hour, day of month, month, day of week, as in cron: `30 2 * * *` is 02:30 each day."
    )
    timeZone: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_+/-]+$")] = Field(
        default="Etc/UTC", description="The time zone of the times, such as Europe/Berlin."
    )
    suspend: bool = Field(
        default=False, description="While true no new backup begins. Times that pass are skipped."
    )
    concurrencyPolicy: ConcurrencyPolicy = Field(
        default=ConcurrencyPolicy.FORBID,
        description="Forbid: the next backup waits for the one that runs. Replace: the one that runs is given up.",
    )
    startingDeadline: Duration = Field(
        default="1h",
        description="A backup that could not begin within this time is skipped, and reported as missed.",
    )
    fullEvery: Duration | None = Field(
        default=None,
        description="With type Auto: a full backup is made when the newest one is older than this. Absent: only where it must be.",
    )
    historyLimit: HistoryLimit = Field(
        default_factory=HistoryLimit, description="How many finished TabletBackups stay as objects."
    )
    drill: Drill | None = Field(default=None, description="Restores for practice. Absent: none.")
    backup: BackupBody = Field(description="The backup that is made each time.")


class RestoredTable(Model):
    """A table of the backup to restore, and its new name."""

    name: TableName = Field(description="Name of the table in the backup.")
    newName: TableName | None = Field(
        default=None, description="Name of the restored table. Absent: the same name."
    )


class RestoredRanges(Model):
    """Range partitioning of the restored tables. Each range of keys has tablets of its own."""

    columns: Annotated[list[ColumnName], Field(min_length=1, max_length=16)] = Field(
        description="Columns of the primary key.", json_schema_extra=_ATOMIC
    )
    ranges: Annotated[list[RangeBounds], Field(min_length=1, max_length=1_000)] = Field(
        description="The ranges, which may not overlap. A row of the backup that is in none of them ends the restore.",
        json_schema_extra=_ATOMIC,
    )


class TabletRestoreSpec(Model):
    """One restore of tables into a TabletCluster, as new tables."""

    model_config = ConfigDict(
        json_schema_extra=with_rules(
            rule("self == oldSelf", "a TabletRestore cannot change; create another one"),
            rule("!(has(self.backup) && has(self.time))", "give backup or time, not both"),
        )
    )

    clusterRef: ClusterRef = Field(
        description="The TabletCluster that gets the tables, in the same namespace. The restore waits until it is Ready."
    )
    source: Target = Field(description="The folder that holds the backup.")
    backup: Annotated[str, Field(min_length=4, max_length=64, pattern=r"^[0-9]{4}[0-9TZa-f-]*$")] | None = (
        Field(default=None, description="The id of the backup, or its first digits. Absent: the newest.")
    )
    time: Annotated[str, Field(min_length=1, max_length=64)] | None = Field(
        default=None,
        description="Take the newest backup whose rows are of this time or earlier, in ISO 8601.",
    )
    tables: Annotated[list[RestoredTable], Field(max_length=256)] = Field(
        default_factory=list,
        description="Tables that are restored. Empty: all tables of the backup.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    hash: Annotated[list[HashSpec], Field(max_length=4)] = Field(
        default_factory=list,
        description="Another hash partitioning, for all these tables. hash empty and range absent: the partitioning of the backup.",
        json_schema_extra=_ATOMIC,
    )
    range: RestoredRanges | None = Field(
        default=None,
        description="Other ranges, for all these tables. With hash alone a table gets one range with all keys.",
    )
    replicationFactor: int | None = Field(
        default=None,
        description="Replicas of each tablet. Absent: as in the backup.",
        json_schema_extra={"enum": [1, 3, 5, 7]},
    )
    verify: bool = Field(
        default=True, description="Whether the restored tables are compared with the backup at the end."
    )
    spark: SparkSettings | None = Field(default=None, description=_SPARK)
    job: JobSettings = Field(default_factory=JobSettings, description="How the Job runs.")
