# SPDX-License-Identifier: Apache-2.0
"""The sparse collective in torch's DistributedDataParallel: only non-zero blocks are sent.

wavemare launch --nproc 2 recipes/examples/sparse_ddp.py
"""

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import wavemare
from wavemare.comm import register_ddp_hook


class Classifier(torch.nn.Module):
    """Most rows of the table have no gradient in a step."""

    def __init__(self, words: int = 50_000, width: int = 32) -> None:
        super().__init__()
        self.table = torch.nn.EmbeddingBag(words, width)
        self.head = torch.nn.Linear(width, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the scores of both classes, (B, 2), of texts, (B, T)."""
        return self.head(self.table(ids))


def main() -> None:
    """Train a classifier whose gradients are nearly all zero."""
    wavemare.init_distributed()
    torch.manual_seed(1)
    model = DistributedDataParallel(Classifier())
    comm = register_ddp_hook(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    generator = torch.Generator().manual_seed(distributed.get_rank())
    ids = torch.randint(1000, (64, 16), generator=generator)
    labels = ids[:, 0] % 2
    for step in range(1, 11):
        loss = torch.nn.functional.cross_entropy(model(ids), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 and distributed.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    comm.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
