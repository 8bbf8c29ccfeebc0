# SPDX-License-Identifier: Apache-2.0
"""Front ends and layouts, with the models and data that are trained through each."""

FRONT_ENDS = ("loop", "trainer", "patch", "accelerate")
LAYOUTS = {
    "ZeRO 0": {},
    "ZeRO 1": {},
    "ZeRO 2": {},
    "ZeRO 3": {},
    "waves": {"wavelet": {"mode": "sync"}},
    "local steps": {"local_steps": {"mode": "average", "every": 1, "replica": "rank"}},
    "1f1b": {"pipeline": {"stages": 2, "schedule": "1f1b"}},
    "zbv": {"pipeline": {"stages": 2, "schedule": "zbv"}},
    "pipemare": {
        "pipeline": {"stages": 2, "schedule": "pipemare", "pipemare": {"drain_interval": 1}}
    },
    "experts": {"expert_parallel": {"size": 2}},
    "tensor parallelism": {"tensor_parallel": {"size": 2}},
    "tensor parallelism and experts": {
        "tensor_parallel": {"size": 2},
        "expert_parallel": {"size": 2},
    },
}
"""Their sections of ``wavemare``. DeepSpeed keeps the groups of the last two for later engines."""
STAGES = ("1f1b", "zbv", "pipemare")
MIXTURES = ("experts", "tensor parallelism and experts")
"""Layouts of a mixture of experts."""
ROWS, FEATURES = FRONT_ENDS, tuple(LAYOUTS)
REFUSED = {
    **{f"accelerate/{layout}": "ConfigError: wavemare.pipeline.stages" for layout in STAGES},
    "accelerate/waves": "ConfigError: wavemare.wavelet.mode",
}
"""How the refusals of a front end and a layout begin."""
MODELS = ("whole", "LoRA", "named adapter", "DoRA")
DATA = (
    *("equal", "lengths", "ignored", "smoothing", "short", "packed", "sizes", "own loss"),
    "auxiliary",
)
"""Rows of one length, of several, with micro-batches without labels, with smoothed labels, a last
step of fewer batches, rows that hold several texts, evaluation of other sizes, a Trainer's own
``compute_loss``, which reads the logits, and a mixture of experts whose routers have a loss."""


def _exists(front: str, layout: str, model: str, data: str) -> bool:
    """Whether one process could train it alike; DoRA differs from LoRA in no use of its rows.

    Whole steps have no place for a loss of the loop's own, and loops of one's own no short steps;
    between exchanges, `TokenMean` of a replica knows its own labels alone.
    """
    if model == "DoRA" and data not in ("equal", "packed"):
        return False
    whole_steps = layout in STAGES or layout == "waves"
    if data == "own loss":
        return front in ("trainer", "patch")
    return front != "loop" or not (
        data == "short"
        or (data == "smoothing" and whole_steps)
        or (data == "ignored" and layout == "local steps")
    )


CELLS = [
    f"{front}/{layout}/{model}/{data}"
    for layout in LAYOUTS
    for front in FRONT_ENDS
    for model in MODELS
    for data in DATA
    if _exists(front, layout, model, data)
]


def is_mixture(layout: str, data: str) -> bool:
    """Whether the model is a mixture of experts."""
    return layout in MIXTURES or data == "auxiliary"


def twin_of(cell: str) -> str:
    """The cell that transformers and PyTorch train in one process, with the same result."""
    front, layout, model, data = cell.split("/")
    front = "loop" if front in ("loop", "accelerate") else "trainer"
    if layout != "local steps":
        layout = "experts" if is_mixture(layout, data) else "ZeRO 0"
    return f"{front}/{layout}/{model}/{data}"


def replicas_of(layout: str) -> int:
    """Number of models that two ranks train with batches of their own."""
    return 1 if layout in STAGES or layout.startswith("tensor parallelism") else 2


def refusal_of(cell: str) -> str | None:
    """How the refusal of a cell begins; None for those that train."""
    front, layout, model, _ = cell.split("/")
    if model == "DoRA" and layout.startswith("tensor parallelism"):
        return "ModelError: use_dora"
    return REFUSED.get(f"{front}/{layout}")
