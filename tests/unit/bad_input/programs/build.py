# SPDX-License-Identifier: Apache-2.0
"""A script whose first use of something builds code: DeepSpeed's parts, torch's or Triton's.

Usage: build.py WHAT
"""

import sys

import torch

import wavemare

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}
CHANGES = {
    "offload": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    "muon": {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}},
}

what = sys.argv[1]
if what == "triton":
    from triton.runtime.build import compile_module_from_src

    wavemare.init_distributed()
    compile_module_from_src("int x;", "nothing")
model = torch.nn.Linear(8, 8)
for parameter in model.parameters():
    parameter.use_muon = parameter.dim() > 1
engine, *_ = wavemare.initialize(model=model, config={**CONFIG, **CHANGES.get(what, {})})
if what == "compile":
    engine.compile()
engine.backward(engine(torch.ones(4, 8)).square().mean())
engine.step()
