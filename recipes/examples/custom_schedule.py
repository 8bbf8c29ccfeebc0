# SPDX-License-Identifier: Apache-2.0
"""A pipeline schedule of one's own: written as data, checked, priced and drawn.

python recipes/examples/custom_schedule.py
"""

from pathlib import Path

from wavemare.pipeline.clock.simulate import Costs, bubble, simulate
from wavemare.pipeline.draw import grid, svg
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.lowering import lower
from wavemare.pipeline.plan.plan import Action, Kind, Plan
from wavemare.pipeline.plan.schedules import one_f_one_b


def gpipe(num_stages: int, micro_batches: int) -> Plan:
    """Return GPipe's schedule: all forward passes, then all backward passes, then the step."""
    kinds = Kind.FORWARD, Kind.BACKWARD
    ranks = tuple(
        tuple(Action(kind, stage, m) for kind in kinds for m in range(micro_batches))
        for stage in range(num_stages)
    )
    # Steps, sends, receives and loads follow from the order of the passes.
    return lower(Plan("gpipe", num_stages, micro_batches, 1, ranks))


def main() -> None:
    """Compare GPipe with 1F1B."""
    costs = Costs(forward_s=0.01, backward_s=0.02)
    timelines = []
    for plan in (gpipe(4, 8), one_f_one_b(4, 8)):
        print(check(plan))  # refuses an incomplete plan, or one in which ranks wait forever
        print(grid(plan))
        timelines.append(simulate(plan, costs))
        print(f"{plan.schedule}: bubble {bubble(timelines[-1]):.0%}\n")
    target = Path("build/custom-schedule.svg")
    target.parent.mkdir(exist_ok=True)
    target.write_text(svg(timelines, title="GPipe above, 1F1B below"))


if __name__ == "__main__":
    main()
