# SPDX-License-Identifier: Apache-2.0
"""The JSON configuration of a recipe, with the options' changes and ``--balance``'s layout."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavemare.engine.config.resolve import SECTION, WavemareConfig, load_config, zero_section
from wavemare.engine.config.shape import fill_auto, is_enabled
from wavemare.engine.launch.group import gather
from wavemare.engine.observe.choices import tell_choice
from wavemare.errors import ConfigError, PlanError
from wavemare.files import atomic_write_text
from wavemare.parallel.layout.layout import Layout
from wavemare.training.arguments import JSON_KEYS, TrainArguments

if TYPE_CHECKING:
    import torch


_AUTO_WARMUP = {"warmup_steps": "auto"}
_SCHEDULES = {"cosine": "WarmupCosineLR", "linear": "WarmupDecayLR", "constant": "WarmupLR"}


def resolve_config(arguments: TrainArguments) -> dict[str, Any]:
    """Read the JSON configuration, apply the options and replace each ``"auto"`` of the schedules.

    Raises:
        ConfigError: The file cannot be read, or an option is incompatible with it.
    """
    config: dict[str, Any] = load_config(arguments.deepspeed_config)
    if arguments.set:
        config = load_config(change_config(config, arguments.set))
    for name, path in JSON_KEYS.items():
        value = getattr(arguments, name)
        if value is not None:
            _put(config, path, value)
    for monitor, folder in (
        ("tensorboard", arguments.tensorboard_dir),
        ("wandb", arguments.wandb_project),
    ):
        if folder is not None:
            config[monitor]["enabled"] = True
    if arguments.micro_batch_size or arguments.global_batch_size:
        config.pop("gradient_accumulation_steps", None)  # follows from the two
    if arguments.global_batch_size is None and arguments.micro_batch_size is not None:
        config.pop("train_batch_size", None)  # as in Megatron, one micro-batch of each replica
    if arguments.pipeline_model_parallel_size == 1:
        del config[SECTION]["pipeline"]
    _interleave(arguments, config)
    for name in ("fp16", "bf16"):
        if getattr(arguments, name):
            config[name] = {**config.get(name, {}), "enabled": True}
    _make_schedule(arguments, config)
    fill_schedules(arguments, config)
    watchdog = config.setdefault(SECTION, {}).setdefault("watchdog", {})
    if isinstance(watchdog, dict):  # another type is refused by name later
        watchdog.setdefault("folder", str(Path(arguments.output).resolve() / "watchdog"))
    return config


def change_config(config: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Return a configuration with changes of the form ``KEY.KEY=VALUE``, made one after the other.

    A value is JSON, or else a word. ``null`` removes the key.

    Raises:
        ConfigError: A change has another form, or names a key inside of a value.
    """
    changed = copy.deepcopy(dict(config))
    for change in changes:
        path, equals, text = change.partition("=")
        *parents, key = path.split(".")
        if not equals or not all((*parents, key)):
            reason = "it is not of the form KEY.KEY=VALUE"
            raise ConfigError("--set", change, reason, "Write for example optimizer.params.lr=1e-3")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        place = changed
        for parent in parents:
            if value is None and parent not in place:
                break  # there is nothing to remove
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                reason = f"{parent!r} is not a section"
                raise ConfigError("--set", change, reason, "Name a key of a section")
        if value is None:
            place.pop(key, None)
        else:
            place[key] = value
    return changed


def _interleave(arguments: TrainArguments, config: dict[str, Any]) -> None:
    """Choose interleaved stages, in place, where Megatron's options ask for several on a rank."""
    keys = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"
    chunks = arguments.num_virtual_stages_per_pipeline_rank
    layers = arguments.num_layers_per_virtual_pipeline_stage
    if chunks is None and layers is None:
        return
    key, given = (keys[0], chunks) if layers is None else (keys[1], layers)
    pipeline = config.get(SECTION, {}).get("pipeline", {})
    stages, total = pipeline.get("stages", 1), getattr(arguments, "num_layers", None)
    if stages == 1:
        raise ConfigError(
            key, given, "there is no pipeline", "Give --pipeline-model-parallel-size of 2 or more"
        )
    if layers is not None:
        if chunks is not None:
            raise ConfigError(key, given, f"{keys[0]} says the same", "Give one of the two")
        chunks, rest = divmod(total or 0, stages * layers)
        if not chunks or rest:
            reason = f"{stages} ranks with that many layers per stage cannot share {total} layers"
            remedy = f"Give --num-layers a multiple of {stages * layers}, or give {keys[0]}"
            raise ConfigError(key, given, reason, remedy)
    if chunks != 1:  # Megatron's 1F1B
        pipeline |= {"schedule": "interleaved", "chunks": chunks}


