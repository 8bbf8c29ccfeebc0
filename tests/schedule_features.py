# SPDX-License-Identifier: Apache-2.0
"""Schedules, and layouts without stages, with the features that are trained beside each."""

WITHOUT_STAGES = ("data", "waves")
SCHEDULES = ("1f1b", "zb-h1", "interleaved", "zbv", "auto", "plan", "pipemare")
FEATURES = (
    "two replicas",
    "ZeRO 1",
    "tensor parallelism",
    "tensor parallelism, clipping",
    "tensor parallelism, clipping, ZeRO 1",
    "tensor parallelism, clipping, bf16",
    "tensor parallelism, clipping, LoRA",
    "clipping",
    "clipping, bf16",
    "clipping, fp16",
    "experts",
    "experts, clipping",
    "experts, clipping, bf16",
    "experts in bf16",
    "experts in bf16, ZeRO 1",
    "experts in fp16, ZeRO 1",
    "experts, sparse collective",
    "DeepSpeed's experts",
    "DeepSpeed's experts, clipping",
    "DeepSpeed's experts, ZeRO 3",
    "tensor parallelism and experts",
    "tensor parallelism and experts, clipping",
    "tensor parallelism and experts, clipping, ZeRO 1",
    "tensor parallelism and experts, clipping, bf16",
    "tensor parallelism and experts in bf16, ZeRO 1",
    "tensor parallelism and experts in fp16, ZeRO 1",
    "tensor parallelism and experts, sparse collective",
    "sparse collective",
    "local steps",
    "local steps, ZeRO 1",
    "local steps, bf16",
    "local steps, frozen stage",
    "LoRA",
    "DoRA",
    "frozen stage",
    "dynamic shapes",
    "packed rows",
    "packed rows, ZeRO 1",
    "float without gradient",
    "reentrant checkpoints",
    "checkpoints",
    "bf16",
    "bf16, ZeRO 1",
    "autocast",
    "fp16",
    "fp16, ZeRO 1",
    "compiled layers",
    "weights tied within a stage",
    "weights tied across stages",
    "Embedding(sparse=True)",
    "auxiliary losses",
    "evaluation of other shapes",
    "exact resume",
    "resume elsewhere",
    "tensor parallelism, packed rows",
)
OF_STAGES = (
    "local steps",
    "local steps, ZeRO 1",
    "local steps, bf16",
    "local steps, frozen stage",
    "float without gradient",
    "reentrant checkpoints",
    "checkpoints",
    "compiled layers",
    "weights tied within a stage",
    "Embedding(sparse=True)",
    "resume elsewhere",
)
"""Features that the layouts without stages do not have, or that other tests train with them."""
OF_DATA = ("DeepSpeed's experts", "DeepSpeed's experts, clipping", "DeepSpeed's experts, ZeRO 3")
"""Features of layouts without stages; pipelines refuse them by name."""
ROWS = (*SCHEDULES, *WITHOUT_STAGES)
CELLS = [
    f"{row}/{feature}"
    for feature in FEATURES
    for row in ROWS
    if feature not in (OF_STAGES if row in WITHOUT_STAGES else OF_DATA)
]
REFUSED = {
    **{
        f"pipemare/{feature}": "ConfigError: wavemare.pipeline.schedule"
        for feature in (
            "local steps",
            "local steps, ZeRO 1",
            "local steps, bf16",
            "local steps, frozen stage",
        )
    },
    "pipemare/autocast": "ConfigError: torch_autocast.enabled",
    **{
        f"pipemare/{feature}": "ConfigError: fp16.enabled"
        for feature in (
            "fp16",
            "fp16, ZeRO 1",
            "clipping, fp16",
            "experts in fp16, ZeRO 1",
            "tensor parallelism and experts in fp16, ZeRO 1",
        )
    },
    **{
        f"{row}/{feature}": "ConfigError: bf16.enabled"
        for row in WITHOUT_STAGES
        for feature in (
            "experts in bf16",
            "experts, clipping, bf16",
            "tensor parallelism, clipping, bf16",
            "tensor parallelism and experts, clipping, bf16",
        )
    },
    "pipemare/weights tied across stages": "ConfigError: wavemare.pipeline.untie",
}
NOTES = {"auto/exact resume": "without dropout"}
"""What limits the equality of a cell."""
