"""What was asked for, and by which flag, variable or file: a refusal names both."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from gpuops.config_values import Value

DEFAULT = "default"
# Flags whose settings stand in another table than [run].
_KEYS = {
    "ckpt": "checkpoint.keeper",
    "ckpt_dir": "checkpoint.directory",
    "ckpt_domain": "checkpoint.domain",
    "ckpt_replicas": "checkpoint.replicas",
}


@dataclass(frozen=True, slots=True)
class Wish:
    """The text of a value, None where there is none, and how the one who gave it knows it.

    ``is_general``: said in a file for all runs of a site, not for this one.
    """

    text: str | None
    shown: str
    is_said: bool
    is_general: bool = False

    @property
    def given(self) -> str:
        """Return the text of a wish that has one."""
        assert self.text is not None
        return self.text


Wishes = Mapping[str, Wish]


def wish(
    name: str, found: argparse.Namespace, env: Mapping[str, str], values: Mapping[str, Value]
) -> Wish:
    """Return what was asked for *name*: by flag, by torchrun's ``PET_*``, by setting."""
    flag = f"--{name.replace('_', '-')}"
    typed = getattr(found, name, None)
    if typed is not None:
        return Wish(str(typed), f"{flag}={typed}", is_said=True)
    variable = f"PET_{name.upper()}"
    if env.get(variable):
        return Wish(env[variable], f"{flag}={env[variable]} ({variable})", is_said=True)
    key = _KEYS.get(name, f"run.{name}")
    value = values.get(key)
    if value is None or value.origin == DEFAULT:
        text = None if value is None else value.value
        return Wish(text, f"{flag}={text}", is_said=False)
    origin = value.origin.removeprefix("environment ")
    is_general = not value.origin.startswith("environment ")
    shown = f"{key} = {value.value} ({origin})"
    return Wish(value.value, shown, is_said=True, is_general=is_general)
