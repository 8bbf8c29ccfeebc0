# SPDX-License-Identifier: Apache-2.0
"""The loss curve of a run as a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import accumulate

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

__all__ = ["draw_loss", "moving_average"]

_SIZE_INCHES = (7.0, 4.0)
_DOTS_PER_INCH = 150
# More points than this are drawn faint, below their moving average.
_SMOOTH_ABOVE = 60


def draw_loss(
    train: Sequence[tuple[int, float]],
    validation: Sequence[tuple[int, float]],
    baselines: Mapping[str, float],
) -> bytes:
    """Draw losses over steps.

    The figure is made without pyplot, whose state is global and which would look for a screen.

    Args:
        train: (step, loss) of each logged step.
        validation: (step, loss) of each evaluation.
        baselines: Losses to compare with, by name.

    Returns:
        A PNG file of 1050 x 600 pixels.
    """
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        smooth = len(losses) > _SMOOTH_ABOVE
        axes.plot(
            steps,
            losses,
            color="tab:blue",
            linewidth=1.0 if smooth else 1.8,
            alpha=0.3 if smooth else 1.0,
            label=None if smooth else "training",
        )
        if smooth:
            label = "training (moving average)"
            axes.plot(steps, moving_average(losses), color="tab:blue", linewidth=1.8, label=label)
    if validation:
        steps, losses = zip(*validation, strict=True)
        axes.plot(steps, losses, "o", color="tab:orange", markersize=5, label="validation")
    for index, (name, loss) in enumerate(baselines.items()):
        style = ("--", ":", "-.")[index % 3]
        axes.axhline(
            loss, color="0.35", linestyle=style, linewidth=1.2, label=f"{name} ({loss:.3g})"
        )
    axes.set_xlabel("step", fontsize=12)
    axes.set_ylabel("loss (nats)", fontsize=12)
    axes.tick_params(labelsize=11)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=11, frameon=False)
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    return picture.getvalue()


def moving_average(losses: Sequence[float]) -> list[float]:
    """Average each loss with its neighbours, over a thirtieth of the run.

    The window is centred, as one that looks back would draw a falling curve too late; at the ends
    it shrinks.
    """
    reach = max(1, len(losses) // 60)
    totals = [0.0, *accumulate(losses)]
    averages = []
    for index in range(len(losses)):
        width = min(reach, index, len(losses) - 1 - index)
        first, last = index - width, index + width + 1
        averages.append((totals[last] - totals[first]) / (last - first))
    return averages
