"""docs/cli.md has every command."""

from __future__ import annotations

import re

import click

from stele.cli.app import cli
from tests.docs.blocks import ROOT


def commands() -> list[str]:
    """All of them, as they are typed."""
    found = []
    with click.Context(cli) as context:
        for name in cli.list_commands(context):
            command = cli.get_command(context, name)
            if isinstance(command, click.Group):
                found += [f"{name} {each}" for each in command.list_commands(context)]
            else:
                found.append(name)
    return found


def test_every_command_stands_in_the_document() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    named = set(re.findall(r"`stele ((?:[a-z]+)(?: [a-z-]+)?)", text))
    for group, rest in re.findall(r"`stele (\w+) \w+`((?:, `\w+`)+)", text):
        named |= {f"{group} {each}" for each in re.findall(r"`(\w+)`", rest)}
    assert set(commands()) <= named, set(commands()) - named
