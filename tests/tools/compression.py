# SPDX-License-Identifier: Apache-2.0
"""What compressed gradients learn: two data ranks in one process, or two real ones.

    compression.py simulate MODEL WAYS SEEDS --records FILE [--text FILE]
    torchrun --nproc-per-node 2 compression.py real MODEL WAYS SEEDS --records FILE [--text FILE]
    compression.py table --records FILE

Each run is added to the records, a list in JSON; runs that are there are not repeated. A simulation
compresses by the product's compressors in the engine's buckets, and sums in rank order.
"""

from __future__ import annotations

import argparse
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wavemare.comm.compressor import block_norms, make_compressor
from wavemare.comm.config import CompressorConfig
from wavemare.engine.sparse.buckets import Member, embedding_weights, make_buckets

RANKS, STEPS, WARMUP, RATE = 2, 1500, 150, 1e-3
BETA1, BETA2, EPSILON, DECAY = 0.9, 0.999, 1e-8, 0.01
FLOOR = {"ratio": 0.01, "warmup_steps": WARMUP}
FALLING = {**FLOOR, "density_warmup_steps": 300}
SLOWLY = {**FLOOR, "density_warmup_steps": 600}
RANDOM = {**FLOOR, "type": "block_randomk"}
LOCAL: Any = {"seen": 1.0, "outer": RANKS**0.5, "flush": True}

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Way:
    """A way to compress.

    Args:
        title: In the table.
        config: Of the compressor; None sends everything.
        budget: Whether each "bucket" has its own k, as in the product, or "all" share one, divided
            by the norms of the step before; "one" puts all parameters into one bucket; with
            "parameter" each one is a bucket by itself, which sends a block or more.
        block: Elements of a block.
        whole: Parameters of up to so many elements are sent whole.
        frozen: Step from which Adam's second moment stays (1-bit Adam, Tang et al. 2021).
        velocity: Whether ranks send their momentum, and the optimizer has none; that of sent blocks
            starts anew (DGC, Lin et al. 2018, sections 3.2 and 3.3).
        relative: Whether blocks are compared after a division by the root of the second moment.
        seen: Part of its own unsent updates that a rank's weights have, if each rank has an Adam
            and sends updates; None if ranks send gradients.
        outer: Factor of all updates after the first 150 steps. An Adam with a rank's own batch
            makes less way in the mean direction than with all batches, by the root of the ranks.
        flush: Whether the last step sends all that ranks kept.
        shift: Relative change of the first weights, which shows how far chance goes.
    """

    title: str
    config: Mapping[str, Any] | None = field(default_factory=lambda: FLOOR)
    budget: str = "bucket"
    block: int = 64
    whole: int = 0
    frozen: int = STEPS
    velocity: bool = False
    relative: bool = False
    seen: float | None = None
    outer: float = 1.0
    flush: bool = False
    shift: float = 0.0