def _make_schedule(arguments: TrainArguments, config: dict[str, Any]) -> None:
    style, lowest = arguments.lr_decay_style, arguments.min_lr
    warmup = arguments.lr_warmup_fraction, arguments.lr_warmup_iters
    if style is None and lowest is None and warmup == (None, None):
        return
    if None not in warmup:
        raise ConfigError("--lr-warmup-iters", warmup[1], "a fraction says the same", "Give one")
    style = style or "cosine"
    if style not in _SCHEDULES:
        reason = "there is no such style here"
        remedy = f"Choose one of {', '.join(_SCHEDULES)}"
        raise ConfigError("--lr-decay-style", style, reason, remedy)
    rate = config.get("optimizer", {}).get("params", {}).get("lr")
    if not isinstance(rate, int | float) or rate <= 0:
        raise ConfigError("--lr", rate, "the schedule needs the highest rate", "Give --lr")
    params: dict[str, Any] = {"warmup_num_steps": "auto", "warmup_type": "linear"}  # as Megatron's
    if style == "cosine":
        if (lowest or 0.0) > rate:
            reason = f"it is above the highest rate, {rate}"
            raise ConfigError("--min-lr", lowest, reason, "Give less than --lr")
        params["cos_min_ratio"] = (lowest or 0.0) / rate
        params["warmup_min_ratio"] = float(0 in warmup)
    else:
        if lowest:
            reason = f"DeepSpeed's {_SCHEDULES[style]} has no lowest rate"
            raise ConfigError("--min-lr", lowest, reason, "Use the style cosine")
        params |= {"warmup_max_lr": rate, "warmup_min_lr": rate * (0 in warmup)}
    if style != "constant":
        params["total_num_steps"] = "auto"
    config["scheduler"] = {"type": _SCHEDULES[style], "params": params}


