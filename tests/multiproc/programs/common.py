# SPDX-License-Identifier: Apache-2.0
"""What the programs share: a tiny GPT-2, a tiny pipeline, random batches, results as JSON."""

import hashlib
import json
import logging
import math
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path

import deepspeed
import torch
import transformers
from deepspeed.accelerator import get_accelerator
from torch.distributed import distributed_c10d

import wavemare
from wavemare.errors import WavemareError

ACCUMULATION, MICRO, LENGTH, VOCABULARY, HIDDEN = 2, 2, 16, 50, 32
DEVICE = get_accelerator().device_name(int(os.environ.get("LOCAL_RANK", "0")))
QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
"""GPT-2 without dropout."""


def build_gpt2(**changes):
    transformers.set_seed(7)
    sizes = {
        "vocab_size": VOCABULARY,
        "n_positions": LENGTH,
        "n_embd": HIDDEN,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **changes}))


def freeze(model, patterns):
    """Have the weights whose names match a pattern not trained from now on, and all others."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(re.search(pattern, name) for pattern in patterns))


def build_bert(kind=transformers.BertForMaskedLM, **changes):
    transformers.set_seed(7)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 2 * HIDDEN,
        "max_position_embeddings": LENGTH,
    }
    return kind(transformers.BertConfig(**{**sizes, **changes}))


def build_moe(
    kind="mixtral", *, seed=7, num_experts=4, auxiliary=False, eager=False, listed=False, **changes
):
    """Return a tiny mixture of experts, with weights as large as those of trained models.

    Args:
        kind: Type of model.
        seed: Of the weights.
        num_experts: Of a layer.
        auxiliary: Whether the loss has the routers' part.
        eager: Whether the experts are computed one by one.
        listed: Whether each expert is a module of its own, as before transformers 5.
        changes: Of the configuration.
    """
    transformers.set_seed(seed)
    counted = {"mixtral": "num_local_experts", "deepseek_v2": "n_routed_experts"}
    counted["deepseek_v3"] = "n_routed_experts"
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "moe_intermediate_size": HIDDEN,
        "shared_expert_intermediate_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts_per_tok": 2,
        counted.get(kind, "num_experts"): num_experts,
        "max_position_embeddings": LENGTH,
        "output_router_logits": auxiliary,
        "router_aux_loss_coef": 0.1,
        "initializer_range": 0.2,
        "use_cache": False,
        "pad_token_id": 0,
    }
    if kind.startswith("deepseek"):  # whose heads have parts with positions and parts without
        sizes |= dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8)
        sizes |= {"kv_lora_rank": 16, "q_lora_rank": 16, "num_key_value_heads": 4}
        sizes |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **changes})
    chosen = {"experts_implementation": "eager"} if eager else {}
    model = transformers.AutoModelForCausalLM.from_config(config, **chosen)
    if listed:
        for layer in model.model.layers:
            layer.mlp = ListedExperts(layer.mlp)
    return model


class ListedExperts(torch.nn.Module):
    """A block that calls those of its experts, each a module, to which tokens go."""

    def __init__(self, block):
        super().__init__()
        self.gate = block.gate
        parts = zip(block.experts.gate_up_proj, block.experts.down_proj, strict=True)
        self.experts = torch.nn.ModuleList(ListedExpert(*part) for part in parts)

    def forward(self, hidden):
        rows = hidden.flatten(0, -2)
        _, weights, chosen = self.gate(rows)
        total = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if len(row):
                found = expert(rows[row]) * weights[row, place, None]
                total = total.index_add(0, row, found.to(total.dtype))
        return total.view(hidden.shape)


class ListedExpert(torch.nn.Module):
    def __init__(self, gate_up, down):
        super().__init__()
        self.gate_up = torch.nn.Linear(gate_up.shape[1], gate_up.shape[0], bias=False)
        self.down = torch.nn.Linear(down.shape[1], down.shape[0], bias=False)
        self.gate_up.weight.data.copy_(gate_up.data)
        self.down.weight.data.copy_(down.data)

    def forward(self, rows):
        gate, up = self.gate_up(rows).chunk(2, dim=-1)
        return self.down(torch.nn.functional.silu(gate) * up)


class AllRanks(torch.nn.Module):
    """Gives the mean of the ranks' losses: each has its own auxiliary loss, of its own tokens."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, parts):
        output = self.model(**parts[0])
        output.loss = sum([self.model(**p).loss for p in parts[1:]], output.loss) / len(parts)
        return output


