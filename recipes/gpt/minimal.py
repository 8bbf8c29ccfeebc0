# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT-2 in two pipeline stages: text, model, optimizer and loop on one page.

wavemare launch --nproc 2 recipes/gpt/minimal.py [FILE]

FILE is your text; by default, the model learns Python from the standard library. A token is a byte.
Each process runs this program. Those of a pipeline read the same batches; each trains one stage.
To compare speeds and losses, put "1f1b" (DeepSpeed's order) in the place of "auto", or PipeMare:
{"stages": 2, "schedule": "pipemare", "pipemare": {"warmup_steps": 40}}.
pretrain.py adds what longer runs need: a tokenizer, options, metrics, checkpoints.
"""

import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import wavemare

STEPS, LENGTH, OUTPUT = 200, 128, "build/gpt-minimal"
MICRO_BATCH = 4  # samples that a pass takes at once
CONFIG = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "gradient_accumulation_steps": 4,  # micro-batches in a step; they keep both stages busy
    "steps_per_print": None,
    # "auto" is a fast synchronous schedule. "pipemare" never empties the pipeline, but its
    # gradients are up to one step old: docs/asynchronous.md says how to train with them.
    # pretrain.json also has "inputs" and "partition". Here their defaults do: a batch has no mask,
    # and the embedding of 256 bytes is too small to make the first stage unlike the second.
    "wavemare": {"pipeline": {"stages": 2, "schedule": "auto"}},
}


def read_text() -> torch.Tensor:
    """Return the text as bytes, int64 [number of bytes]."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [Path(name) for name in sys.argv[1:]] or sorted(library.glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches(text: torch.Tensor, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield micro-batches of random pieces of the text; a seed always gives the same ones."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH, (MICRO_BATCH, 1), generator=generator)
        rows = text[starts + torch.arange(LENGTH)]  # [MICRO_BATCH, LENGTH]
        yield {"input_ids": rows, "labels": rows}  # the model shifts the labels


def main() -> None:
    """Train, evaluate, save the whole model and let it write."""
    torch.manual_seed(1)  # all ranks draw the same weights; each then keeps its stage
    text = read_text()
    train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=128,
        n_layer=4,
        n_head=4,
        eos_token_id=None,
        resid_pdrop=0.0,  # no dropout: it would draw other numbers with other schedules
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    engine, _, _, scheduler = wavemare.initialize(
        model=GPT2LMHeadModel(config),
        config=CONFIG,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=3e-3),  # a stage's own weights
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            3e-3,
            STEPS,
            cycle_momentum=False,  # AdamW's beta1 stays as it is
        ),
    )

    data = batches(train, seed=1 + engine.data_rank)  # with 4 processes there are two replicas
    started = time.perf_counter()
    for step in range(1, STEPS + 1):
        loss = engine.train_batch(data)  # forward, backward, update; the step's mean loss
        if step % 50 == 0:
            speed = 50 * engine.train_batch_size() * LENGTH / (time.perf_counter() - started)
            held = engine.eval_batch(batches(held_out, seed=2), num_micro_batches=32)
            if engine.global_rank == 0:
                rate = scheduler.get_last_lr()[0]
                print(f"step {step}  loss {loss:.3f}  held out {held:.3f}  lr {rate:.1e}")
                print(f"  {speed:,.0f} bytes per second")
            started = time.perf_counter()

    wavemare.save_pretrained(engine, OUTPUT)
    if engine.global_rank == 0:
        model = GPT2LMHeadModel.from_pretrained(OUTPUT)
        start = torch.tensor([list(b"def read(")])
        written = model.generate(start, do_sample=True, top_k=10, max_length=LENGTH)
        print(bytes(written[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
