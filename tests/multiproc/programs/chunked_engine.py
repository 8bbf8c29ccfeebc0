# SPDX-License-Identifier: Apache-2.0
"""Train with several stages on each of two ranks, beside 1F1B.

Usage: chunked_engine.py FOLDER CASE...; each rank leaves the results by case and schedule. On two
ranks of the first case with files of plans, too, and with a limit.
"""

import contextlib
import gc
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from unittest import mock

import torch
from common import configuration, leave, own_groups, refusal
from plan_engine import MODELS, batches, go_on, start

import wavemare
from wavemare.engine.pipe import measure
from wavemare.models import whole_state_dict
from wavemare.pipeline.clock.simulate import Costs
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.files import to_csv
from wavemare.pipeline.plan.orders import zb_h1, zbv
from wavemare.pipeline.plan.plan import COMPUTE

SCHEDULES = ["zb-h1", "interleaved", "zbv", "auto"]
UNLIKE = Costs(
    forward_s=(8.0, 1.0, 2.0, 1.0), backward_s=(9.0, 2.0, 3.0, 2.0), weight_s=(4.0, 0.5, 1.0, 0.5)
)
"""Times for which `auto` has another plan than for equal ones."""
BY_HAND = """
plan schedule=by-hand stages=3 micro_batches=4 steps=1 send_slots=0 homes=0,1,0
0: 0F0 0F1 2F0 2B0 0F2 2F1 2I1 0I0 0F3 2F2 2I2 2W1 0W0 0B1 2W2 2F3 2B3 0B2 0B3
1: 1F0 1F1 1B0 1F2 1I1 1F3 1W1 1B2 1B3
"""
FILES = {
    "zbv.csv": to_csv(zbv(2, 4)),
    "zb-h1.csv": to_csv(zb_h1(2, 4)),
    "by-hand.txt": BY_HAND,
}
BROKEN = {
    "circle.txt": BY_HAND.replace("0F0 0F1 2F0", "2F0 0F0 0F1"),
    "missing.txt": BY_HAND.replace("1W1 ", ""),
    "three-ranks.csv": to_csv(zbv(3, 6)),
    "fewer.csv": to_csv(zbv(2, 3)),
}


def weights(engine):
    """Return the sum of the bits of each weight of the model, on rank 0."""
    return bits(whole_state_dict(engine) or {})


def bits(state):
    return {
        name: int(tensor.contiguous().view(torch.uint8).long().cumsum(-1).sum())
        for name, tensor in state.items()
    }


def tensors_after(engine, number):
    """Return how many activations are alive after an evaluation."""
    engine.eval_batch(batches(9), num_micro_batches=number)
    gc.collect()
    return sum(type(each) is torch.Tensor and each.ndim == 3 for each in gc.get_objects())


def train(engine):
    torch.manual_seed(0)
    data = batches(engine.data_rank)
    losses, norms = [], []
    for _ in range(3):
        losses.append(float(engine.train_batch(data)))
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    evaluation, logits = engine.eval_batch(batches(9), return_logits=True, num_micro_batches=3)
    kept = [tensors_after(engine, number) for number in (5, 9)]
    found = {
        "losses": losses,
        "norms": norms,
        "evaluation": float(evaluation),
        "kept": kept[1] - kept[0],
        "logits": 0.0 if logits is None else float(logits.double().sum()),
        "more": [float(engine.train_batch(data)) for _ in range(2)],
        "weights": weights(engine),
        "parameters": sum(p.numel() for p in engine.module.parameters()),
        "homes": list(engine.module.homes),
    }

    def grow():
        engine.set_train_batch_size(2 * engine.train_batch_size())
        found["loss"] = float(engine.train_batch(data))

    return found | {"larger": refusal(grow), "size": engine.train_batch_size()}


