# SPDX-License-Identifier: Apache-2.0
"""Save, or load at other sizes; leave the states and the losses of the next steps of each cell.

Arguments: result folder, checkpoint folder, ``save`` or ``load``, ``ours`` or ``stock``, then
cells: stages, ZeRO stage, schedule, precision and optimizer, as in ``2/1/zbv/bf16/AdamW``; for a
load ``SAVED:LOADED``. With ``1f1b-apart`` each of two replicas is cut elsewhere, with ``-frozen``
the first block is not trained. All cells train on the same rows, whatever their ranks and stages
are.
"""

import hashlib
import sys
from pathlib import Path

import deepspeed
import torch
from common import LENGTH, QUIET, VOCABULARY, build_gpt2, leave
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import wavemare
from wavemare.engine.checkpoint.resize import weight_names
from wavemare.errors import WavemareError

ROWS, MICRO, STEPS = 8, 2, 3
PARAMS = {"AdamW": {"torch_adam": True}, "Adam": {"torch_adam": True}, "SOAP": {}, "Muon": {}}


def build(cell, initialize=wavemare.initialize):
    stages, zero, schedule, precision, optimizer = cell.split("/")
    data = torch.distributed.get_world_size() // int(stages)
    section = {}
    if int(stages) > 1:
        section = {"stages": int(stages), "schedule": schedule, "inputs": ["input_ids"]}
        section |= {"untie": True} if "untied" in schedule else {}
        section |= {"partition": [[0, 3], [0, 2]]} if "apart" in schedule else {}
        section["schedule"] = schedule.partition("-frozen")[0].removesuffix("-untied")
        section["schedule"] = section["schedule"].removesuffix("-apart")
    params = {"lr": 1e-2, "weight_decay": 0.1, **PARAMS[optimizer]}
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ROWS // MICRO // data,
        "optimizer": {"type": optimizer, "params": params},
        "zero_optimization": {"stage": int(zero)},
        "bf16": {"enabled": precision == "bf16"},
        "gradient_clipping": 0.5,
        "steps_per_print": None,
        "wavemare": {"pipeline": section} if section else {},
    }
    if optimizer != "Muon":  # whose groups have rates of their own
        params = {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}
        config["scheduler"] = {"type": "WarmupLR", "params": params}
    if initialize is not wavemare.initialize:
        del config["wavemare"]
    model = build_gpt2(**QUIET, n_layer=3)
    if "frozen" in schedule:
        model.transformer.h[0].requires_grad_(False)
    return initialize(model=model, config=config)[0]


def train(engine, cell, first):
    stages = int(cell.split("/")[0])
    data = torch.distributed.get_world_size() // stages
    rank = engine.data_rank if hasattr(engine, "data_rank") else torch.distributed.get_rank()
    losses = []
    for step in range(first, first + STEPS):
        rows = torch.randint(
            VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step)
        )
        micro = [{"input_ids": own, "labels": own} for own in rows[rank::data].split(MICRO)]
        if stages > 1:
            losses.append(float(engine.train_batch(iter(micro))))
            continue
        total = torch.zeros(())
        for batch in micro:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / len(micro)
        torch.distributed.all_reduce(total)
        losses.append(float(total) / data)
    return losses


def digest(value):
    return hashlib.sha256(value.detach().float().contiguous().numpy().tobytes()).hexdigest()[:16]


def states(engine):
    """Return digests of masters and averages by weight, as DeepSpeed's functions tell them."""
    names, found = weight_names(engine), {}
    basic = engine.basic_optimizer
    plain = engine.optimizer is basic
    if hasattr(
        engine.optimizer, "_lazy_init_hp_params_optimizer_state"
    ):  # else the first step does
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for own, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        values = {"fp32": parameter if plain else safe_get_full_fp32_param(parameter)}
        for key in ("exp_avg", "exp_avg_sq"):
            values[key] = (
                basic.state[parameter][key]
                if plain
                else safe_get_full_optimizer_state(parameter, key)
            )
        found[names.get(own, own)] = {key: digest(value) for key, value in values.items()}
    return found


def result(engine, cell, first):
    known = states(engine) if "Adam" in cell else {}
    rates = sorted({group["lr"] for group in engine.basic_optimizer.param_groups})
    return {"states": known, "losses": train(engine, cell, first), "rates": rates}


def save(folder, cell, initialize):
    engine = build(cell, initialize)
    train(engine, cell, 0)
    engine.save_checkpoint(str(folder / cell.replace("/", "_")), "tag", client_state={"own": 5})
    found = result(engine, cell, STEPS)
    engine.destroy()
    return found


def load(folder, cells, initialize):
    saved, cell = cells.split(":")
    engine = build(cell)
    try:
        path, client = engine.load_checkpoint(str(folder / saved.replace("/", "_")))
        assert path is not None
        assert client["own"] == 5
        assert engine.global_steps == STEPS
        assert engine.global_samples == STEPS * ROWS
        again = folder / f"{saved}-{cell}-{torch.distributed.get_world_size()}".replace("/", "_")
        engine.save_checkpoint(str(again), "tag", client_state={"own": 5})
        found = result(engine, cell, STEPS)
    except WavemareError as error:
        found = {"key": error.key, "reason": error.reason, "remedy": error.remedy}
    engine.destroy()
    return found


if __name__ == "__main__":
    wavemare.init_distributed()
    initialize = {"ours": wavemare.initialize, "stock": deepspeed.initialize}[sys.argv[4]]
    action = {"save": save, "load": load}[sys.argv[3]]
    leave({cell: action(Path(sys.argv[2]), cell, initialize) for cell in sys.argv[5:]})