WAYS = {
    "dense": Way("everything is sent", None),
    "dense-again": Way("everything is sent, first weights times 1 + 1e-6", None, shift=1e-6),
    "a": Way("error feedback, each bucket its 1 %"),
    "a-d": Way("a, density falls in 300 steps", FALLING),
    "e": Way("all buckets share 1 %", budget="all"),
    "e-one": Way("all parameters in one bucket", budget="one"),
    "e-one-8": Way("one bucket, blocks of 8", budget="one", block=8),
    "e-one-d-8": Way("one bucket, density falls, blocks of 8", FALLING, "one", block=8),
    "c": Way("a, second moment frozen after 150 steps", frozen=150),
    "c-d": Way("one bucket, density falls, frozen after 450 steps", FALLING, "one", frozen=450),
    "b": Way("a, momentum is sent and masked", velocity=True),
    "b-c": Way("b, second moment frozen after 150 steps", frozen=150, velocity=True),
    "b-e-d": Way(
        "b, all buckets share, density falls, frozen after 450 steps",
        FALLING,
        "all",
        frozen=450,
        velocity=True,
    ),
    "f": Way("one bucket, blocks of 8, chosen by Adam's update", FLOOR, "one", 8, relative=True),
    "f-d": Way("f, density falls", FALLING, "one", 8, relative=True),
    "l-0": Way("one bucket, Adam on each rank, updates are sent", budget="one", seen=0.0),
    "l": Way("l-0, and a rank sees its own unsent updates", budget="one", seen=1.0),
    "l-f": Way("l, the last step sends all", budget="one", seen=1.0, flush=True),
    "l-r-f": Way("l-f, random blocks, the same of all ranks", RANDOM, "one", seen=1.0, flush=True),
    "l-d-f": Way("l-f, density falls", FALLING, "one", seen=1.0, flush=True),
    "o-d": Way("l-d-f, updates times 1.41", FALLING, "one", **LOCAL),
    "o-d-2": Way("o-d, updates times 2", FALLING, "one", seen=1.0, outer=2.0, flush=True),
    "o-d-8": Way("o-d, blocks of 8", FALLING, "one", 8, **LOCAL),
    "o-d-600-8": Way("o-d-8, density falls in 600 steps", SLOWLY, "one", 8, **LOCAL),
    "o-w-d-8": Way("o-d-8, parameters up to 256 elements whole", FALLING, "one", 8, 256, **LOCAL),
    "dense-o": Way("everything is sent, updates times 1.41", None, outer=2**0.5),
    "a-d-o": Way("a-d, updates times 1.41", FALLING, outer=2**0.5),
    "a-d-600": Way("a, density falls in 600 steps", SLOWLY),
    "w-d": Way("a-d, parameters up to 2,048 elements whole", FALLING, whole=2048),
    "p-d": Way("a-d, each parameter its 1 %", FALLING, "parameter"),
    "p-d-8": Way("p-d, blocks of 8", FALLING, "parameter", 8),
}


def learning_rate(step: int) -> float:
    """Return the rate: it rises for 150 steps, then falls to zero."""
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    return RATE * (STEPS - step) / (STEPS - WARMUP)


class Task(ABC):
    """A model and its data, the same on all ranks.

    Attributes:
        model: To be trained.
        validation: All samples that are not trained on.
    """

    model: Any
    validation: Batch

    @abstractmethod
    def batch(self, step: int, rank: int) -> Batch:
        """Return what a rank trains on in a step."""

    def eval_loss(self) -> float:
        """Return the mean loss over the validation samples."""
        count, total = len(self.validation["labels"]), 0.0
        self.model.eval()
        with torch.inference_mode():
            for first in range(0, count, 64):
                part = {name: v[first : first + 64] for name, v in self.validation.items()}
                total += float(self.model(**part).loss) * len(part["labels"])
        self.model.train()
        return total / count


