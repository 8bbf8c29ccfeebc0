# SPDX-License-Identifier: Apache-2.0
"""One chain cut in three places; with clipping, stock DeepSpeed makes three trainings of it."""

import deepspeed
import torch
from common import leave, warnings_told
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import wavemare

WIDTH, LAYERS, MICRO, ACCUMULATION, STEPS = 24, 8, 8, 4, 3
CUTS = ([0, 4, 8], [0, 6, 8], [0, 1, 8])


class Cut(PipelineModule):
    """A pipeline with given bounds."""

    def __init__(self, *args, cuts, **kwargs):
        self._cuts = cuts
        super().__init__(*args, **kwargs)

    def _partition_layers(self, method="uniform"):
        self.parts = self._cuts
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


class Block(nn.Module):
    """Weights that do not depend on the stage."""

    def __init__(self, index):
        super().__init__()
        generator = torch.Generator().manual_seed(index)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def batches():
    generator = torch.Generator().manual_seed(5)
    while True:
        yield tuple(torch.randn(MICRO, WIDTH, generator=generator) for _ in range(2))  # type: ignore[misc]


def train(cuts, clipping, zero=0, **sections):
    module = Cut(
        [LayerSpec(Block, i) for i in range(LAYERS)], num_stages=2, loss_fn=nn.MSELoss(), cuts=cuts
    )
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        **({} if clipping is None else {"gradient_clipping": clipping}),
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero},
        "steps_per_print": None,
        **sections,
    }
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine, *_ = wavemare.initialize(model=module, optimizer=optimizer, config=config)
    data = batches()
    return [float(engine.train_batch(data)) for _ in range(STEPS)]


def told(*arguments, **sections):
    with warnings_told("note: gradients are clipped") as lines:
        losses = train(CUTS[0], *arguments, **sections)
    return losses, lines


if __name__ == "__main__":
    wavemare.init_distributed()
    leave(
        {
            "unclipped": [train(cuts, 0.0, 0, wavemare={}) for cuts in CUTS],
            "clipped": [train(cuts, 1.0, 0, wavemare={}) for cuts in CUTS],
            "ZeRO 1": [train(cuts, 1.0, 1, wavemare={}) for cuts in CUTS],
            "stock": [train(cuts, 1.0, 0) for cuts in CUTS],
            "default": told(None, wavemare={}),
            "given": told(1.0, wavemare={})[1],
            "default without section": told(None),
            "none told": [told(*case, wavemare={})[1] for case in ((0.0,), (1.0, 1))],
            "version": deepspeed.__version__,
        }
    )
