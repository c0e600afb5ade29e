"""Each command's help ends with an example, and the command line of it is one that gpuops takes."""

import shlex

import click
import pytest
from click.testing import CliRunner

from gpuops.cli.main import COMMANDS, gpuops

# It shows torchrun's help beside gpuops' own.
WITHOUT = {"run"}


def commands(group, words):
    """Return the command at *words* and all below it that the help lists."""
    found = [(words, group)]
    if isinstance(group, click.Group):
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if not command.hidden and (name not in WITHOUT or words):
                found += commands(command, (*words, name))
    return found


ALL = [found for found in commands(gpuops, ()) if found[0]]


def test_there_are_as_many_as_the_help_lists():
    assert {words[0] for words, _ in ALL} == set(COMMANDS) - WITHOUT


@pytest.mark.parametrize(
    ("words", "command"), ALL, ids=lambda item: " ".join(item) if isinstance(item, tuple) else ""
)
def test_the_help_ends_with_an_example_that_the_parser_takes(words, command):
    last = CliRunner().invoke(gpuops, [*words, "--help"]).output.rstrip().rpartition("\n\n")[2]
    assert last.strip().startswith("Example: gpuops "), last
    example = shlex.split(" ".join(last.split()).removeprefix("Example: gpuops "))
    found, rest = gpuops, example
    # `gpuops sweep` is a command with commands below it.
    while isinstance(found, click.Group) and not rest[0].startswith("-"):
        found, rest = found.get_command(click.Context(found), rest[0]), rest[1:]

    assert tuple(example[: len(words)]) == words
    known = {opt for param in found.params for opt in param.opts + param.secondary_opts}
    assert [word for word in rest if word.startswith("--") and word not in known] == []