class Bert(Task):
    """Made-up texts of Zipf's words, of which a tenth betray one of four labels.

    A tenth of the labels are drawn anew: no model brings the validation loss below 0.35.
    """

    WORDS, FIRST, CLASSES, MARKERS, BATCH, LENGTH = 30_522, 5, 4, 32, 8, 32

    def __init__(self, seed: int, text: Path | None) -> None:
        from transformers import BertConfig, BertForSequenceClassification

        frequency = np.arange(1, self.WORDS - self.FIRST + 1) ** -1.0
        self._seed, self._cumulative = seed, np.cumsum(frequency) / frequency.sum()
        order = np.random.default_rng([seed, 1]).permutation((self.WORDS - self.FIRST) // 2)
        markers = order[: self.CLASSES * self.MARKERS].reshape(self.CLASSES, self.MARKERS)
        self._markers = markers + self.FIRST
        self.validation = self._draw(512, np.random.default_rng([seed, 2]))
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=self.WORDS,
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=256,
            max_position_embeddings=self.LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        config.num_labels = self.CLASSES
        self.model = BertForSequenceClassification(config)

    def batch(self, step: int, rank: int) -> Batch:
        return self._draw(self.BATCH, np.random.default_rng([self._seed, 3, step, rank]))

    def _draw(self, count: int, random: np.random.Generator) -> Batch:
        shape = count, self.LENGTH
        ids = np.searchsorted(self._cumulative, random.random(shape)) + self.FIRST
        ids = np.minimum(ids, self.WORDS - 1)
        labels = random.integers(self.CLASSES, size=count)
        marked = random.random(shape) < 0.1
        which = random.integers(self.MARKERS, size=shape)
        ids = np.where(marked, self._markers[labels[:, None], which], ids)
        anew = random.random(count) < 0.1
        labels = np.where(anew, random.integers(self.CLASSES, size=count), labels)
        words = torch.from_numpy(ids)
        mask = torch.ones_like(words)
        return {"input_ids": words, "attention_mask": mask, "labels": torch.from_numpy(labels)}


class Gpt(Task):
    """A GPT-2 of two layers with a head of its own, on a text in 2,048 byte pairs."""

    WORDS, BATCH, LENGTH, SAMPLES = 2048, 4, 32, 768

    def __init__(self, seed: int, text: Path | None) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        from wavemare.data.tokenizer import train_tokenizer

        assert text is not None, "--text"
        content = text.read_text(encoding="utf-8")
        ids = train_tokenizer([content], self.WORDS, kind="gpt")(content)["input_ids"]
        tokens = torch.tensor(ids)
        border = int(len(tokens) * 0.9)
        self._seed, self._train = seed, tokens[:border]
        held = tokens[border : border + self.SAMPLES * self.LENGTH].view(-1, self.LENGTH)
        self.validation = {"input_ids": held, "labels": held}
        torch.manual_seed(seed)
        config = GPT2Config(
            vocab_size=self.WORDS,
            n_positions=self.LENGTH,
            n_embd=64,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=False,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = GPT2LMHeadModel(config)

    def batch(self, step: int, rank: int) -> Batch:
        random = np.random.default_rng([self._seed, 3, step, rank])
        starts = random.integers(len(self._train) - self.LENGTH, size=self.BATCH)
        ids = torch.stack([self._train[i : i + self.LENGTH] for i in starts])
        return {"input_ids": ids, "labels": ids}


TASKS = {"bert": Bert, "gpt": Gpt}


class Simulation:
    """Trains a task's model as two data ranks do.

    Args:
        task: Has the model, whose weights become views of flat buckets.
        way: To compress.
    """

    def __init__(self, task: Task, way: Way) -> None:
        self._task, self._way = task, way
        model = task.model
        # Embeddings have buckets of their own, except if all share one.
        tables = embedding_weights(model.modules()) if way.budget != "one" else set()
        self._weights = dict(model.named_parameters())
        members = [
            Member(name, p.numel(), p.dtype, id(p) in tables) for name, p in self._weights.items()
        ]
        size = 1 if way.budget == "parameter" else 64 << 20
        small = [m for m in members if m.numel <= way.whole]
        whole = make_buckets(small, way.block, size)
        large = [m for m in members if m.numel > way.whole]
        self._buckets = [*whole, *make_buckets(large, way.block, size)]
        self._whole = {bucket.key for bucket in whole}
        self._flat = {bucket.key: torch.zeros(bucket.numel) for bucket in self._buckets}
        self._gradients = [self._zeros() for _ in range(RANKS)]
        for bucket in self._buckets:
            for slot in bucket.slots:
                weight = self._weights[slot.name]
                place = self._flat[bucket.key][slot.start : slot.stop]
                place.copy_(weight.detach().view(-1))
                weight.data = place.view(weight.shape)
        self._config = CompressorConfig(**(way.config or {}))
        self._compressors = [make_compressor(self._config, way.block) for _ in range(RANKS)]
        # With Adam on each rank every rank has moments, else all share those of the first.
        self._first = [self._zeros() for _ in range(RANKS)]
        self._second = [self._zeros() for _ in range(RANKS)]
        self._velocity = [self._zeros() for _ in range(RANKS)]
        self._waiting = [self._zeros() for _ in range(RANKS)]
        self._norms: list[dict[str, Tensor]] = [{} for _ in range(RANKS)]
        self._shares: list[dict[str, float]] = [{} for _ in range(RANKS)]
        self.blocks = sum(-(-bucket.numel // way.block) for bucket in self._buckets)
        self.densities: list[float] = []

    def _zeros(self) -> dict[str, Tensor]:
        return {key: torch.zeros_like(flat) for key, flat in self._flat.items()}

    def step(self, step: int) -> None:
        """Do an optimizer step."""
        for rank in range(RANKS):
            self._backward(step, rank)
        if self._way.seen is not None and step >= WARMUP:
            self._update_locally(step)
            return
        sent = sum(self._compress(step, rank) for rank in range(RANKS))
        self.densities.append(sent / RANKS / self.blocks)
        for key in self._flat:
            gradient = self._gradients[0][key].add(self._gradients[1][key]).div_(RANKS)
            update = self._adam(key, gradient, step, 0)
            outer = self._way.outer if step >= WARMUP else 1.0
            self._flat[key].mul_(1 - learning_rate(step) * DECAY).sub_(update, alpha=outer)
        for rank in range(1, RANKS if self._way.seen is not None else 1):
            self._first[rank] = {key: m.clone() for key, m in self._first[0].items()}
            self._second[rank] = {key: v.clone() for key, v in self._second[0].items()}

    def _backward(self, step: int, rank: int) -> None:
        """Compute a rank's gradients, with its own weights if it has some."""
        gradients, seen = self._gradients[rank], self._way.seen
        shared = {key: flat.clone() for key, flat in self._flat.items()} if seen else {}
        for bucket in self._buckets:
            gradients[bucket.key].zero_()
            if seen:
                kept = self._compressors[rank].state_dict()["residuals"].get(bucket.key)
                if kept is not None:
                    self._flat[bucket.key].sub_(kept, alpha=seen)
            for slot in bucket.slots:
                weight = self._weights[slot.name]
                weight.grad = gradients[bucket.key][slot.start : slot.stop].view(weight.shape)
        self._task.model(**self._task.batch(step, rank)).loss.backward()
        for key, flat in shared.items():
            self._flat[key].copy_(flat)

    def _compress(self, step: int, rank: int) -> int:
        """Leave what a rank sends in its gradients; return the number of blocks."""
        sent = 0
        for key, gradient in self._gradients[rank].items():
            if self._way.config is None:
                continue
            if key in self._whole:
                sent += -(-len(gradient) // self._way.block)
                continue
            if self._way.flush and step == STEPS - 1:
                gradient.add_(self._compressors[rank].state_dict()["residuals"][key])
                sent += -(-len(gradient) // self._way.block)
                continue
            after = step >= WARMUP
            if self._way.velocity and after:
                velocity = self._velocity[rank]
                if step == WARMUP:
                    velocity[key].copy_(self._first[0][key])
                gradient.copy_(velocity[key].lerp_(gradient, 1 - BETA1))
            if after and (self._way.relative or self._way.budget == "all"):
                chosen = self._split(key, gradient, step, rank)
            else:
                chosen = self._compressors[rank].step(key, gradient)
            if self._way.velocity and after:
                elements = chosen.repeat_interleave(self._way.block)[: len(gradient)]
                self._velocity[rank][key].masked_fill_(elements, 0.0)
            sent += int(chosen.sum())
        return sent if self._way.config is not None else self.blocks

    def _split(self, key: str, gradient: Tensor, step: int, rank: int) -> Tensor:
        """Choose blocks by what Adam would make of them, or with a budget of all buckets."""
        waiting = compared = self._waiting[rank][key].add_(gradient)
        if self._way.relative:
            compared = waiting / (self._second[0][key].sqrt() + EPSILON)
        share = self._config.share(step)
        if self._way.budget == "all":
            norms = self._norms[rank]
            if key in norms:  # a new step: a bucket's part is that of the step before
                largest = torch.cat([*norms.values()]).topk(round(share * self.blocks)).values.min()
                self._shares[rank] = {
                    k: float((n >= largest).float().mean()) for k, n in norms.items()
                }
                norms.clear()
            norms[key] = block_norms(compared, self._way.block)
            share = self._shares[rank].get(key, share)
        chosen = self._compressors[rank].select(compared, ratio=share)
        elements = chosen.repeat_interleave(self._way.block)[: len(gradient)]
        gradient.copy_(waiting.masked_fill(~elements, 0.0))
        waiting.masked_fill_(elements, 0.0)
        return chosen

    def _update_locally(self, step: int) -> None:
        """Let each rank compute an update of its own; the mean of what they send is done."""
        sent = 0
        for rank in range(RANKS):
            for key, gradient in self._gradients[rank].items():
                gradient.copy_(self._adam(key, gradient.clone(), step, rank))
            sent += self._compress(step, rank)
        self.densities.append(sent / RANKS / self.blocks)
        for key, flat in self._flat.items():
            update = self._gradients[0][key].add(self._gradients[1][key]).div_(RANKS)
            flat.mul_(1 - learning_rate(step) * DECAY).sub_(update, alpha=self._way.outer)

    def _adam(self, key: str, gradient: Tensor, step: int, rank: int) -> Tensor:
        """Return what AdamW subtracts from a bucket, beside its decay."""
        first, second = self._first[rank][key], self._second[rank][key]
        if self._way.velocity and step >= WARMUP:
            first = gradient
        else:
            first.lerp_(gradient, 1 - BETA1)
        if step < self._way.frozen:
            second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        corrected = math.sqrt(1 - BETA2 ** min(step + 1, self._way.frozen))
        rate = learning_rate(step) / (1 - BETA1 ** (step + 1))
        return first / second.sqrt().div_(corrected).add_(EPSILON) * rate


def simulate(task: Task, way: Way) -> dict[str, Any]:
    """Train, and return the figures."""
    with torch.no_grad():
        for weight in task.model.parameters():
            weight.mul_(1 + way.shift)
    simulation = Simulation(task, way)
    for step in range(STEPS):
        simulation.step(step)
    densities = simulation.densities[WARMUP:]
    return {
        "loss": task.eval_loss(),
        "density": fmean(densities),
        "density_at_end": densities[-1],
    }


def train(task: Task, way: Way) -> dict[str, Any]:
    """Train with the engine as one of two ranks, and return the figures."""
    import wavemare

    assert way in (WAYS["dense"], WAYS["a"], WAYS["a-d"]), "what the product has"
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=RATE)
    section = {"mode": "auto", "block": way.block, "transport": "torch", "compressor": way.config}
    config = {
        "train_micro_batch_size_per_gpu": task.BATCH,
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "wavemare": {"sparse_collective": section},
    }
    engine = wavemare.initialize(model=task.model, optimizer=optimizer, config=config)[0]
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        engine.backward(engine(**task.batch(step, torch.distributed.get_rank())).loss)
        engine.step()
    loss = task.eval_loss()
    engine.destroy()
    return {"loss": loss}


def table(records: list[dict[str, Any]]) -> str:
    """Return a Markdown table: the losses, and the gaps to everything being sent."""
    found = {(r["model"], r["way"], r["seed"]): r for r in records if r["system"] == "simulated"}
    lines = [
        "| model | way | density, at the end | seed: loss (gap) | mean gap |",
        "|---|---|---|---|---:|",
    ]
    for model in TASKS:
        for name, way in WAYS.items():
            runs = {seed: r for (m, n, seed), r in sorted(found.items()) if (m, n) == (model, name)}
            if not runs:
                continue
            gaps = {s: r["loss"] / found[model, "dense", s]["loss"] - 1 for s, r in runs.items()}
            cells = (f"{s}: {r['loss']:.4f} ({gaps[s]:+.2%})" for s, r in runs.items())
            density, end = (
                fmean(r[x] for r in runs.values()) for x in ("density", "density_at_end")
            )
            lines.append(
                f"| {model} | `{name}`: {way.title} | {density:.2%}, {end:.2%} | "
                f"{', '.join(cells)} | {fmean(gaps.values()):+.2%} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Run, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("simulate", "real", "table"))
    parser.add_argument("model", nargs="?", choices=TASKS)
    parser.add_argument("ways", nargs="?", default="")
    parser.add_argument("seeds", nargs="?", default="0")
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="What the GPT learns.")
    arguments = parser.parse_args()
    file: Path = arguments.records
    records = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    if arguments.command == "table":
        print(table(records))
        return
    torch.set_num_threads(1)
    system = "simulated" if arguments.command == "simulate" else "real"
    done = {(r["system"], r["model"], r["way"], r["seed"]) for r in records}
    for seed in map(int, arguments.seeds.split(",")):
        for way in arguments.ways.split(","):
            run = {"system": system, "model": arguments.model, "way": way, "seed": seed}
            if tuple(run.values()) in done:
                continue
            task = TASKS[arguments.model](seed, arguments.text)
            figures = (simulate if system == "simulated" else train)(task, WAYS[way])
            if system == "simulated" or torch.distributed.get_rank() == 0:
                records.append({**run, "steps": STEPS, **figures})
                file.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
