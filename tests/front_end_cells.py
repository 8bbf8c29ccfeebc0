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
    "local steps of zbv": {
        "pipeline": {"stages": 2, "schedule": "zbv"},
        "local_steps": {"mode": "average", "every": 1, "replica": 2},
    },
    "local steps of split layers": {
        "tensor_parallel": {"size": 2},
        "local_steps": {"mode": "average", "every": 1, "replica": 2},
    },
}
"""Their sections of ``wavemare``. DeepSpeed keeps some groups of an engine for later ones."""
STAGES = ("1f1b", "zbv", "pipemare", "local steps of zbv")
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


def is_local(layout: str) -> bool:
    """Whether its replicas have the mean of their weights after each step."""
    return layout.startswith("local steps")


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
        or (data == "ignored" and is_local(layout))
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
    if is_local(layout):
        layout = "local steps"
    else:
        layout = "experts" if is_mixture(layout, data) else "ZeRO 0"
    return f"{front}/{layout}/{model}/{data}"


def ranks_of(layout: str) -> int:
    """Number of ranks that train it."""
    return 4 if layout.startswith("local steps of") else 2


def replicas_of(layout: str) -> int:
    """Number of models that its ranks train with batches of their own."""
    one = layout in STAGES or layout.startswith("tensor parallelism")
    return 1 if one and not is_local(layout) else 2


def refusal_of(cell: str) -> str | None:
    """How the refusal of a cell begins; None for those that train."""
    front, layout, model, _ = cell.split("/")
    if model == "DoRA" and "tensor_parallel" in LAYOUTS[layout]:
        return "ModelError: use_dora"
    return REFUSED.get(f"{front}/{layout}")