def build_pipeline():
    torch.manual_seed(7)
    layers: list[torch.nn.Module] = [torch.nn.Embedding(VOCABULARY, HIDDEN)]
    for _ in range(3):
        layers += [torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Dropout(0.1), torch.nn.Tanh()]
    layers.append(torch.nn.Linear(HIDDEN, VOCABULARY))

    def loss(logits, labels):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return deepspeed.PipelineModule(layers, num_stages=2, loss_fn=loss)


def start_stages(
    layers,
    *,
    stages=2,
    size=2,
    micro_batches=2,
    section=None,
    sections=None,
    client_optimizer=None,
    kind=deepspeed.PipelineModule,
    loss_fn=torch.nn.functional.mse_loss,
    **config,
):
    """Return an engine of as many layers on each stage, with keys of ``wavemare.pipeline``."""
    module = kind(layers, num_stages=stages, loss_fn=loss_fn, partition_method="uniform")
    pipeline = {} if section is None else {"pipeline": {"stages": stages, **section}}
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    config = {
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": micro_batches,
        **({"optimizer": adam} if client_optimizer is None else {}),
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "wavemare": {**pipeline, **(sections or {})},
        **config,
    }
    return wavemare.initialize(model=module, config=config, optimizer=client_optimizer)[0]


def sine_batches(width, *, size=2, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    while True:
        inputs = torch.randn(size, width, generator=generator)
        yield inputs.to(dtype), torch.sin(3 * inputs).to(dtype)


def split_stages(layers, stages):
    """Return the layers of each stage, for a twin in one process."""
    size = len(layers) // stages
    return [torch.nn.Sequential(*layers[s * size : (s + 1) * size]) for s in range(stages)]


def furthest(these, those):
    """Return the largest difference between two lists of tensors."""
    pairs = zip(these, those, strict=True)
    return max(float((a.cpu() - b.cpu()).detach().abs().max()) for a, b in pairs)


def difference(these, those):
    """Return the largest difference between two models' weights by name."""
    assert list(these) == list(those)
    return furthest(these.values(), those.values())


def refusal(action):
    """Return what an action says that must not be done, and of what kind the error is."""
    try:
        action()
    except WavemareError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def configuration(zero_stage, **changes):
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "zero_optimization": {"stage": zero_stage},
        "gradient_clipping": 0.5,
        "steps_per_print": None,
        **changes,
    }


def token_batches(data_rank):
    generator = torch.Generator().manual_seed(100 + data_rank)
    while True:
        yield torch.randint(0, VOCABULARY, (MICRO, LENGTH), generator=generator).to(DEVICE)


def train_plainly(model, optimizer, batches, *, steps, micro_batches, clip=math.inf):
    """Train in this process by plain PyTorch; return the losses and gradient norms of the steps."""
    model.to(DEVICE)
    losses, norms = [], []
    for _ in range(steps):
        total = 0.0
        for _ in range(micro_batches):
            loss = model(**next(batches)).loss / micro_batches
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


class InfiniteGradient(torch.autograd.Function):
    """The identity, whose gradient is not finite."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


def weights_digest(engine):
    digest = hashlib.sha256()
    for parameter in engine.module.parameters():
        gathered = engine.zero_optimization_stage() == 3
        with deepspeed.zero.GatheredParameters([parameter], enabled=gathered):
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def warnings_told(start):
    """Collect this rank's warnings that begin with some words."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record):
            if record.getMessage().startswith(start):
                lines.append(record.getMessage())

    handler, logger = Kept(logging.WARNING), logging.getLogger("wavemare")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def kept_between_passes(engine):
    """Return a list that gets the bytes that each micro-batch keeps when its W begins."""
    kept: list[int] = []
    splitter = engine.passes.splitter
    if splitter is not None:
        run = splitter.backward_weight

        def backward_weight(number):
            kept.append(splitter.kept_bytes[number])
            run(number)

        splitter.backward_weight = backward_weight
    return kept


@contextmanager
def own_groups():
    """End the process groups that engines make inside: threads of gloo's wake up all the time."""
    before = set(distributed_c10d._world.pg_map)
    yield
    for group in set(distributed_c10d._world.pg_map) - before:
        torch.distributed.destroy_process_group(group)


def leave(result, part=True):
    rank = torch.distributed.get_rank()
    Path(sys.argv[1], f"rank_{rank}.json").write_text(json.dumps(result))
    if not part:
        return
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # gloo's threads must not outlive the interpreter
