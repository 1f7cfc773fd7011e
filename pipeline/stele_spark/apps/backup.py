"""`stele-backup`: runs `stele backup create` with its work spread over Spark's executors."""

from __future__ import annotations

from stele.cli.backup import create as command
from stele_spark.submitted import main as run


def main() -> None:
    """Entry point of `stele-backup`."""
    run("stele-backup", command, "stele backup create")


if __name__ == "__main__":
    main()
