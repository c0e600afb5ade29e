"""A group of commands that are imported when they are called, so that each starts quickly."""

import importlib
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """A group with commands of other modules.

    *lazy*: where each is, as ``module:attribute``, and its line in the help.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **attributes: Any) -> None:  # noqa: ANN401 click's
        super().__init__(*args, **attributes)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, sorted."""
        return sorted([*super().list_commands(ctx), *self.lazy])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command; None if there is none."""
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self.lazy[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands into the help, without an import."""
        rows = []
        for name in self.list_commands(ctx):
            command = super().get_command(ctx, name)
            help_text = self.lazy[name][1] if command is None else command.get_short_help_str(80)
            rows.append((name, help_text))
        with formatter.section("Commands"):
            formatter.write_dl(rows)
