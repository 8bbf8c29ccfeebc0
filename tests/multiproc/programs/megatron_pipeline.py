# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that a pipeline engine saved, converted to a Hugging Face folder."""

import sys
from pathlib import Path

import torch
from common import QUIET, build_gpt2, configuration, leave

import wavemare
from wavemare.engine import init_distributed
from wavemare.megatron.convert import Options, convert

init_distributed()
folder, main = Path(sys.argv[1]), torch.distributed.get_rank() == 0
source = build_gpt2(**QUIET)
if main:
    source.save_pretrained(folder / "hf")
section = {"wavemare": {"pipeline": {"stages": 2}}}
engine, *_ = wavemare.initialize(model=source, config=configuration(0, **section))
result = {}
generator = torch.Generator().manual_seed(5)
tokens = torch.randint(0, 50, (2, 16), generator=generator)
mask = torch.ones_like(tokens)
result["loss"] = float(engine.train_batch(iter([((tokens, mask), tokens)] * 2)))
for _ in range(3):  # the rate is 0 at first
    engine.train_batch(iter([((tokens, mask), tokens)] * 2))
engine.save_checkpoint(str(folder / "trained"), "step")
wavemare.save_pretrained(engine, folder / "export")
if main:
    convert(folder / "trained", folder / "again", "hf", Options(config=str(folder / "hf")))
    files = [(folder / which / "model.safetensors").read_bytes() for which in ("export", "again")]
    result["equal"] = files[0] == files[1]
    result["changed"] = files[0] != (folder / "hf" / "model.safetensors").read_bytes()
leave(result)
