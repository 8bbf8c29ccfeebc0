# SPDX-License-Identifier: Apache-2.0
"""``--balance``: how devices of unequal speed share the work of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavemare.engine.config.resolve import SECTION, WavemareConfig, zero_section
from wavemare.engine.config.shape import is_enabled
from wavemare.engine.launch.group import gather
from wavemare.engine.observe.choices import tell_choice
from wavemare.errors import ConfigError, PlanError
from wavemare.parallel.layout.layout import Layout
from wavemare.training.arguments import TrainArguments

if TYPE_CHECKING:
    import torch

    from wavemare.training.setup import Setup

AUTO, NONE = "auto", "none"
LAYOUT_FILE = "layout.json"
"""Of the run folder: the layout of the run."""


def read_layout(
    arguments: TrainArguments, config: Mapping[str, Any], *, resume: bool
) -> Layout | None:
    """Return the layout in the file that ``--balance`` names, or of the run that continues.

    Args:
        arguments: The recipe's options.
        config: DeepSpeed's configuration.
        resume: Whether the run continues, by its own layout.

    Returns:
        None if the work is shared equally, or the devices are still to be measured.

    Raises:
        ConfigError: The file cannot be read, or the configuration cannot be balanced.
        PlanError: The file holds no layout.
    """
    choice, file = arguments.balance, Path(arguments.output) / LAYOUT_FILE
    if choice == NONE:
        return None
    section = WavemareConfig.of(config)
    if section.parallel.given:
        reason = "wavemare.parallel already lays out the model"
        raise ConfigError("--balance", choice, reason, "Leave out one of the two")
    if choice != AUTO:
        return _read(Path(choice))
    # Weights stay where they are. Replicas alone may be measured again.
    stays = resume and file.is_file() and section.pipeline.stages > 1
    return _read(file) if stays else None


def with_layout(config: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a run by a layout."""
    config = layout.configure(dict(config))
    plan = {"plan": json.loads(layout.to_json())}
    return {**config, SECTION: {**config[SECTION], "parallel": plan}}


def balance(setup: Setup, model: Any) -> None:
    """Write each device's share of the work into the setup's configuration; all ranks call this.

    ``--balance auto`` measures the devices. Without ``--balance`` the setup stays as it is.

    Raises:
        ConfigError: The configuration cannot be balanced.
        PlanError: The ranks have read different layouts.
    """
    config, layout = setup.config, setup.layout
    if setup.arguments.balance == NONE:
        return
    _check_agreement(setup)
    if layout is None:
        layout = _measure(setup, model)
        if layout.stages > 1:
            config = with_layout(config, layout)
        else:  # no checkpoint is bound to measured shares
            config = _with_balance(layout.configure(config), {"shares": list(layout.shares)})
    # Losses of waves cannot be weighted, and their shares are equal.
    waves = layout.wavelet and layout.stages == 1
    if not waves and not type(model).__name__.endswith("ForSequenceClassification"):
        # Samples have different numbers of labels (masked tokens, all but a document's first).
        own = config[SECTION].get("balance", {})
        config = _with_balance(config, {"mean": "tokens", **own})
    setup.config, setup.layout = config, layout


def _with_balance(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    section = dict(config[SECTION])
    return {**config, SECTION: {**section, "balance": {**section.get("balance", {}), **values}}}


def _check_agreement(setup: Setup) -> None:
    # The run folder may be local to each machine, and hold a layout on some of them.
    found = gather(None if setup.layout is None else setup.layout.digest[:12])
    for rank, theirs in enumerate(found):
        if theirs != found[0]:
            reason = f"rank 0 has read {found[0] or 'no layout'}, rank {rank} {theirs or 'none'}"
            file = setup.folder / LAYOUT_FILE
            remedy = f"Give all machines the same file, also {file} of a run that resumes"
            raise PlanError("--balance", setup.arguments.balance, reason, remedy)


def _measure(setup: Setup, model: Any) -> Layout:
    """Return the layout for the speeds of the devices, which it measures and tells."""
    from wavemare.models.deferred import read_weights
    from wavemare.models.timing import rank_times
    from wavemare.parallel.balance import balance_replicas, balance_stages, example_samples

    config, batch, length = setup.config, setup.batch, setup.arguments.sequence_length
    section = WavemareConfig.of(config)
    if section.tensor_parallel.size > 1:
        reason = "ranks that share layers wait for each other at each of them"
        raise ConfigError("--balance", AUTO, reason, "Put like devices there, and give a layout")
    if section.wavelet.mode != "off":
        reason = "waves scale the losses of micro-batches that are alike on all ranks"
        mode, remedy = section.wavelet.mode, 'Set it "off", or --balance none'
        raise ConfigError("wavemare.wavelet.mode", mode, reason, remedy)
    options: dict[str, Any] = {
        "zero_stage": int(zero_section(config).get("stage", 0)),
        "sequence_length": length,
    }
    read_weights(model)
    dtype, pipeline = _half_type(config), section.pipeline
    if pipeline.stages > 1:
        table = rank_times(
            model,
            samples=batch["train_micro_batch_size_per_gpu"],
            sequence_length=length,
            inputs=pipeline.inputs,
            dtype=dtype,
        )
        stages, schedule = pipeline.stages, pipeline.schedule
        layout = balance_stages(table, batch, stages=stages, schedule=schedule, **options)
    else:
        layout = balance_replicas(
            model,
            lambda samples: example_samples(model, length, samples),
            batch,
            dtype=dtype,
            **options,
        )
    _tell(layout)
    return layout


def _tell(layout: Layout) -> None:
    """Say what was chosen, and why."""
    if (predicted := layout.predicted) is None:
        return
    alone = layout.stages == 1
    chosen = f"shares {layout.shares}" if alone else f"cuts {layout.cuts}"
    seconds = predicted.rank_s if alone else predicted.stage_s
    times = ", ".join(f"{1e3 * each:.3g}" for each in seconds)
    what = "a step of each rank" if alone else "a micro-batch in each stage"
    tell_choice("--balance", chosen, f"as measured, {what} then takes {times} ms")


def _half_type(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the 16-bit type that a configuration computes in, None for 32 bits."""
    import torch

    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return next((dtype for name, dtype in types.items() if is_enabled(config, name)), None)


def _read(file: Path) -> Layout:
    try:
        return Layout.from_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "this is not text"
        remedy = "Give auto, none, or a file that 'wavemare layout search --output' wrote"
        raise ConfigError("--balance", str(file), f"it cannot be read ({reason})", remedy) from None
    except PlanError as error:
        error.key = f"--balance {file}: {error.key}"
        raise
