# SPDX-License-Identifier: Apache-2.0
"""Train on ``training_data`` in several layouts, with learning rate 0; leave what each has read.

Arguments: result folder, layouts.
"""

import gc
import multiprocessing
import sys

import torch
from common import LENGTH, QUIET, VOCABULARY, build_gpt2, configuration, leave
from torch import distributed

import wavemare

SAMPLES, BATCH, STEPS = 24, 8, 4  # the last step begins the second epoch


class Texts(torch.utils.data.Dataset):
    """Texts whose first token is their number."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        tokens[0] = index
        return {"input_ids": tokens, "labels": tokens}


def start(layout):
    """Return an engine and its loader."""
    model, section = build_gpt2(**QUIET, n_layer=4), {"wavemare": {}}
    if layout == "stock":
        model, section = wavemare.to_pipeline(model, num_stages=2), {}
    elif layout != "data":
        section = {"wavemare": {"pipeline": {"stages": 2, "schedule": layout}}}
    adam = {"lr": 0.0, "torch_adam": True, "weight_decay": 0.0}
    config = configuration(0, optimizer={"type": "AdamW", "params": adam}, **section)
    del config["scheduler"], config["gradient_accumulation_steps"]
    config["train_batch_size"] = BATCH
    engine, _, loader, _ = wavemare.initialize(model=model, config=config, training_data=Texts())
    return engine, loader


def read(layout):
    """Return the samples that this rank reads for its first layer, and the losses."""
    engine, loader = start(layout)
    seen: list[int] = []
    for module in engine.module.modules():
        if getattr(module, "num_embeddings", 0) == VOCABULARY:
            module.register_forward_pre_hook(lambda _, ids: seen.extend(ids[0][:, 0].tolist()))
    losses = [engine.train_batch().item() for _ in range(STEPS)]
    sizes = len(loader) if layout != "stock" else None
    rank, replicas = engine.data_rank, engine.data_world_size
    engine.destroy()
    left = len(multiprocessing.active_children())  # of the loader
    del engine, loader
    gc.collect()  # else a worker of the next loader may do so, which is a fork
    # PipeMare's first stage has read more.
    used = seen[: STEPS * BATCH // replicas]
    return {"replica": rank, "seen": used, "losses": losses, "length": sizes, "left": left}


if __name__ == "__main__":
    wavemare.init_distributed()
    assert distributed.get_world_size() % 2 == 0
    leave({layout: read(layout) for layout in sys.argv[2:]})
