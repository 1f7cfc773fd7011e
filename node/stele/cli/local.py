"""`stele local take-back`: what is done to a volume while no process uses it."""

from __future__ import annotations

import datetime
from pathlib import Path

import click

from stele.cli.output import say

FLAG = "--may-lose-acknowledged-writes"


@click.command()
@click.option(
    "--data-dir",
    required=True,
    type=click.Path(path_type=Path),
    help="The node's data directory, as for `node run`.",
)
@click.option(
    FLAG, "accepted", is_flag=True, help="Do it. Without this option it only says what it would break."
)
def take_back(data_dir: Path, accepted: bool) -> None:
    """Have a volume used again that the masters refused as an older copy (exit 6, VolumeOld).

    Such a volume may have forgotten votes and rows that its node acknowledged. Used again, it may elect a second leader in a
    term, and rows may be lost or change back, also on other nodes. Do it only where the newest volume is gone and too few
    other replicas are left, or where the refusal itself was wrong. Stop the node first. Its record and its log keep what was
    done; its next start asks the masters to accept it.

    Example: stele local take-back --data-dir /var/lib/stele/data --may-lose-acknowledged-writes
    """
    from stele.tserver import volume

    refused = volume.refusal_of(data_dir)
    if refused and not accepted:
        raise click.UsageError(
            f"{data_dir} was refused: {refused}. It may have forgotten votes and acknowledged rows, and using it may lose or "
            f"change rows on other nodes too. Attach the newest volume, or start a new node; or say {FLAG}"
        )
    try:
        volume.take_back(data_dir, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    except volume.Fate as exc:
        raise click.UsageError(str(exc)) from None
    say(f"{data_dir} is used again at its next start; it was refused: {refused}")
