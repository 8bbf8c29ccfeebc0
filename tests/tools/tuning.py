# SPDX-License-Identifier: Apache-2.0
"""Measure LoRA in two stages: the memory of each rank, and the speed beside one rank.

::

    python tests/tools/tuning.py memory --folder /tmp/made --json memory.json
    python tests/tools/tuning.py speed --json speed.json

``memory`` makes a Llama of 1.1 billion random weights in the folder, once, and trains LoRA on it in
4 bits. It needs bitsandbytes. Bytes are above those of the imports: ``peak`` is resident memory,
``unbacked`` is what no file backs, in steps, and ``predicted`` what `wavemare plan memory` says.

``speed`` takes turns in one run: rank 0 trains the whole model by peft and plain PyTorch while
rank 1 waits, then both train it in two stages. Both get the same tokens and one thread per rank.
``cpu_s`` is processor time, which other work on the machine changes less than it does ``step_s``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

TINY_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
SMALL = {
    "vocab_size": 8000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
RANKS, RATE = 2, 1e-4
CLEAR = "/proc/self/clear_refs"
LORA = {"r": 8, "target_modules": "all-linear"}


def make(folder: Path, sizes: dict[str, Any]) -> None:
    """Write a Llama of random weights in bf16, with its configuration last."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**sizes), dtype=torch.bfloat16
    )
    model.save_pretrained(folder, max_shard_size="500MB")


def four_bits() -> Any:
    """Return the configuration of QLoRA, computing in fp32."""
    import torch
    import transformers

    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )


def memory_now() -> dict[str, int]:
    """Return bytes of this process: resident, the most so far, and those that files back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM", "RssFile")}


def start(model: Any, given: argparse.Namespace) -> Any:
    """Return the engine of two stages."""
    import wavemare

    config = {
        "train_micro_batch_size_per_gpu": given.samples,
        "gradient_accumulation_steps": given.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "wavemare": {"pipeline": {"stages": RANKS, "schedule": given.schedule}},
    }
    return wavemare.initialize(model=model, config=config)[0]


def batches(given: argparse.Namespace, vocabulary: int) -> list[dict[str, Any]]:
    """Return the micro-batches of a step."""
    import torch

    shape = given.micro_batches, given.samples, given.sequence
    ids = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0))
    return [{"input_ids": each, "labels": each} for each in ids]


def measure_memory(given: argparse.Namespace) -> dict[str, Any]:
    """Train on a 4-bit base in stages, and return what memory this rank needed."""
    import bitsandbytes  # noqa: F401
    import peft
    import peft.tuners.lora.bnb
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import wavemare
    from wavemare.models import from_folder
    from wavemare.models.folder import read_config
    from wavemare.parallel.planner.memory import MemorySettings, rank_memory

    wavemare.init_distributed()  # imports the engine, too
    gc.collect()
    before = memory_now()
    Path(CLEAR).write_text("5")  # the peak begins anew
    model = from_folder(given.folder, dtype=torch.float32, quantization_config=four_bits())
    vocabulary = model.config.vocab_size
    engine = start(peft.get_peft_model(model, peft.LoraConfig(**LORA)), given)
    built = memory_now()
    Path(CLEAR).write_text("5")  # files of weights were mapped until now
    steps, losses = [], []
    for _ in range(given.rounds):
        begin = time.perf_counter()
        losses.append(float(engine.train_batch(iter(batches(given, vocabulary)))))
        steps.append(time.perf_counter() - begin)
    after = memory_now()
    base = before["VmRSS"] - before["RssFile"]
    predicted = rank_memory(
        read_config(given.folder),
        MemorySettings(
            stages=RANKS,
            micro_batches=given.micro_batches,
            samples=given.samples,
            sequence=given.sequence,
            schedule=given.schedule,
            lora_r=LORA["r"],
            four_bit=True,
            double_quant=True,
        ),
    )[torch.distributed.get_rank()]
    return {
        "layers": list(engine.module.parts),
        "imports": before["VmRSS"],
        "built": built["VmHWM"] - before["VmRSS"],
        "peak": max(built["VmHWM"], after["VmHWM"]) - before["VmRSS"],
        "unbacked": after["VmHWM"] - after["RssFile"] - base,
        "predicted": predicted.total,
        "step_s": steps,
        "losses": losses,
    }


def measure_speed(given: argparse.Namespace) -> dict[str, Any]:
    """Take turns between one rank and two stages, and return the seconds of each step."""
    import peft
    import torch
    import torch.distributed as dist
    import transformers

    import wavemare

    def model() -> Any:
        transformers.set_seed(7)
        whole = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
        return peft.get_peft_model(whole, peft.LoraConfig(**LORA))

    wavemare.init_distributed()
    rows = batches(given, SMALL["vocab_size"])
    engine = start(model(), given)
    whole = model().train() if dist.get_rank() == 0 else None
    trained = [] if whole is None else [p for p in whole.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE) if trained else None

    def alone() -> float:
        total = 0.0
        if optimizer is not None:
            for row in rows:
                loss = whole(**row, use_cache=False).loss / len(rows)
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
        return total

    systems = {"alone": alone, "stages": lambda: float(engine.train_batch(iter(rows)))}
    times, cpu, losses = ({name: list[float]() for name in systems} for _ in range(3))
    for number in range(given.rounds + 1):  # the first one is not timed
        for name, step in systems.items():
            dist.barrier()
            begin, used = time.perf_counter(), time.process_time()
            losses[name].append(step())
            used = time.process_time() - used
            dist.barrier()
            if number:
                times[name].append(time.perf_counter() - begin)
                cpu[name].append(used)
    return {
        "layers": list(engine.module.parts),
        "step_s": times,
        "cpu_s": cpu,
        "losses": losses,
        "ratio": median(times["alone"]) / median(times["stages"]),
    }


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, and return their results."""
    from wavemare.observe.run import describe_machine

    if given.what == "memory" and not (given.folder / "config.json").exists():
        again = [sys.executable, __file__, "make", "--folder", str(given.folder)]
        subprocess.run(again, check=True)
    with tempfile.TemporaryDirectory() as left:
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command = [sys.executable, *words, __file__, *sys.argv[1:], "--left", left]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment)
        ranks = [json.loads(Path(left, str(rank)).read_text()) for rank in range(RANKS)]
    return {
        "command": " ".join(["python", "tests/tools/tuning.py", *sys.argv[1:]]),
        "machine": describe_machine(),
        "ranks": ranks,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("make", "memory", "speed"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--left", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.what != "speed" and given.folder is None:
        parser.error(f"{given.what} needs --folder")
    if given.what == "make":
        make(given.folder, TINY_LLAMA)
    elif given.left is not None:
        import torch.distributed as dist

        result = measure_memory(given) if given.what == "memory" else measure_speed(given)
        (given.left / str(dist.get_rank())).write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()  # gloo's threads must not outlive the interpreter
    else:
        text = json.dumps(run(given), indent=1) + "\n"
        print(text)
        if given.json is not None:
            given.json.write_text(text)
