# SPDX-License-Identifier: Apache-2.0
"""Load weights without the optimizer's states, then step with learning rate 0.

Arguments: result folder, checkpoint folder, cases. Leaves for each case and way of loading the
largest difference from the weights that were wanted: before the load, after it and after the step.
"""

import sys
from pathlib import Path

import deepspeed
import torch
from common import build_gpt2, configuration, furthest, leave, token_batches
from deepspeed.utils import safe_get_full_fp32_param

import wavemare
from wavemare.engine.parts import own_part
from wavemare.errors import CheckpointError

BF16 = {"bf16": {"enabled": True}}
CASES = {
    "0": (0, {}, {}),
    "1": (1, {}, {}),
    "2": (2, {}, {}),
    "3": (3, {}, {}),
    "0-bf16": (0, BF16, {}),
    "1-bf16": (1, BF16, {}),
    "2-bf16": (2, BF16, {}),
    "3-bf16": (3, BF16, {}),
    "1f1b-bf16": (0, BF16, {"pipeline": {"stages": 2, "untie": True}}),
    "1f1b-1-bf16": (1, BF16, {"pipeline": {"stages": 2, "untie": True}}),
    "pipemare-bf16": (0, BF16, {"pipeline": {"stages": 2, "schedule": "pipemare"}}),
    "local_steps-bf16": (1, BF16, {"local_steps": {"mode": "diloco", "replica": 1, "every": 2}}),
}
"""ZeRO stage, precision, and the section ``wavemare``."""


OTHERS = {
    "swapped": ({"frozen": "h.0."}, {"frozen": "h.1."}),
    "thawed": ({"frozen": "wpe"}, {}),
    "frozen": ({}, {"frozen": "wpe"}),
    "order": ({"first": "ln_1"}, {"first": "ln_2"}),
}
"""What is given to `start` before a save and before the load: another optimizer."""


def groups(model, first):
    """Two parameter groups; ``first`` is a part of the names of the first group's weights."""
    named = dict(model.named_parameters())
    return [{"params": [p for n, p in named.items() if (first in n) == own]} for own in (1, 0)]


def start(case, *, seed, universal=False, frozen="", first=""):
    """Return an engine whose weights depend on the seed."""
    zero, precision, section = CASES[case]
    model = build_gpt2()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and frozen in name))
    adam = {"lr": 0.0, "torch_adam": True, "weight_decay": 0.0}
    config = configuration(
        zero,
        optimizer={"type": "AdamW", "params": adam},
        checkpoint={"load_universal": universal},
        wavemare=section,
        **precision,
    )
    del config["scheduler"]  # it would set a learning rate
    parameters = groups(model, first) if first else None
    return wavemare.initialize(model=model, config=config, model_parameters=parameters)[0]


def step(engine):
    batches = token_batches(engine.data_rank)
    engine.train_batch({"input_ids": batch, "labels": batch} for batch in batches)


def weights(engine):
    found = []
    for parameter in engine.module.parameters():
        gathered = engine.zero_optimization_stage() == 3
        with deepspeed.zero.GatheredParameters([parameter], enabled=gathered):
            found.append(parameter.detach().float().clone())
    return found


def tried(case, wanted, load, *, steps=1, **options):
    """Return the differences of an engine that loads."""
    engine = start(case, seed=2, **options)
    for _ in range(steps - 1):
        step(engine)
    found = [furthest(weights(engine), wanted)]
    load(engine)
    found.append(furthest(weights(engine), wanted))
    for _ in range(2):
        step(engine)
    found.append(furthest(weights(engine), wanted))
    engine.destroy()
    return found


def masters(engine):
    found = [(safe_get_full_fp32_param(p), p) for p in engine.module.parameters()]
    return [(p if full is None else full).detach().float().clone() for full, p in found]


def loads_a_part(case, held):
    """Return how far a weight that is loaded alone moves, and others' masters, and is left then."""
    engine = start(case, seed=2)
    step(engine)
    before, own = masters(engine), list(engine.module.parameters())
    with own_part():
        state = engine.module.state_dict(keep_vars=True)
    name, number = next(
        (name, n) for name, value in state.items() for n, p in enumerate(own) if p is value
    )
    engine.module.load_state_dict({name: held[name]}, strict=False)
    after, wanted = masters(engine), held[name].float()
    others = [[m for n, m in enumerate(each) if n != number] for each in (after, before)]
    found = [furthest([before[number]], [wanted]), furthest(*others)]
    step(engine)
    found.append(furthest([masters(engine)[number]], [wanted]))
    engine.destroy()
    return found


