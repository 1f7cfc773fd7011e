"""Backups whose work is spread over Spark's executors: create, restore, compare, verify.

    from stele_spark import backup

    backup.create(spark, masters, "s3://bucket/backups", ["flights"])

Each function calls the one of the same name in `stele.backup`, with workers of Spark. It has that function's
arguments, results and errors. Invariant: all code that makes, reads or checks a backup is in `stele.backup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stele import backup as without_spark
from stele.backup import Location, Manifest, Report, Restored
from stele.client import Client
from stele_spark.workers import SparkWorkers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def create(
    spark: SparkSession, masters: str, folder: Location, tables: str | Sequence[str], **options: Any
) -> Manifest:
    """Back up tables, with one task for each tablet. `options`: those of `stele.backup.create`, without
    `parallel`.

    Executors write to `folder`, so it must be the same place for all of them.

    Example:
        >>> made = backup.create(spark, masters, "/backups", "flights")
    """
    with Client(masters) as client:
        workers = SparkWorkers(spark, masters)
        return without_spark.create(client, folder, tables, workers=workers, **options)


def restore(
    spark: SparkSession, masters: str, folder: Location, backup: str | None = None, **options: Any
) -> list[Restored]:
    """Restore tables from a backup, with one task for each tablet of the backup. `options`: those of
    `stele.backup.restore`.

    Example:
        >>> backup.restore(spark, masters, "/backups", tables={"flights": "flights_of_then"})
    """
    with Client(masters) as client:
        workers = SparkWorkers(spark, masters)
        return without_spark.restore(client, folder, backup, workers=workers, **options)


def compare(
    spark: SparkSession, masters: str, folder: Location, backup: str | None = None, **options: Any
) -> Report:
    """Check a backup against itself and against tables. `options`: those of `stele.backup.compare`.

    Example:
        >>> backup.compare(spark, masters, "/backups").differences
        []
    """
    with Client(masters) as client:
        workers = SparkWorkers(spark, masters)
        return without_spark.compare(client, folder, backup, workers=workers, **options)


def verify(spark: SparkSession, folder: Location, backup: str | None = None, **options: Any) -> Report:
    """Check a backup against itself, without a cluster. `options`: those of `stele.backup.verify`.

    Example:
        >>> backup.verify(spark, "/backups").faults
        []
    """
    return without_spark.verify(folder, backup, workers=SparkWorkers(spark), **options)
