# SPDX-License-Identifier: Apache-2.0
"""Train with gradients reduced by DeepSpeed and by the sparse collective; leave what came of it.

Arguments: result folder, then a list of cases in JSON. A case has a ``name``, the ``model``, the
number of ``steps``, a ``section`` (``wavemare.sparse_collective``), other keys of the
configuration, and ``frozen``: by step, patterns of the weights that are not trained from there on.
Or "lose a rank", which ends in an error.
"""

import json
import os
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import transformers
from common import build_bert, build_gpt2, freeze, leave, weights_digest

import wavemare
from wavemare.comm import SparseComm
from wavemare.failure import run_main

VOCABULARY, LENGTH, MICRO, ACCUMULATION, HIDDEN = 3_000, 16, 2, 2, 16


class Rows(torch.nn.Module):
    """A classifier on a bag of words, whose tables have sparse gradients or dense ones."""

    def __init__(self, *, sparse):
        super().__init__()
        self.words = torch.nn.EmbeddingBag(VOCABULARY, HIDDEN, sparse=sparse)
        self.positions = torch.nn.Embedding(LENGTH, HIDDEN, sparse=sparse)
        self.out = torch.nn.Linear(HIDDEN, 3)

    def forward(self, input_ids, labels):
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.words(input_ids) + self.positions(places).mean(0)
        return torch.nn.functional.cross_entropy(self.out(hidden), labels[:, 0] % 3)


class Branching(torch.nn.Module):
    """Each rank uses another branch in turn, and nobody uses the third."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.out = torch.nn.Linear(HIDDEN, 3)
        self.calls = 0

    def forward(self, input_ids, labels):
        self.calls += 1
        rank = torch.distributed.get_rank()
        hidden = self.words(input_ids).mean(1)
        hidden = self.branches[(rank + self.calls) % 2](hidden)
        return torch.nn.functional.cross_entropy(self.out(hidden), labels[:, 0] % 3)


class Once(torch.nn.Module):
    """A layer that only the first of two micro-batches uses, on the first rank or on all."""

    def __init__(self, ranks):
        super().__init__()
        self.words = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.branch = torch.nn.Linear(HIDDEN, HIDDEN)
        self.out = torch.nn.Linear(HIDDEN, 3)
        self.calls, self.ranks = 0, ranks

    def forward(self, input_ids, labels):
        hidden = self.words(input_ids).mean(1)
        if self.calls % 2 == 0 and torch.distributed.get_rank() < self.ranks:
            hidden = torch.tanh(self.branch(hidden))
        self.calls += 1
        return torch.nn.functional.cross_entropy(self.out(hidden), labels[:, 0] % 3)


class Late(torch.nn.Module):
    """A term on all of an embedding's weight, which begins in the 20th call."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.out = torch.nn.Linear(HIDDEN, 3)
        self.calls = 0

    def forward(self, input_ids, labels):
        self.calls += 1
        hidden = self.words(input_ids).mean(1)
        loss = torch.nn.functional.cross_entropy(self.out(hidden), labels[:, 0] % 3)
        return loss + self.words.weight.square().mean() if self.calls >= 20 else loss


class Wide(torch.nn.Module):
    """A classifier of words that is nearly all table."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.out = torch.nn.Linear(HIDDEN, 3)

    def forward(self, input_ids, labels):
        hidden = self.words(input_ids).mean(1)
        return torch.nn.functional.cross_entropy(self.out(hidden).float(), labels[:, 0] % 3)


class Odd(Wide):
    """Has a table beside it that only the optimizer writes."""

    def __init__(self):
        super().__init__()
        self.beside = torch.nn.Embedding(64, HIDDEN)
        torch.nn.init.constant_(self.beside.weight, 7.0)


class OddSteps(torch.optim.SGD):
    """SGD that writes other NaN, infinities and zeros of both signs over all 7.0 in each step."""

    VALUES = torch.tensor([torch.nan, torch.inf, -0.0, 0.0, -torch.inf, 3.0, 3.0])

    def step(self, closure=None):
        result = super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            state.setdefault("beside", (parameter.detach() == 7.0).nonzero()[:, 0])
            state["steps"] = state.get("steps", 0) + 1
            turn = torch.arange(len(state["beside"])) + state["steps"]
            parameter.data[state["beside"]] = self.VALUES[turn % len(self.VALUES)]
        return result


class Shared(torch.nn.Module):
    """One layer used twice within segments that are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.shared = torch.nn.Linear(HIDDEN, HIDDEN)
        self.out = torch.nn.Linear(HIDDEN, 3)

    def forward(self, input_ids, labels):
        hidden = self.words(input_ids).mean(1)
        for _ in range(2):
            hidden = torch.utils.checkpoint.checkpoint(self.shared, hidden, use_reentrant=True)
        return torch.nn.functional.cross_entropy(self.out(hidden), labels[:, 0] % 3)