def limited(case):
    """Train with `auto` and a limit; return the passes of the plans, and of the last step."""
    with mock.patch.object(measure, "measured_costs", return_value=UNLIKE):
        engine = start(case, "auto", memory_limit="0.75x")
        plans = [engine.plan]
        found = train(engine)
    engine.set_train_batch_size(engine.train_batch_size() // 2)
    plans.append(engine.plan)
    engine.recorder.keeping = True
    engine.train_batch(batches(0))
    ran = [str(event.action) for event in engine.recorder.events if event.action.kind in COMPUTE]
    passes = [[str(a) for a in p.ranks[engine.stage_id] if a.kind in COMPUTE] for p in plans]
    return found | {"plans": passes, "ran": ran, "peaks": [check(p).peak_memory for p in plans]}


def of_files(case):
    """Train by each file's plan, by a path that is relative to the working directory."""
    for name, text in (FILES | BROKEN).items():
        Path(name).write_text(text)
    for name in FILES:
        with own_groups():
            found = train(start(case, f"file:{name}"))
        yield name, found
    for name in BROKEN:
        yield name, refusal(partial(start, case, f"file:{name}"))
    model = wavemare.to_pipeline(MODELS["gpt2-quiet-untied"](), num_stages=2)
    config = configuration(
        0,
        wavemare={"pipeline": {"schedule": "file:zbv.csv"}},
        gradient_accumulation_steps=4,
    )
    yield "other stages", refusal(lambda: wavemare.initialize(model=model, config=config))
    if torch.distributed.get_rank():
        Path("zbv.csv").write_text(FILES["by-hand.txt"])
        Path("zb-h1.csv").unlink()
    for name in ("zbv.csv", "zb-h1.csv"):
        yield f"unlike {name}", refusal(partial(start, case, f"file:{name}"))


def resumed(folder):
    case = "gpt2-quiet-untied/bf16-zero"
    engine, data = start(case, "zbv"), batches(0)
    go_on(engine, data)
    engine.save_checkpoint(folder)
    found = {"saved": weights(engine), "whole": go_on(engine, data)}
    engine, data = start(case, "zbv"), batches(0)
    go_on(engine, data)
    engine.load_checkpoint(folder)
    found["resumed"] = go_on(engine, data)
    other, data = start(case), batches(0)
    go_on(other, data)
    other.load_checkpoint(folder)
    found["other"] = go_on(other, data)["losses"]
    other.load_checkpoint(folder, load_module_only=True)
    found["loaded"] = weights(other)
    return found


def refused():
    """Return what is said of a model that is cut for a V, with 1F1B."""
    model = wavemare.to_pipeline(MODELS["gpt2-quiet-untied"](), num_stages=2, homes=(0, 1, 1, 0))
    config = configuration(0, wavemare={"pipeline": {"stages": 2}}, gradient_accumulation_steps=4)
    return refusal(lambda: wavemare.initialize(model=model, config=config))


def accumulated():
    """Train as `gpt2-quiet-untied/sgd-checkpoints` in one process, by plain PyTorch."""
    model, data = MODELS["gpt2-quiet-untied"](), batches(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    for _ in range(5):
        for batch in islice(data, 4):
            (model(**batch).loss / 4).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = sum(gradient.double().square().sum() for gradient in gradients).sqrt().float()
        torch._foreach_mul_(gradients, 0.1 / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
    return bits(model.state_dict())


def more(folder, case):
    """Return what is told of one case alone."""
    with contextlib.chdir(folder):
        own = Path(f"plans-{torch.distributed.get_rank()}")
        own.mkdir()
        with contextlib.chdir(own):
            files = dict(of_files(case))
    found = {"files": files, "limited": limited(case), "resumed": resumed(f"{folder}/checkpoint")}
    return found | {"refused": refused(), "accumulated": accumulated()}


if __name__ == "__main__":
    wavemare.init_distributed()
    results = {}
    for case in sys.argv[2:]:
        with own_groups():
            results[case] = {name: train(start(case, name)) for name in ["1f1b", *SCHEDULES]}
    leave(results | (more(*sys.argv[1:3]) if torch.distributed.get_world_size() == 2 else {}))
