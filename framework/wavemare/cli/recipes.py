# SPDX-License-Identifier: Apache-2.0
"""The recipes that ``wavemare train`` knows by name."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from wavemare.errors import ConfigError, did_you_mean

__all__ = ["RECIPES", "Recipe", "find_recipe"]


@dataclass(frozen=True)
class Recipe:
    """A module of ``wavemare.recipes`` and the configuration that it starts with by default."""

    area: str
    task: str
    layout: str = "pipeline"

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return f"{self.area}/{self.task}"

    @property
    def module(self) -> str:
        """The module to run."""
        return f"wavemare.recipes.{self.area}.{self.task}"

    @property
    def config(self) -> Path:
        """Its default JSON configuration."""
        return Path(str(files("wavemare.recipes") / self.area / f"{self.task}_{self.layout}.json"))


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("gpt", "pretrain", "pipemare"),
        Recipe("gpt", "finetune"),
        Recipe("bert", "pretrain"),
        Recipe("bert", "finetune"),
    )
}
_SHORT_NAMES = {"gpt": "gpt/pretrain", "bert": "bert/pretrain"}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name; ``gpt`` and ``bert`` mean pretraining.

    Raises:
        ConfigError: There is none; the message has the nearest name.
    """
    full_name = _SHORT_NAMES.get(name, name)
    if full_name not in RECIPES:
        remedy = did_you_mean(name, [*RECIPES, *_SHORT_NAMES])
        raise ConfigError("RECIPE", name, "there is no such recipe", remedy)
    return RECIPES[full_name]