def build(model):
    transformers.set_seed(7)
    if model == "bert":
        return build_bert(vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN)
    if model == "gpt":
        return build_gpt2(vocab_size=VOCABULARY, n_embd=HIDDEN, tie_word_embeddings=False)
    if model == "pipeline":
        return _pipeline()
    if model.startswith("rows"):
        return Rows(sparse=model == "rows")
    if model.startswith("once"):
        return Once(ranks=int(model[-1]))
    kinds = {"branching": Branching, "late": Late, "odd": Odd, "shared": Shared, "wide": Wide}
    return kinds[model]()


def _pipeline():
    layers: list[Any] = [torch.nn.Embedding(VOCABULARY, HIDDEN)]
    for _ in range(3):
        layers += [torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh()]
    layers.append(torch.nn.Linear(HIDDEN, 50))

    def loss(logits, labels):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten() % 50)

    return deepspeed.PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")


def batches(rank, pipeline):
    generator = torch.Generator().manual_seed(100 + rank)
    while True:
        # Few words often and many seldom, as in a language.
        spread = torch.rand(MICRO, LENGTH, generator=generator) ** 4
        ids = (spread * VOCABULARY).long()
        yield (ids, ids) if pipeline else {"input_ids": ids, "labels": ids}


def initialize(case):
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "steps_per_print": None,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **case.get("config", {}),
    }
    config["wavemare"] = {**case.get("wavemare", {}), "sparse_collective": case["section"]}
    model = build(case["model"])
    optimizer = None
    if case["model"].startswith("rows"):  # what sums rows and tables alike
        del config["optimizer"]
        config["gradient_clipping"] = 0.0
        config["gradient_accumulation_steps"] = 1
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if case["model"] == "odd":
        del config["optimizer"]
        optimizer = OddSteps(model.parameters(), lr=0.5)
    return wavemare.initialize(model=model, optimizer=optimizer, config=config)[0]


@contextmanager
def noting_sent(module):
    """Give a list of how many buckets were on their way when the steps' backward passes ended."""
    sent: list[int] = []
    calls = {"all": 0, "before": 0}

    def counting(real):
        def call(self, *args, **kwargs):
            calls["all"] += 1
            return real(self, *args, **kwargs)

        return call

    module.register_forward_pre_hook(lambda *_: calls.update(before=calls["all"]))
    last = next(module.parameters())  # an embedding, whose gradient comes last
    last.register_post_accumulate_grad_hook(lambda _: sent.append(calls["all"] - calls["before"]))
    with ExitStack() as patched:
        for name in ("allreduce_", "reduce_scatter_"):
            call = counting(getattr(SparseComm, name))
            patched.enter_context(mock.patch.object(SparseComm, name, call))
        yield sent


def train(case):
    engine = initialize(case)
    pipeline = case["model"] == "pipeline"
    torch.manual_seed(1000 + engine.data_rank)
    data = batches(engine.data_rank, pipeline)
    losses, metrics = [], []
    with noting_sent(engine.module) as sent:
        for step in range(case["steps"]):
            if (patterns := case.get("frozen", {}).get(str(step))) is not None:
                freeze(engine.module, patterns)
            losses.append(engine.train_batch(data).item())
            metrics.append(engine.step_metrics())
            if step + 1 == case.get("save_after"):
                engine.save_checkpoint(str(Path(sys.argv[1], case["name"])))
    found = {
        "losses": losses,
        "weights": weights_digest(engine),
        "metrics": metrics[-1],
        "sent": sent[ACCUMULATION - 1 :: ACCUMULATION],
    }
    if "save_after" in case:
        output = engine(**next(data))
        engine.backward(output if torch.is_tensor(output) else output.loss)  # the load drops it
        found["back"] = go_on(engine, case)
        other = initialize(case)
        found["resumed"] = go_on(other, case)
        other.destroy()
    engine.destroy()
    return found


def go_on(engine, case):
    """Load what was saved within the run, and train the steps after it."""
    data = batches(engine.data_rank, pipeline=False)
    for _ in range(case["save_after"] * engine.gradient_accumulation_steps()):
        next(data)
    engine.load_checkpoint(str(Path(sys.argv[1], case["name"])))
    for _ in range(case["steps"] - case["save_after"]):
        engine.train_batch(data)
    return weights_digest(engine)


def lose_a_rank():
    """Rank 1 dies within the third step."""
    engine = initialize({"model": "gpt", "section": {"mode": "pushpull"}})
    data = batches(engine.data_rank, pipeline=False)
    for _ in range(2):
        engine.train_batch(data)
    if engine.data_rank == 1:
        os._exit(0)
    engine.train_batch(data)


if __name__ == "__main__":
    wavemare.init_distributed()
    if sys.argv[2] == "lose a rank":
        run_main(lose_a_rank)
    else:
        leave({case["name"]: train(case) for case in json.loads(sys.argv[2])})
