# SPDX-License-Identifier: Apache-2.0
"""Train models whose head is split over the data ranks, beside the same models by plain replicas.

Every rank leaves what it saw as JSON.
"""

import sys
from pathlib import Path

import torch
import transformers
from common import leave, refusal, weights_digest
from deepspeed.utils import groups
from tensor_models import KINDS, batch, build

import wavemare
from wavemare.engine import init_distributed
from wavemare.models import save_pretrained
from wavemare.parallel.colocated import ColocatedHead, whole_heads

STEPS, MICRO, CLASSES = 4, 3, 11
KINDS["bert-cls-11"] = ("bert-cls", {"vocab_size": 101, "num_labels": CLASSES})
HEADS = {"bert-cls-11": "classifier", "gpt2-untied": "lm_head"}


def batches(name):
    """Yield this rank's micro-batches; of a language model, the ranks count unequal labels."""
    rank, model = torch.distributed.get_rank(), build(name)
    for step in range(100):
        made = batch(model, 2 * step + rank, MICRO)
        if "cls" in name:
            made["labels"] = (made["input_ids"][:, 3] + rank) % CLASSES
        else:
            made["labels"][0, : 2 + 3 * rank] = -100
        yield made


def start(name, split, zero=0, **changes):
    groups.mpu = None
    model = build(name)
    if split:
        wavemare.annotate(model, {"replica": "rest", "colocated": [HEADS[name]]})
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero},
        "steps_per_print": None,
        **changes,
    }
    return wavemare.initialize(model=model, config=config)[0]


def train(engine, data, steps=STEPS):
    return [float(engine.train_batch(data)) for _ in range(steps)]


def weights(engine):
    own = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    return own | whole_heads(engine.module)


def difference(these, those):
    assert these.keys() == those.keys()
    return max(float((these[name] - those[name]).abs().max()) for name in these)


def beside_plain(name, zero, clip):
    changes = {"gradient_clipping": clip, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    plain = start(name, False, zero, **changes)
    before = weights(plain)
    expected = train(plain, batches(name))
    engine = start(name, True, zero, **changes)
    losses = train(engine, batches(name))
    (head,) = (m for m in engine.module.modules() if isinstance(m, ColocatedHead))
    data = batches(name)
    return {
        "losses": losses,
        "expected": expected,
        "difference": difference(weights(engine), weights(plain)),
        "moved": difference(weights(plain), before),
        "held": head.share.held,
        "rows": len(head.weight),
        "evaluated": [float(e.eval_batch(batches(name))) for e in (engine, plain)],
        "logits": logits_apart(engine, plain, next(data)),
    }


@torch.no_grad()
def logits_apart(engine, plain, made):
    made.pop("labels")
    own, whole = (e.module(**made).logits for e in (engine, plain))
    assert own.shape == whole.shape
    return float((own - whole).abs().max())


def resumed(zero):
    """Stop after a step of Adam and go on in another engine; export the model."""
    name, folder = "bert-cls-11", Path(sys.argv[1], f"zero{zero}")
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
    engine = start(name, True, zero, **adam)
    data = batches(name)
    train(engine, data, 1)
    engine.save_checkpoint(folder / "checkpoint", "one")
    saved = weights(engine)
    taken = [next(data) for _ in range(4)]
    expected = train(engine, iter(taken), 2)
    again = start(name, True, zero, **adam)
    again.load_checkpoint(folder / "checkpoint", "one")
    losses = train(again, iter(taken), 2)
    save_pretrained(again, folder / "model")
    loaded = transformers.BertForSequenceClassification.from_pretrained(folder / "model")
    plain = start(name, False, zero, **adam)
    universal = start(name, True, zero, checkpoint={"load_universal": True}, **adam)
    alone = []
    for options in ({"load_optimizer_states": False}, {"load_module_only": True}):
        bare = start(name, True, zero, **adam)
        bare.load_checkpoint(folder / "checkpoint", "one", **options)
        apart = difference(weights(bare), saved)
        train(bare, iter(taken), 1)
        alone.append([apart, difference(weights(bare), saved)])
    return {
        "weights alone": alone,
        "losses": losses,
        "expected": expected,
        "digests": [weights_digest(again), weights_digest(engine)],
        "exported": difference(weights(again), loaded.state_dict()),
        "plain": refusal(lambda: plain.load_checkpoint(folder / "checkpoint", "one")),
        "universal": refusal(lambda: universal.load_checkpoint(folder / "checkpoint", "one")),
    }


def refusals():
    def annotated(name, layout, **changes):
        config = {"train_micro_batch_size_per_gpu": MICRO, "optimizer": {"type": "Adam"}}
        model = wavemare.annotate(build(name), layout)
        return refusal(lambda: wavemare.initialize(model=model, config={**config, **changes}))

    return {
        "tied": annotated("gpt2", {"colocated": ["lm_head"]}),
        "regression": annotated("bert-regression", {"colocated": ["classifier"]}),
        "not a head": annotated("bert-cls", {"colocated": ["pooler.dense"]}),
        "zero 3": annotated(
            "bert-cls", {"colocated": ["classifier"]}, zero_optimization={"stage": 3}
        ),
        "bf16": annotated("bert-cls", {"colocated": ["classifier"]}, bf16={"enabled": True}),
        "sparse": annotated(
            "bert-cls",
            {"colocated": ["classifier"]},
            wavemare={"sparse_collective": {"mode": "auto"}},
        ),
    }


if __name__ == "__main__":
    init_distributed()
    cases = [("bert-cls-11", zero, 0.5) for zero in (0, 1, 2)] + [("gpt2-untied", 0, 0.0)]
    leave(
        {
            "training": {
                f"{name} zero {zero} clip {clip}": beside_plain(name, zero, clip)
                for name, zero, clip in cases
            },
            "resumed": {f"zero {zero}": resumed(zero) for zero in (0, 2)},
            "refused": refusals(),
        }
    )
