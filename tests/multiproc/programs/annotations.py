# SPDX-License-Identifier: Apache-2.0
"""Train models that are laid out by annotations beside the same models by plain PyTorch.

The second argument names the part; every rank leaves what it saw as JSON.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import difference, leave, refusal, train_plainly, weights_digest
from deepspeed.utils import groups
from tensor_models import batch, build

import wavemare
from wavemare.engine import init_distributed
from wavemare.models import whole_state_dict
from wavemare.parallel.layout.annotations import pipeline

STEPS, MICRO_BATCHES, MICRO, RATE = 3, 4, 3, 0.02
# The second stage begins before or behind the second of two blocks.
EARLY = [["embed", "layers.0"], ["layers.1", "norm", "head"]]
LATE = [["embed", "layers"], ["norm", "head"]]


def micro_batches(model, replica=0, replicas=1):
    """Yield the micro-batches of a replica: of those of a step each takes an equal part."""
    part = MICRO_BATCHES // replicas
    for step in range(100):
        for number in range(replica * part, (replica + 1) * part):
            yield batch(model, step * MICRO_BATCHES + number, MICRO)


def train_whole(name):
    """The model in this process, by plain PyTorch."""
    model = build(name).train()
    sgd = torch.optim.SGD(model.parameters(), lr=RATE)
    data = micro_batches(model)
    losses, _ = train_plainly(model, sgd, data, steps=STEPS, micro_batches=MICRO_BATCHES)
    return losses, model.state_dict()


def configuration(replicas, **changes):
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "train_batch_size": MICRO * MICRO_BATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        **changes,
    }


def start(model, replicas=1, **changes):
    groups.mpu = None
    engine, *_ = wavemare.initialize(model=model, config=configuration(replicas, **changes))
    return engine


def train(engine, name, steps=STEPS, data=None):
    data = data or micro_batches(build(name), engine.data_rank, engine.data_world_size)
    return [float(engine.train_batch(data)) for _ in range(steps)]


def beside_whole(engine, name):
    expected, weights = train_whole(name)
    losses = train(engine, name)
    plan = engine.layout
    merged = whole_state_dict(engine) if plan.stages > 1 else None
    return {
        "losses": losses,
        "expected": expected,
        "difference": None if merged is None else difference(merged, weights),
        "degrees": [plan.stages, plan.tensor_parallel, plan.data_parallel],
        "digest": plan.digest,
    }


def lines():
    """GPT-2 and BERT laid out by the lines of the documentation."""
    result = {}

    with pipeline(micro_batches=4, stages=2):
        model = build("gpt2-101")
    engine, *_ = wavemare.initialize(model=model, config=configuration(1))
    result["gpt2 pipeline"] = beside_whole(engine, "gpt2-101")

    model = build("bert-mlm")
    wavemare.annotate(model, {"stages": {"s0": ["embed", "layers.0"], "s1": ["layers.1", "head"]}})
    engine, *_ = wavemare.initialize(model=model, config=configuration(1))
    result["bert pipeline"] = beside_whole(engine, "bert-mlm")

    with wavemare.replica(), wavemare.split(2):
        model = build("gpt2-101")
    result["gpt2 split"] = beside_whole(start(model), "gpt2-101")

    with wavemare.replica():
        model = build("bert-cls")
    result["bert replica"] = beside_whole(start(model, 2), "bert-cls")
    return result


def given():
    """One layout by the configuration, by a plan's file, by the plan itself and by annotate."""
    folder, name = Path(sys.argv[1]), "gpt2"
    section: dict[str, Any] = {"stages": EARLY, "pipeline": {"micro_batches": 4}}
    engine = start(build(name), wavemare={"parallel": section})
    plan = engine.layout
    if torch.distributed.get_rank() == 0:
        (folder / "layout.json").write_text(plan.to_json())
    torch.distributed.barrier()
    result = {"configuration": beside_whole(engine, name)}
    file = {"parallel": {"plan": str(folder / "layout.json")}}
    result["file"] = beside_whole(start(build(name), wavemare=file), name)
    inline = {"parallel": {"plan": json.loads(plan.to_json())}}
    result["inline"] = beside_whole(start(build(name), wavemare=inline), name)
    result["annotate"] = beside_whole(start(wavemare.annotate(build(name), plan)), name)
    return result


