# SPDX-License-Identifier: Apache-2.0
"""Train a pipeline for two steps, and tell the most memory of each rank above what imports take.

Usage: memory_of_ranks.py FOLDER SETTINGS, which are JSON of `MemorySettings` and of the model.

Only memory that no file backs is counted. How many pages of libraries are there depends on what
the system has in its cache of files.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

import peft
import torch
import transformers
import transformers.models.llama.modeling_llama  # an import that from_folder would make
from common import leave

import wavemare
import wavemare.models.convert
import wavemare.models.disk_names
from wavemare.models.deferred import unread_model
from wavemare.models.source import Stored

M_MMAP_THRESHOLD = -3  # of malloc.h
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Made:
    """Weights that are made when they are read, so that no file and no whole model is in memory."""

    def __init__(self, config, dtype):
        state = wavemare.models.disk_names.empty_model(config).state_dict()
        self.stored = {name: Stored(tuple(t.shape), dtype) for name, t in state.items()}

    def read(self, name, index=()):
        stored = self.stored[name]
        return torch.empty(stored.shape, dtype=stored.dtype).normal_(0, 0.02)[index]


def memory(entry):
    """Bytes that no file backs: VmRSS for those now, or VmHWM for the most.

    Pages of files are seldom given back, so that the peak had at most those of now.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return 1024 * (int(values[entry].split()[0]) - int(values["RssFile"].split()[0]))


def build(sizes, settings):
    config = transformers.LlamaConfig(**sizes)
    quantization = None
    if settings.get("four_bit"):
        quantization = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=TYPES[settings["dtype"]],
            bnb_4bit_use_double_quant=settings.get("double_quant", False),
        )
    if settings.get("int8"):
        from torchao.quantization import Int8WeightOnlyConfig

        quantization = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    dtype = TYPES[settings["dtype"]]
    model = unread_model(config, Made(config, dtype), dtype, quantization_config=quantization)
    if settings.get("checkpoints"):
        model.gradient_checkpointing_enable()
    if settings.get("lora_r"):
        lora = peft.LoraConfig(r=settings["lora_r"], target_modules=settings["lora_targets"])
        model = peft.get_peft_model(model, lora)
    return model


def train(sizes, settings):
    pipeline = {"stages": settings["stages"], "schedule": settings["schedule"]}
    config = {
        "train_micro_batch_size_per_gpu": settings["samples"],
        "gradient_accumulation_steps": settings["micro_batches"],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": settings.get("zero_stage", 0)},
        "bf16": {"enabled": settings["dtype"] == "bf16"},
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "wavemare": {"pipeline": pipeline},
    }
    engine = wavemare.initialize(model=build(sizes, settings), config=config)[0]
    built = memory("VmHWM")
    shape = settings["samples"], settings["sequence"]
    ids = torch.randint(0, sizes["vocab_size"], shape, generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    for _ in range(2):
        engine.train_batch(iter([batch] * settings["micro_batches"]))
    return built, list(engine.module.parts)


if __name__ == "__main__":
    # Freed tensors go back at once, as with MALLOC_MMAP_THRESHOLD_: glibc would keep them.
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 100_000)
    if json.loads(sys.argv[2])[1].get("four_bit"):
        import bitsandbytes  # noqa: F401
        import peft.tuners.lora.bnb
    if json.loads(sys.argv[2])[1].get("int8"):
        import peft.tuners.lora.torchao
        import torchao.quantization  # noqa: F401
        import transformers.quantizers.auto
    wavemare.init_distributed()  # imports the engine, too
    gc.collect()
    libc.malloc_trim(0)  # or what imports have freed would be used again, and not be counted
    joined = memory("VmRSS")
    sizes, settings = json.loads(sys.argv[2])
    built, parts = train(sizes, settings)
    leave(
        {
            "parts": parts,
            "joined": joined,
            "built": built - joined,
            "most": memory("VmHWM") - joined,
        }
    )
