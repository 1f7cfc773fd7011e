"""An archive of the classes that a session of Spark loads, for the Javas of tests: `python -m tests.spark.archive FILE`.

To load and verify them takes half of a start's 16 s of a processor, and a run of all tests starts many Javas. Called by the
Makefile. Java uses an archive only where it has the version and the class path of before, and otherwise goes on without one. An
empty file means that this Java makes none.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "build" / "spark.jsa"
"""Where the Makefile has it made."""
SHORT = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Sessions of tests are short: a Java that compiles little, and collects in one thread."""
_FEW_ROWS = "-Dspark.sql.shuffle.partitions=2"


def options(archive: Path) -> dict[str, str]:
    """Variables for whatever starts Spark: a Java for short sessions of few rows, with the archive where there is one."""
    made = archive.is_file() and archive.stat().st_size > 0
    shared = f" -XX:SharedArchiveFile={archive} -Xlog:cds=off -Xlog:cds+dynamic=off" if made else ""
    return {"SPARK_SUBMIT_OPTS": f"{SHORT}{shared} {_FEW_ROWS}", "SPARK_LAUNCHER_OPTS": SHORT}


def make(archive: Path) -> None:
    """Run a session that ends with its archive."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.unlink(missing_ok=True)
    os.environ |= options(archive)
    os.environ["SPARK_SUBMIT_OPTS"] += (
        f" -XX:ArchiveClassesAtExit={archive} -Xlog:cds=off -Xlog:cds+dynamic=off"
    )
    from pyspark import SparkContext

    from stele_spark.session import session

    spark = session("archive", cores=2)
    spark.sparkContext.setLogLevel("OFF")
    rows = spark.range(1_000).selectExpr("id", "id % 7 as k", "cast(id as string) as name")
    rows.where("id > 5").groupBy("k").count().orderBy("k").collect()
    rows.mapInArrow(lambda batches: batches, rows.schema).toPandas()
    rows.createOrReplaceTempView("rows")
    spark.sql("SELECT a.k, max(b.name) FROM rows a JOIN rows b ON a.id = b.id GROUP BY a.k").collect()
    spark.stop()
    gateway = SparkContext._gateway
    assert gateway is not None
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()
    if not archive.exists():
        sys.stderr.write("This Java makes no archive of classes; tests of Spark start without one.\n")
        archive.touch()


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve())