def fill_schedules(arguments: TrainArguments, config: dict[str, Any]) -> None:
    """Replace each ``"auto"`` that depends on the number of steps, in place."""
    steps, share = arguments.max_steps, arguments.lr_warmup_fraction
    warmup = max(steps // 10 if share is None else round(steps * share), 1)
    why = "a tenth of the steps" if share is None else "--lr-warmup-fraction of the steps"
    if arguments.lr_warmup_iters is not None:
        warmup, why = max(arguments.lr_warmup_iters, 1), "--lr-warmup-iters"
    pipeline = config.get(SECTION, {}).get("pipeline", {})
    if pipeline.get("schedule") != "pipemare" and pipeline.get("pipemare") == _AUTO_WARMUP:
        del pipeline["pipemare"]  # a recipe's own: --set has chosen another schedule
    values = {
        "scheduler.params.total_num_steps": (steps, "all steps"),
        "scheduler.params.warmup_num_steps": (warmup, why),
        f"{SECTION}.pipeline.pipemare.warmup_steps": (
            steps // 5,
            "a fifth of the steps is synchronous: stale gradients harm most at a high rate",
        ),
    }
    for path in fill_auto(config, {path: value for path, (value, _) in values.items()}):
        tell_choice(path, *values[path])


def _put(config: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *parents, key = path
    for parent in parents:
        config = config.setdefault(parent, {})
    config[key] = value


AUTO, NONE = "auto", "none"


class BalanceController:
    """The layout of a run, and the configuration that executes it.

    Args:
        choice: The option ``--balance``.
        config: DeepSpeed's configuration.
        folder: The run folder; a measured layout is written there as ``layout.json``.
        resume: Whether the run continues, by its own layout.

    Attributes:
        config: DeepSpeed's configuration, completed by the layout as soon as there is one.
        layout: The layout; None without one.
        measured: The layout if it was measured in this process, else None.

    Raises:
        ConfigError: The file cannot be read, or the configuration cannot be balanced.
        PlanError: The file holds no layout.
    """

    def __init__(self, choice: str, config: dict[str, Any], folder: Path, *, resume: bool) -> None:
        self.config = config
        self.layout: Layout | None = None
        self.measured: Layout | None = None
        self._choice = choice
        self._file = folder / "layout.json"
        self._measures = choice == AUTO
        if choice == NONE:
            return
        section = WavemareConfig.of(config)
        if section.parallel.given:
            reason = "wavemare.parallel already lays out the model"
            raise ConfigError("--balance", choice, reason, "Leave out one of the two")
        if choice != AUTO:
            self._use(_read(Path(choice)))
        elif resume and self._file.is_file() and section.pipeline.stages > 1:
            # Weights stay where they are. Replicas alone may be measured again.
            self._measures = False
            self._use(_read(self._file))

    @property
    def shares(self) -> Sequence[int] | None:
        """Samples per micro-batch of each rank; None for equal ones."""
        return WavemareConfig.of(self.config).balance.shares

    def measure(self, model: Any, batch: dict[str, int], *, sequence_length: int) -> None:
        """Measure the devices and make the layout, if the option asks for it; complete `config`.

        Raises:
            ConfigError: The configuration cannot be balanced.
            PlanError: The ranks have read different layouts.
        """
        if self._choice == NONE:
            return
        self._agree()
        if self._measures:
            self._measure(model, batch, sequence_length)
        if self.layout is not None and not type(model).__name__.endswith(
            "ForSequenceClassification"
        ):
            self._weight_by_tokens(self.layout)
        self.measured = self.layout if self._measures else None

    def _agree(self) -> None:
        # The run folder may be local to each machine, and hold a layout on some of them.
        found = gather(None if self.layout is None else self.layout.digest[:12])
        for rank, theirs in enumerate(found):
            if theirs != found[0]:
                reason = (
                    f"rank 0 has read {found[0] or 'no layout'}, rank {rank} {theirs or 'none'}"
                )
                remedy = f"Give all machines the same file, also {self._file} of a run that resumes"
                raise PlanError("--balance", self._choice, reason, remedy)

    def _measure(self, model: Any, batch: dict[str, int], sequence_length: int) -> None:
        from wavemare.models.timing import rank_times
        from wavemare.parallel.balance import balance_replicas, balance_stages, example_samples

        section = WavemareConfig.of(self.config)
        if section.tensor_parallel.size > 1:
            reason = "ranks that share layers wait for each other at each of them"
            raise ConfigError(
                "--balance", AUTO, reason, "Put like devices there, and give a layout"
            )
        if section.wavelet.mode != "off":
            reason = "waves scale the losses of micro-batches that are alike on all ranks"
            mode, remedy = section.wavelet.mode, 'Set it "off", or --balance none'
            raise ConfigError("wavemare.wavelet.mode", mode, reason, remedy)
        options: dict[str, Any] = {
            "zero_stage": int(zero_section(self.config).get("stage", 0)),
            "sequence_length": sequence_length,
        }
        dtype, pipeline = _half_type(self.config), section.pipeline
        if pipeline.stages > 1:
            table = rank_times(
                model,
                samples=batch["train_micro_batch_size_per_gpu"],
                sequence_length=sequence_length,
                inputs=pipeline.inputs,
                dtype=dtype,
            )
            stages, schedule = pipeline.stages, pipeline.schedule
            layout = balance_stages(table, batch, stages=stages, schedule=schedule, **options)
        else:
            layout = balance_replicas(
                model,
                lambda samples: example_samples(model, sequence_length, samples),
                batch,
                dtype=dtype,
                **options,
            )
        self._use(layout)
        if (predicted := layout.predicted) is not None:
            alone = layout.stages == 1
            chosen = f"shares {layout.shares}" if alone else f"cuts {layout.cuts}"
            seconds = predicted.rank_s if alone else predicted.stage_s
            times = ", ".join(f"{1e3 * each:.3g}" for each in seconds)
            what = "a step of each rank" if alone else "a micro-batch in each stage"
            tell_choice("--balance", chosen, f"as measured, {what} then takes {times} ms")

    def save(self, rank: int) -> None:
        """Write the layout into the run folder, by rank 0."""
        if self.layout is not None and rank == 0:
            atomic_write_text(self._file, self.layout.to_json())

    def _use(self, layout: Layout) -> None:
        self.layout = layout
        self.config = layout.configure(self.config)
        section = dict(self.config[SECTION])
        if self._measures and layout.stages == 1:
            # No checkpoint is bound to measured shares.
            section["balance"] = {**section.get("balance", {}), "shares": list(layout.shares)}
        else:
            section["parallel"] = {"plan": json.loads(layout.to_json())}
        self.config = {**self.config, SECTION: section}

    def _weight_by_tokens(self, layout: Layout) -> None:
        # Samples have different numbers of labels (masked tokens, all but the first of a document).
        if layout.wavelet and layout.stages == 1:
            return  # their losses cannot be weighted, and their shares are equal
        section = dict(self.config[SECTION])
        section["balance"] = {"mean": "tokens", **section.get("balance", {})}
        self.config = {**self.config, SECTION: section}


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
