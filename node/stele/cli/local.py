"""`stele local take-back`: works on a volume that no process uses."""

from __future__ import annotations

import datetime
from pathlib import Path

import click

from stele.cli.options import json_option
from stele.cli.output import show_done

FLAG = "--may-lose-acknowledged-writes"


@click.command()
@click.option(
    "--data-dir",
    required=True,
    type=click.Path(path_type=Path),
    help="The node's data directory, as for `node run`.",
)
@click.option(
    FLAG, "accepted", is_flag=True, help="Do it. Without this option the command only prints the risks."
)
@json_option
def take_back(data_dir: Path, accepted: bool, as_json: bool) -> None:
    """Use a volume again that the masters refused as an older copy (exit code 6, VolumeOld).

    Such a volume may lack votes and rows that its node acknowledged. Using it may elect a second leader in a
    term. Rows may be lost or change back, also on other nodes. Do this only if the newest volume is gone and
    too few other replicas are left, or if the refusal was wrong. Stop the node first. This command is
    recorded on the volume and in the node's log. At the next start the node asks the masters to accept the
    volume.

    Example: stele local take-back --data-dir /var/lib/stele/data --may-lose-acknowledged-writes
    """
    from stele.tserver import volume

    refused = volume.refusal_of(data_dir)
    if refused and not accepted:
        raise click.UsageError(
            f"{data_dir} was refused: {refused}. It may lack votes and acknowledged rows; using it may lose or change "
            f"rows, also on other nodes. Attach the newest volume or start a new node; to use it all the same, add {FLAG}"
        )
    try:
        volume.take_back(data_dir, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    except volume.Fate as exc:
        raise click.UsageError(str(exc)) from None
    show_done(
        f"the next start of the node uses {data_dir} again; it had been refused: {refused}",
        as_json,
        {"dataDir": str(data_dir), "refused": refused},
    )
