"""`stele-restore`: runs `stele backup restore` with its work spread over Spark's executors."""

from __future__ import annotations

from stele.cli.restore import restore as command
from stele_spark.submitted import main as run


def main() -> None:
    """Entry point of `stele-restore`."""
    run("stele-restore", command, "stele backup restore")


if __name__ == "__main__":
    main()
