# SPDX-License-Identifier: Apache-2.0
"""What all recipes share: start-up checks, the training loop, results.

A recipe says what is learnt from what; a `Job` runs it, on any engine that the JSON asks for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from wavemare.engine.config.resolve import (
    SECTION,
    WavemareConfig,
    check_batch_sizes,
    check_config,
    load_config,
)
from wavemare.engine.launch.group import (
    ensure_launched,
    environment_rank,
    environment_world_size,
)
from wavemare.engine.launch.restart import may_restart
from wavemare.errors import CheckpointError, ConfigError, DataError
from wavemare.observe import Events, Run, Screen, live_facts, quiet_libraries
from wavemare.observe.engine_facts import EngineFacts
from wavemare.observe.observing import Observing
from wavemare.recipes.arguments import JobArguments
from wavemare.recipes.balancing import Balancing
from wavemare.recipes.panel import start_up_panel
from wavemare.recipes.restart import (
    adapt_accumulation,
    convert,
    needs_conversion,
    resume_after_restart,
)

__all__ = ["MEASURED", "Job", "resolve_schedule"]

MEASURED = ("held_out_loss", "accuracy", "macro_f1")
"""Results that also stand in ``metrics.jsonl``, where they are followed over the steps."""


class Job:
    """One training run: its folder, its screen, its engine and its loop.

    Args:
        arguments: The recipe's options.
        title: Heading of the start-up panel.

    Raises:
        LaunchError: No launcher started this process.
        ConfigError: A key or value of the configuration cannot work.
        PlanError: The plan of ``--balance`` cannot be read.
        CheckpointError: ``--resume`` finds no checkpoint, or a damaged one.
    """

    _started = 0.0  # had the runs before ended just now, on `time.perf_counter`

    def __init__(self, arguments: JobArguments, title: str) -> None:
        self.arguments = arguments = resume_after_restart(arguments)
        self.title = title
        self.balancing = Balancing(
            arguments.balance,
            resolve_schedule(
                arguments.megatron.config(load_config(arguments.deepspeed_config)),
                arguments.max_steps,
                arguments.megatron.warmup_steps(arguments.max_steps),
            ),
            Path(arguments.output),
            resumes=arguments.resume,
        )
        self.config = self.balancing.config
        # All that can be refused is refused before torch and DeepSpeed take seconds to import.
        ensure_launched()
        self.world_size = environment_world_size()
        self._place_reports()
        self.section = check_config(self.config, world_size=self.world_size)
        replicas = self.world_size // self.section.model_ranks
        if may_restart():
            adapt_accumulation(self.config, replicas)
        self.batch = check_batch_sizes(self.config, data_world_size=replicas)
        quiet_libraries()
        self.rank = environment_rank()
        self.run = Run(Path(arguments.output), rank=self.rank)
        self.events = Events(self.run.folder, rank=self.rank)
        self.events.listen()
        self._foreign: str | None = None
        if arguments.resume:
            self._check_resume()
        self.screen = Screen(rank=self.rank)
        self.engine: Any = None
        self.first_step = 0
        self.seconds = 0.0
        self.tokens_per_second: float | None = None

    def _place_reports(self) -> None:
        """Have the watchdog write into the run folder, unless the configuration names another."""
        watchdog = self.config.setdefault(SECTION, {}).setdefault("watchdog", {})
        if isinstance(watchdog, dict):  # what else it may be is refused by its name
            watchdog.setdefault("folder", str(Path(self.arguments.output).resolve() / "watchdog"))

    def _check_resume(self) -> None:
        universal = bool(self.config.get("checkpoint", {}).get("load_universal"))
        latest = "latest_universal" if universal else "latest"
        if not (self.checkpoints / latest).is_file():
            raise CheckpointError(
                "--resume",
                str(self.checkpoints),
                f"there is no checkpoint (no file {latest})",
                "Start without --resume, or name the run's folder as --output",
            )
        if not universal:
            ranks = self.section.model_ranks
            self._foreign = needs_conversion(self.checkpoints, self.world_size, ranks)
        elif self._saved_since(latest):
            raise ConfigError(
                "checkpoint.load_universal",
                True,
                "checkpoints have been saved since the universal one was made",
                "Remove the key to resume from the newest, or remove the file latest",
            )

    def _saved_since(self, universal: str) -> bool:
        latest = self.checkpoints / "latest"
        made = (self.checkpoints / universal).stat().st_mtime
        return latest.is_file() and latest.stat().st_mtime > made

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.run.checkpoints

    @property
    def exported(self) -> Path:
        """Folder of the model in Hugging Face's format."""
        return self.run.folder / "model"

    def note(self, text: str) -> None:
        """Print a line on rank 0."""
        self.screen.note(text)

    def connect(self) -> None:
        """Join the other processes and seed the weights, alike on all of them."""
        import transformers

        from wavemare.engine import init_distributed

        init_distributed()
        quiet_libraries()
        transformers.set_seed(self.arguments.seed)
        if self._foreign is not None:
            self._convert(self._foreign)

    def _convert(self, tag: str) -> None:
        """Resume a checkpoint of another number of data-parallel ranks, by a universal one."""
        from torch import distributed

        if self.rank == 0:
            self.note(f"{tag} is converted for {self.world_size} ranks")
            convert(self.checkpoints, tag)
        distributed.barrier()
        self.config.setdefault("checkpoint", {})["load_universal"] = True

    def build(self, model: Any, corpus: Mapping[str, object], *, sequence_length: int) -> None:
        """Show the panel and build the engine.

        Args:
            model: A transformers model, whole on every rank.
            corpus: Rows of the panel about the data.
            sequence_length: Tokens per sample.
        """
        import torch

        import wavemare
        from wavemare.models import tied_weights

        self.sequence_length = sequence_length
        unties = self.section.pipeline.stages > 1 and self.section.pipeline.unties
        copies = sum(t.num_parameters for t in tied_weights(model)) if unties else 0
        self.num_parameters = sum(p.numel() for p in model.parameters()) + copies
        panel = start_up_panel(
            model,
            corpus,
            num_parameters=self.num_parameters,
            section=self.section,
            config=self.config,
            batch=self.batch,
            sequence_length=sequence_length,
            world_size=self.world_size,
            steps=self.arguments.max_steps,
        )
        self.screen.panel(self.title, panel)
        plan = self.balancing.measure(model, self.batch, sequence_length=sequence_length)
        self.config = self.balancing.config
        if plan is not None:
            self.note(str(plan))
        self.engine, *_ = wavemare.initialize(model=model, config=self.config)
        self.engine_facts = EngineFacts(self.engine)
        self.batch = self.engine_facts.batch  # annotations may have decided it
        if plan is None and self.engine.layout is not None:
            self.note(str(self.engine.layout))
        # Dropout must differ between ranks, which hold other samples or other layers, unless they
        # share layers.
        place = self.rank // self.engine_facts.tensor_parallel
        torch.manual_seed(self.arguments.seed + 1 + place)

    @property
    def num_samples(self) -> int:
        """Samples that all steps read together."""
        return self.arguments.max_steps * self.batch["train_batch_size"]

    @property
    def _evaluated(self) -> int:
        """Samples of an evaluation between two steps."""
        given = self.arguments.eval_samples
        return self.arguments.megatron.evaluated(given, self.batch["train_batch_size"])

    def loader(self, dataset: Any, held_out: Any, *, shuffle: bool = True) -> Iterator[Any]:
        """Return this rank's endless micro-batches, at the sample where a resumed run stopped.

        Args:
            dataset: The samples to train on.
            held_out: Those to evaluate on, of which there must be enough.
            shuffle: Whether each epoch is permuted; the data set's own order if not.

        Raises:
            DataError: The held-out samples are fewer than the data ranks.
            CheckpointError: ``--resume`` finds a checkpoint of another topology or other data.
            ConfigError: ``--resume`` finds that nothing is left to do.
        """
        from wavemare.data import ResumableLoader

        ranks = self.engine.data_world_size
        if len(held_out) < ranks:
            reason = f"it gives {len(held_out)} held-out samples, fewer than the {ranks} data ranks"
            raise DataError("--data", self.arguments.data, reason, "Give more text")
        loader = ResumableLoader(
            dataset,
            micro_batch_size=self.batch["train_micro_batch_size_per_gpu"],
            data_rank=self.engine.data_rank,
            data_world_size=ranks,
            seed=self.arguments.seed,
            shuffle=shuffle,
            shares=WavemareConfig.of(self.config).balance.shares,
        )
        if self.arguments.resume:
            self._resume(loader)
        self.first_step = self.engine.global_steps
        return loader

    def _resume(self, loader: Any) -> None:
        _, state = self.engine.load_checkpoint(str(self.checkpoints))
        step, last = self.engine.global_steps, self.arguments.max_steps
        if step >= last:
            raise ConfigError(
                "--max_steps", last, f"the checkpoint is at step {step} already", "Give more steps"
            )
        loader.load_state_dict({**state["loader"], "consumed_samples": self.engine.global_samples})
        self._started = -state.get("seconds", 0.0)
        self.note(f"resumed after step {step}")

    def _open_run(self) -> None:
        """Prepare the run folder: an older run that is not resumed moves aside, whole."""
        older = self.run.begin(done=self.first_step if self.arguments.resume else None)
        if older is not None:
            self.note(f"the older run is now {older}")
        self.run.write_config(
            {
                "arguments": asdict(self.arguments),
                "deepspeed": self.config,
                **self.engine_facts.configuration(),
            },
            world_size=self.world_size,
        )
        if self.rank == 0:
            self.balancing.save()

    def fit(self, loader: Any, evaluate: Callable[[int], Mapping[str, float]]) -> None:
        """Train to the last step, logging, evaluating and checkpointing on the way.

        Args:
            loader: From `loader`.
            evaluate: Given a number of samples, measures the model on held-out data.

        Raises:
            SystemExit: SIGTERM has ended the training before the last step, and there is a
                checkpoint to resume from. The code is 0.
        """
        from wavemare.engine import Interruption

        self._open_run()
        arguments, engine = self.arguments, self.engine
        tokens = self.batch["train_batch_size"] * self.sequence_length
        losses: list[Any] = []
        shown: float | None = None
        started, evaluating = time.perf_counter(), 0.0
        self._started += started
        stopped_after: int | None = None
        interruption = Interruption(lead=engine.step_lead)
        bar = self.screen.progress(arguments.max_steps, done=self.first_step)
        observing = self._observe()
        with interruption, bar as progress:
            for step in range(self.first_step + 1, arguments.max_steps + 1):
                rate = self.engine_facts.learning_rate  # the next one after the step
                with observing.step(step, engine):
                    losses.append(engine.train_batch(loader))
                if step < arguments.max_steps and interruption.stops_after(step):
                    stopped_after = step
                last = step in {arguments.max_steps, stopped_after}
                loss = facts = None
                if step % arguments.log_interval == 0 or last:
                    # Reading a loss waits for the device: not every step.
                    loss = float(sum(losses) / len(losses))
                    losses.clear()
                    figures = self.engine_facts.line(rate, progress.tokens_per_second)
                    self.run.log(step, loss=loss, **figures)
                    facts = live_facts(
                        engine.step_metrics(),
                        memory_bytes=observing.note_memory(step),
                        warnings=self.events.warnings,
                        latest=self.events.latest,
                    )
                if loss is not None or shown is None:
                    shown = loss if loss is not None else float(losses[-1])
                progress.step(step, tokens=tokens, loss=shown, learning_rate=rate, facts=facts)
                if step % arguments.eval_interval == 0 and not last:
                    pause = time.perf_counter()
                    self.run.log(step, **evaluate(self._evaluated))
                    evaluating += time.perf_counter() - pause
                saves = step % arguments.save_interval == 0 or last
                if saves:
                    with observing.saving(step, f"step-{step:06d}"):
                        self._save(loader, step)
                if last:
                    break
        engine.finish_saving()
        self.seconds = time.perf_counter() - self._started
        if stopped_after is not None:
            self._stop(stopped_after)
        steps = arguments.max_steps - self.first_step
        if steps > 0:
            self.tokens_per_second = tokens * steps / (time.perf_counter() - started - evaluating)

    def _observe(self) -> Observing:
        return Observing(
            self.events,
            self.run.folder,
            self.rank,
            trace_steps=self.arguments.trace_steps,
            first_step=self.first_step + 1,
            last_step=self.arguments.max_steps,
            settled=self.engine_facts.settled,
        )

    def _stop(self, step: int) -> NoReturn:
        """Write what an early stop leaves beside its checkpoint, and end the process."""
        results = {"stopped_after": step, "training seconds": round(self.seconds)}
        self.run.summary({"results": results, "layout": self.engine_facts.layout()})
        self.note(f"stopped by SIGTERM after step {step}; resume with --resume")
        self._part()
        raise SystemExit(0)

    def _save(self, loader: Any, step: int) -> None:
        seconds = time.perf_counter() - self._started  # of all runs, to the step
        state = {"loader": loader.state_dict(), "seconds": seconds}
        self.engine.save_checkpoint(str(self.checkpoints), f"step-{step:06d}", client_state=state)

    def held_out_batches(self, dataset: Any, num_samples: int | None) -> list[Any]:
        """Return this rank's micro-batches of held-out samples, as many on every rank.

        Args:
            dataset: Items as those trained on.
            num_samples: How many samples over all ranks, spread over the set; None for all. Each
                rank gets one at least; what does not make a whole batch for every rank is left out.
        """
        from wavemare.data import evaluation_batches

        ranks = self.engine.data_world_size
        count = min(max(num_samples or len(dataset), ranks), len(dataset))
        # Few samples still give every rank a batch.
        micro = min(self.batch["train_micro_batch_size_per_gpu"], max(count // ranks, 1))
        return list(
            evaluation_batches(
                dataset,
                micro_batch_size=micro,
                data_rank=self.engine.data_rank,
                data_world_size=ranks,
                limit=count,
            )
        )

    def held_out_loss(self, dataset: Any, num_samples: int | None) -> float:
        """Return the mean loss on held-out samples, the same on all ranks."""
        batches = self.held_out_batches(dataset, num_samples)
        return float(self.engine.eval_batch(iter(batches), num_micro_batches=len(batches)))

    def export(self, tokenizer: Any) -> None:
        """Write the trained model and its tokenizer as a Hugging Face folder."""
        from wavemare import save_pretrained

        save_pretrained(self.engine, self.exported, tokenizer=tokenizer)

    def finish(
        self,
        results: Mapping[str, Any],
        *,
        use: Callable[[], str],
        baselines: Mapping[str, float] | None = None,
    ) -> None:
        """Write curve and summary, show the model at work, and part from the other processes.

        Args:
            results: Figures by name.
            use: Loads the exported model and returns what it has to say; called on rank 0.
            baselines: Losses to compare with, by name.
        """
        self.run.log(
            self.arguments.max_steps, **{k: v for k, v in results.items() if k in MEASURED}
        )
        self.run.curve(baselines=baselines)
        figures = {
            **results,
            "parameters": self.num_parameters,
            "steps": self.arguments.max_steps,
            "training seconds": round(self.seconds),
            "tokens per second": round(self.tokens_per_second or 0),
        }
        self.run.summary({"results": figures, "layout": self.engine_facts.layout()})
        if self.rank == 0:
            self.note(f"\n{use()}\n")
        self.screen.results(figures)
        self.note(f"model: {self.exported}\ncurve: {self.run.folder / 'loss.png'}")
        self._part()

    def _part(self) -> None:
        """Close the run and leave the other processes."""
        import torch.distributed

        self.run.close()
        self.events.close()
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()  # its threads must not outlive the interpreter


def resolve_schedule(config: dict[str, Any], steps: int, warmup: int) -> dict[str, Any]:
    """Fill in, in place, what is ``"auto"`` in a configuration because it depends on the steps.

    Args:
        config: The whole configuration.
        steps: Optimizer steps of the training.
        warmup: Those in which the learning rate rises.
    """
    scheduler = config.get("scheduler", {}).get("params", {})
    for key, value in (("total_num_steps", steps), ("warmup_num_steps", warmup)):
        if scheduler.get(key) == "auto":
            scheduler[key] = value
    # Stale gradients do the most harm while the learning rate is at its highest.
    section: Any = config
    for key in (SECTION, "pipeline", "pipemare"):
        section = section.get(key) if isinstance(section, dict) else None
    if isinstance(section, dict) and section.get("warmup_steps") == "auto":
        section["warmup_steps"] = steps // 5
    return config
