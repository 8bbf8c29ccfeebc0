# SPDX-License-Identifier: Apache-2.0
"""Records a Hugging Face Trainer's run for ``wavemare report``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from wavemare.observe.recording import Recording

_LEARNING = ("loss", "learning_rate", "grad_norm")
_EVALUATED = "eval_"


class RecordingCallback(TrainerCallback):
    """Writes the run folder that ``wavemare report`` reads.

    ``trainer.add_callback(RecordingCallback(trainer, "runs/mine"))`` works with
    `wavemare.hf.Trainer` and transformers' own. It records what the Trainer logs every
    ``logging_steps``. Speed needs ``include_num_input_tokens_seen``. Checkpoints are read from
    ``output_dir``.

    Args:
        trainer: The Trainer to record.
        folder: Run folder; another one than ``output_dir``.
        trace_steps: Number of steps to trace action by action; 0 for none.
    """

    def __init__(self, trainer: Any, folder: str | Path, *, trace_steps: int = 4) -> None:
        self._trainer = trainer
        self._folder = folder
        self._trace_steps = trace_steps
        self._recording: Recording | None = None
        self._running = False
        self._step = ExitStack()
        self._tokens = 0
        self._called = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prepare the folder, once the engine has loaded its checkpoint."""
        if self._running and self._recording is not None:  # an exception had ended it
            self._recording.end(finished=False)
        self._recording, self._running, self._step = None, False, ExitStack()
        if state.global_step >= state.max_steps:
            return
        self._tokens = state.num_input_tokens_seen
        self._recording = Recording(
            self._folder,
            self._trainer.deepspeed,
            steps=state.max_steps,
            done=state.global_step,
            arguments=args.to_sanitized_dict(),
            trace_steps=self._trace_steps,
            checkpoints=args.output_dir,
        )
        self._recording.begin()
        self._running = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to trace the step."""
        if self._recording is not None:
            self._step.enter_context(self._recording.step(state.global_step + 1))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the step's tokens."""
        if self._recording is not None:
            self._recording.tokens = state.num_input_tokens_seen - self._tokens
            self._tokens = state.num_input_tokens_seen
            self._step.close()
        self._called = time.perf_counter()

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record the Trainer's training metrics, and its totals at the end."""
        if self._recording is None or logs is None:
            return
        if "loss" in logs:
            known = {name: float(logs[name]) for name in _LEARNING if logs.get(name) is not None}
            self._recording.log(state.global_step, **known)
        if "train_loss" in logs:
            self._recording.results.update(logs)
        self._called = time.perf_counter()

    def on_evaluate(
        self,
        args: Any,
        state: Any,
        control: Any,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record evaluation metrics, also after training."""
        if self._recording is None:
            return
        found = {
            name if name == "eval_loss" else name.removeprefix(_EVALUATED): float(value)
            for name, value in (metrics or {}).items()
            if name.startswith(_EVALUATED) and isinstance(value, int | float)
        }
        self._recording.log_eval(state.global_step, **found)
        self._called = time.perf_counter()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record how long training waited for a checkpoint."""
        if self._recording is not None:
            step, tag = state.global_step, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            self._recording.saved(step, tag, seconds=time.perf_counter() - self._called)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the summary."""
        if self._running and self._recording is not None:
            self._recording.end(finished=True)
            self._running = False