def refusals():
    """Plans that cannot be run, and checkpoints of another plan."""
    rank, folder = torch.distributed.get_rank(), Path(sys.argv[1], "checkpoint")

    def staged(layout):
        return start(wavemare.annotate(build("gpt2"), {"stages": layout}))

    result = {"disagree": refusal(lambda: staged([EARLY, LATE][rank]))}
    result["no file"] = refusal(
        lambda: start(build("gpt2"), wavemare={"parallel": {"plan": "/nowhere/layout.json"}})
    )
    engine = staged(EARLY)
    train(engine, "gpt2", 1)
    engine.save_checkpoint(folder, "one")
    expected = train(engine, "gpt2", 2)
    plan = engine.layout
    manifest = json.loads((folder / "one" / "wavemare.json").read_text())
    again = staged(EARLY)
    again.load_checkpoint(folder, "one")
    result["resumed"] = [train(again, "gpt2", 2), expected]
    result["digests"] = [weights_digest(again), weights_digest(engine)]
    other = staged(LATE)
    other.load_checkpoint(folder, "one")
    result["other plan"] = [train(other, "gpt2", 2), expected]
    result["plans"] = [plan.digest, other.layout.digest, manifest["plan"]["digest"]]
    result["layout"] = manifest["plan"]["layout"] == json.loads(plan.to_json())
    result["twice"] = refusal(
        lambda: start(
            wavemare.annotate(build("gpt2"), {"stages": 2}), wavemare={"parallel": {"split": 2}}
        )
    )
    longer = replace(plan, num_layers=7, cuts=(0, 3, 7))
    result["other model"] = refusal(lambda: start(wavemare.annotate(build("gpt2"), longer)))
    wider = replace(plan, tensor_parallel=2)
    result["more processes"] = refusal(lambda: start(wavemare.annotate(build("gpt2"), wider)))
    section = {"parallel": {"split": 2, "stages": 2}}
    result["world size"] = refusal(lambda: start(build("gpt2"), wavemare=section))
    return result


def universal():
    """A checkpoint of one plan goes on under another through DeepSpeed's universal format."""
    folder = Path(sys.argv[1], "checkpoint")

    def staged(layout, **changes):
        model = wavemare.annotate(build("gpt2"), {"stages": layout})
        adam = {"type": "AdamW", "params": {"lr": RATE}}
        zero = {"zero_optimization": {"stage": 1}}
        return start(model, optimizer=adam, **zero, **changes)

    engine = staged(EARLY)
    train(engine, "gpt2", 1)
    engine.save_checkpoint(folder, "one")
    expected = train(engine, "gpt2", 3)
    if torch.distributed.get_rank() == 0:
        words = ["--input_folder", folder / "one", "--output_folder", folder / "universal"]
        tool = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        subprocess.run([*tool, *words], check=True, stdout=subprocess.DEVNULL)
        (folder / "latest_universal").write_text("universal")
    torch.distributed.barrier()
    other = staged(LATE, checkpoint={"load_universal": True})
    fresh = train(staged(LATE), "gpt2", 3)
    other.load_checkpoint(folder)
    return {
        "losses": train(other, "gpt2", 3),
        "expected": expected,
        "fresh": fresh,
        "plans": [engine.layout.digest, other.layout.digest],
    }


def grid():
    """All of stages, splits and replicas on four ranks, tied and untied."""
    result = {}
    for name in ("gpt2-101", "bert-mlm-101"):
        for degrees in ((2, 2, 1), (2, 1, 2), (1, 2, 2)):
            stages, split, replicas = degrees
            layout = {"replica": "rest", "split": split}
            if stages > 1:
                layout |= {"stages": {"a": ["embed", "layers.0"], "b": ["layers.1", "head"]}}
            model = wavemare.annotate(build(name), layout)
            result[f"{name} {stages}{split}{replicas}"] = beside_whole(start(model, replicas), name)
    return result


PARTS = {
    "lines": lines,
    "given": given,
    "refusals": refusals,
    "grid": grid,
    "universal": universal,
}

if __name__ == "__main__":
    init_distributed()
    leave(PARTS[sys.argv[2]]())