def assign(engine, wanted):
    """Change weights in place, as averages and limits of weights do."""
    with torch.no_grad():
        for parameter, values in zip(engine.module.parameters(), wanted, strict=True):
            parameter.copy_(values)


def loads_what_is_near(case, held):
    """Return how far weights that differ little from the present ones are off, when loaded."""
    engine = start(case, seed=1)
    step(engine)
    near = {name: value * 1.0001 for name, value in held.items()}
    engine.module.load_state_dict(near)
    wanted = weights(engine)
    step(engine)
    found = [1.0, 0.0, furthest(weights(engine), wanted)]
    engine.destroy()
    return found


def ways(case, folder):
    """Return the differences by each way of loading; another checkpoint is the latest."""
    results = {}
    other = start(case, seed=3)
    engine = start(case, seed=1)
    wanted = weights(engine)
    if "local_steps" not in case:  # its checkpoints are refused without the optimizer
        engine.save_checkpoint(str(folder), "wanted")
        other.save_checkpoint(str(folder), "other")
        for name, options in {
            "states": {"load_optimizer_states": False},
            "module": {"load_module_only": True},
        }.items():
            results[name] = tried(
                case, wanted, lambda own, o=options: own.load_checkpoint(str(folder), "wanted", **o)
            )
    if not case.startswith("3"):  # whose ranks hold parts
        with own_part():
            held = {name: value.clone() for name, value in engine.module.state_dict().items()}
        results["dictionary"] = tried(
            case, wanted, lambda own: own.load_module_state_dict({"module": held}), steps=3
        )
        if "local_steps" not in case:
            results["module's own"] = tried(
                case, wanted, lambda own: own.module.load_state_dict(held), steps=3
            )
            results["a part"] = loads_a_part(case, held)
            if "pipemare" not in case:
                results["in place"] = tried(case, wanted, lambda own: assign(own, wanted), steps=3)
            if case in ("0", "1", "2"):
                results["nearly"] = loads_what_is_near(case, held)
    engine.destroy()
    other.destroy()
    return results


def others(case, folder):
    """Load what an optimizer of other weights has saved: what is said; then the weights alone."""
    found = {}
    for name, (before, after) in OTHERS.items():
        engine = start(case, seed=1, **before)
        step(engine)
        wanted = weights(engine)
        engine.save_checkpoint(str(folder / name))
        engine.destroy()
        engine = start(case, seed=2, **after)
        told = []
        for options in ({}, {"load_optimizer_states": False}):
            try:
                engine.load_checkpoint(str(folder / name), **options)
                told.append("")
            except CheckpointError as error:
                told.append(f"{error.reason}. {error.remedy}")
        step(engine)
        found[name] = [*told, furthest(weights(engine), wanted)]
        engine.destroy()
    return found


def universal(case, folder):
    """Return the differences by a universal checkpoint, made where it is missing."""
    if not (folder / "universal").exists():
        engine = start(case, seed=1)
        step(engine)  # before it there are no states to convert
        engine.save_checkpoint(str(folder), "plain")
        torch.save(weights(engine), folder / f"wanted_{torch.distributed.get_rank()}.pt")
        engine.destroy()
        return {}
    (folder / "latest_universal").write_text("universal")
    wanted = torch.load(folder / f"wanted_{torch.distributed.get_rank()}.pt")
    load = {"load_optimizer_states": False}
    return {
        "universal": tried(
            case, wanted, lambda own: own.load_checkpoint(str(folder), **load), universal=True
        )
    }


if __name__ == "__main__":
    wavemare.init_distributed()
    root, action, *cases = sys.argv[2:]
    run = {"ways": ways, "universal": universal}[action]
    found: dict[str, object] = {}
    for case in cases:
        kind, _, others_of = case.partition(":")
        own = others_of or kind
        found[case] = (others if others_of else run)(own, Path(root, case))
    leave(found)
