# SPDX-License-Identifier: Apache-2.0
"""A recommender whose tables are nearly the whole model: only the rows of the batch are sent.

wavemare launch --nproc 2 recipes/examples/recommender.py
"""

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import wavemare
from wavemare.comm import register_ddp_hook

USERS, ITEMS = 200_000, 50_000


class Recommender(torch.nn.Module):
    """Scores pairs of users and items; gradients of both tables are lists of rows."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.users = torch.nn.Embedding(USERS, width, sparse=True)
        self.items = torch.nn.Embedding(ITEMS, width, sparse=True)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2 * width, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        )

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return the scores (B,) of pairs, each (B,)."""
        pairs = torch.cat([self.users(users), self.items(items)], dim=1)
        return self.layers(pairs).squeeze(1)


def main() -> None:
    """Train on clicks that depend on the item alone."""
    wavemare.init_distributed()
    torch.sparse.check_sparse_tensor_invariants.disable()  # or Adagrad warns that it is off
    torch.manual_seed(1)
    model = DistributedDataParallel(Recommender())
    comm = register_ddp_hook(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)  # updates only rows with gradients
    generator = torch.Generator().manual_seed(distributed.get_rank())
    users = torch.randint(USERS, (2048,), generator=generator)
    items = torch.randint(ITEMS, (2048,), generator=generator)
    clicks = (items % 2).float()
    for step in range(1, 11):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(users, items), clicks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sent = comm.totals.take()["sparse_bytes_up"] / 1e6
        if step % 5 == 0 and distributed.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, sent {sent:.2f} MB")
    comm.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
