# SPDX-License-Identifier: Apache-2.0
"""Save and load checkpoints; leave losses, digests and errors.

Arguments: result folder, checkpoint folder, action, then what the action needs.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from common import (
    HIDDEN,
    QUIET,
    VOCABULARY,
    build_gpt2,
    configuration,
    leave,
    token_batches,
    weights_digest,
)
from deepspeed import comm as dist
from deepspeed.moe.layer import MoE

import wavemare

STEPS = 3
PIPELINES = ("pipeline", "pipemare")


class Experts(torch.nn.Module):
    """A language model of one layer, whose two experts have a rank each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        expert = torch.nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoE(HIDDEN, expert, num_experts=2, ep_size=2, use_rts=False)
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids, labels):
        hidden, auxiliary, _ = self.moe(self.embedding(input_ids))
        loss = torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss + 0.1 * auxiliary)


def build(case, **changes):
    """Return an engine for a ZeRO stage ('1', '3'), 'pipeline' or 'pipemare' (stages, ZeRO 1).

    ``wide`` or ``deep`` at a case's end makes another model.
    """
    case, *other = case.split("-")
    if case == "moe":
        return wavemare.initialize(model=Experts(), config=configuration(0, **changes))[0]
    other_sizes = {"wide": {"vocab_size": 60}, "deep": {"n_layer": 3}}
    model = build_gpt2(**QUIET, **(other_sizes[other[0]] if other else {}))
    if case not in PIPELINES:
        return wavemare.initialize(model=model, config=configuration(int(case), **changes))[0]
    stages, untie = torch.distributed.get_world_size(), case == "pipemare"
    module = wavemare.to_pipeline(model, num_stages=stages, inputs=["input_ids"], untie=untie)
    if untie:
        changes["wavemare"] = {"pipeline": {"schedule": "pipemare", "stages": stages}}
    return wavemare.initialize(model=module, config=configuration(1, **changes))[0]


def batches(case, *, first):
    """Yield a rank's micro-batches, from that which step ``first`` begins with."""
    rank = torch.distributed.get_rank()
    data = token_batches(0 if case in PIPELINES else rank)
    for _ in range(first * 2):
        next(data)
    return ((batch, batch) for batch in data)


def train(engine, case, data):
    """Train STEPS steps."""
    if case in PIPELINES:
        return [engine.train_batch(data).item() for _ in range(STEPS)]
    losses = []
    for _ in range(2 * STEPS):
        batch, _ = next(data)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def save(folder, case):
    engine = build(case)
    data = batches(case, first=0)  # of which PipeMare has read one in advance when it is saved
    train(engine, case, data)
    engine.save_checkpoint(str(folder), "first")
    wavemare.save_pretrained(engine, folder / "model")
    return {"losses": train(engine, case, data), "weights": weights_digest(engine)}


def load(folder, case):
    engine = build(case)
    path, _ = engine.load_checkpoint(str(folder))
    assert path is not None
    losses = train(engine, case, batches(case, first=STEPS))
    return {"losses": losses, "weights": weights_digest(engine)}


def universal(folder, case):
    if case not in PIPELINES:
        engine = build(case, checkpoint={"load_universal": True})
        engine.load_checkpoint(str(folder), load_optimizer_states=False)
        wavemare.save_pretrained(engine, folder / "weights alone")
    engine = build(case, checkpoint={"load_universal": True})
    engine.load_checkpoint(str(folder))
    wavemare.save_pretrained(engine, folder / "model")
    return {"losses": train(engine, case, batches(case, first=STEPS))}


def refuse(folder, case, action=load):
    try:
        action(folder, case)
    except wavemare.errors.CheckpointError as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"kinds": kinds, "key": error.key, "reason": error.reason, "remedy": error.remedy}
    return {}


def refuse_states(folder, case):
    """Save client states that cannot be kept, one of them on rank 1 alone, and then a sound one."""
    engine = build(case, checkpoint={"tag_validation": "FAIL"})
    with pytest.raises(ValueError, match="save_dir"):
        engine.save_checkpoint(None)
    with pytest.raises(AssertionError, match="tag"):
        engine.save_checkpoint(str(folder), f"tag-{dist.get_rank()}")
    told = []
    for state in ({"universal_checkpoint_info": {}}, {"own": Path} if dist.get_rank() else {}):
        with pytest.raises(wavemare.errors.CheckpointError) as caught:
            engine.save_checkpoint(str(folder), "bad", state)
        told.append(caught.value.key)
    own = Path if dist.get_rank() else 3
    state = engine.lr_scheduler.state_dict
    engine.lr_scheduler.state_dict = lambda: {**state(), "own": own}
    with pytest.raises(wavemare.errors.CheckpointError) as caught:
        engine.save_checkpoint(str(folder), "bad")
    told.append(caught.value.key)
    engine.lr_scheduler.state_dict = state
    for place, tag in ((folder, ".."), (f"{folder}{dist.get_rank()}", "good")):
        with pytest.raises(wavemare.errors.CheckpointError) as caught:
            engine.save_checkpoint(str(place), tag)
        told.append(caught.value.key)
    engine.save_checkpoint(str(folder), "good", {"step": 3})
    return told


def odd_names(folder, case):
    """Save into folders and tags of odd names, the last one in the background; load each."""
    engine = build(case, wavemare={"checkpoint": {"background": True}})
    folder.mkdir(exist_ok=True)
    here, found = Path.cwd(), []
    for place, tag in (("d[1]", "a[0]*?"), ("a b", 5), ("-ünï", Path("x/y::z")), (".", "{a,b}")):
        os.chdir(folder)
        engine.save_checkpoint(place, tag)
        os.chdir(here)
        engine.finish_saving()
        (folder / place / "latest").read_text()
        for given in (tag, None):
            path, _ = engine.load_checkpoint(str(folder / place), given)
            found.append(Path(path).relative_to(folder).as_posix())
    return found


def exported(folder, case):
    """Go on in a pipeline from the exported model; return its loss and the right one."""
    whole = transformers.GPT2LMHeadModel.from_pretrained(folder / "model")
    (batch, labels) = next(batches(case, first=0))
    right = whole(input_ids=batch, labels=labels).loss.item()
    stages = torch.distributed.get_world_size()
    module = wavemare.to_pipeline(whole, num_stages=stages, inputs=["input_ids"])
    engine = wavemare.initialize(model=module, config=configuration(1))[0]
    return [engine.eval_batch(iter([(batch, labels)] * 2)).item(), right]


def again(folder, case):
    build(case).save_checkpoint(str(folder), "only")
    return {}


if __name__ == "__main__":
    wavemare.init_distributed()
    folder, action, cases = Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
    actions = {
        "save": save,
        "load": load,
        "universal": universal,
        "refuse": refuse,
        "refuse_universal": lambda where, case: refuse(where, case, universal),
        "again": again,
        "refuse_states": refuse_states,
        "odd_names": odd_names,
        "exported": exported,
    }
    leave(
        {case: actions[action](folder / case.split(":")[0], case.split(":")[-1]) for case in cases}
    )
