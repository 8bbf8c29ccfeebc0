# SPDX-License-Identifier: Apache-2.0
"""A PyTorch model of your own in two stages, from its definition to a plain ``state_dict``.

wavemare launch --nproc 2 recipes/examples/own_model.py
"""

import torch
from deepspeed.pipe import PipelineModule
from torch import nn

import wavemare
from wavemare.models import whole_state_dict

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "wavemare": {"pipeline": {"schedule": "1f1b"}},
}


class Counter(nn.Module):
    """Predicts the next number; it is a chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(32, 8)

    def layers(self) -> nn.Sequential:
        """Return the layers in order: each one takes what the layer before it returns."""
        return nn.Sequential(self.embedding, *self.blocks, self.head)


def main() -> None:
    """Train a pipeline, and load its weights into a fresh model."""
    wavemare.init_distributed()
    torch.manual_seed(1)  # the stages are parts of one model
    pipeline = PipelineModule(Counter().layers(), num_stages=2, loss_fn=nn.CrossEntropyLoss())
    engine, *_ = wavemare.initialize(model=pipeline, config=CONFIG)
    numbers = torch.arange(64) % 8
    batches = [(part, (part + 1) % 8) for part in numbers.split(16)]
    for step in range(1, 21):
        loss = engine.train_batch(iter(batches))
        if step % 5 == 0 and engine.global_rank == 0:
            print(f"step {step}: loss {float(loss):.3f}")

    weights = whole_state_dict(engine)  # every rank calls this; rank 0 gets the weights
    if weights is not None:
        model = Counter()
        model.layers().load_state_dict(weights)  # model.state_dict() is a plain one again
        loss = nn.functional.cross_entropy(model.layers()(numbers), (numbers + 1) % 8)
        print(f"the whole model in one process: loss {loss:.3f}")


if __name__ == "__main__":
    main()
