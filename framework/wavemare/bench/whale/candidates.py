# SPDX-License-Identifier: Apache-2.0
"""The best plan of each way to use the axes, by prediction."""

from __future__ import annotations

from itertools import chain

from wavemare.parallel.layout.layout import Layout, Prediction
from wavemare.parallel.planner.cluster import Cluster
from wavemare.parallel.planner.costs import ModelCosts
from wavemare.parallel.planner.predict import Candidate, Scene, Settings
from wavemare.parallel.planner.proposals import (
    equal_layouts,
    unlike_layouts,
    variants,
    whole_micro_steps,
)

__all__ = ["Axes", "plans_by_axes"]

Axes = tuple[int, int, int]
"""Stages, ranks that share each layer, and replicas."""


def plans_by_axes(costs: ModelCosts, cluster: Cluster, settings: Settings) -> dict[Axes, Layout]:
    """Return the plan with the shortest predicted step for all legal axes, the best one first.

    `wavemare.parallel.plan` leaves out axes that cannot be among the best, and this does not.
    """
    scene = Scene(costs, cluster, settings)
    best: dict[Axes, tuple[float, Candidate, Prediction]] = {}
    for variant in variants(scene):
        axes = (variant.stages, variant.tensor_parallel, variant.data_parallel)
        for micro_steps in whole_micro_steps(scene, variant.data_parallel):
            for layout in chain(
                equal_layouts(scene, variant, micro_steps),
                unlike_layouts(scene, variant, micro_steps, float("inf")),
            ):
                predicted = scene.predict(layout)
                if predicted and (axes not in best or predicted.step_s < best[axes][0]):
                    best[axes] = predicted.step_s, layout, predicted
    ordered = sorted(best.items(), key=lambda entry: entry[1][0])
    return {axes: scene.plan(layout, predicted) for axes, (_, layout, predicted) in ordered}
