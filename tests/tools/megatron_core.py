# SPDX-License-Identifier: Apache-2.0
"""megatron-core itself, on a CPU: its checkpoints, its logits, its training, for our tests.

Runs in an interpreter that has megatron-core, which need not have anything of ours:

    python tests/tools/megatron_core.py save FOLDER --family llama [--tensor 2] [--from OTHER]
    python tests/tools/megatron_core.py logits FOLDER FILE --tensor 2

``save`` writes a ``torch_dist`` checkpoint of a small random model, or of the one in another
folder, and the logits of that model to ``FOLDER/reference.pt``. ``logits`` loads a checkpoint as
Megatron does, with its default strictness, and writes the same.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.multiprocessing
from torch import distributed
from torch.overrides import TorchFunctionMode

_DEVICE = torch.device("cpu")
NEXT = 10
"""Steps that Megatron goes on after a checkpoint, to compare with."""
SAMPLE = 16
"""Tokens of a sample of the trainings."""


class OnCpu(TorchFunctionMode):
    """Make tensors of the device ``cuda``, which megatron-core names directly, on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = _DEVICE
        return func(*args, **kwargs)


def stub_cuda():
    """Let the places of megatron-core that ask for a GPU in any case find the CPU."""

    class Stream:
        def wait_stream(self, other): ...

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: _DEVICE
    torch.cuda.set_device = lambda *_: None
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: Stream()
    torch.cuda.Stream = lambda *_, **__: Stream()
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *_, **__: self
    own_type = torch.Tensor.type
    torch.Tensor.type = lambda self, *a, **k: (
        own_type(self, *a, **k) if a or k else "torch.cuda." + own_type(self).rsplit(".")[-1]
    )
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    # Without Transformer Engine the router of 0.16 finds no such name.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    # No dropout: nothing is drawn in a fork.
    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()


ARGUMENTS = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "group_query_attention": False,
    "num_query_groups": 4,
    "kv_channels": 4,
    "ffn_hidden_size": 24,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "apply_layernorm_1p": False,
    "apply_residual_connection_post_layernorm": False,
    "swiglu": True,
    "openai_gelu": False,
    "squared_relu": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "attention_output_gate": False,
    "multi_latent_attention": False,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 62,
    "padded_vocab_size": 64,
    "make_vocab_size_divisible_by": 32,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "num_experts": None,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": None,
    "moe_layer_freq": 1,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.0,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_grouped_gemm": False,
    "attention_softmax_in_fp32": True,
    "bias_gelu_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "fp16": False,
    "bf16": False,
    "init_method_std": 0.02,
    "transformer_impl": "local",
    "use_distributed_optimizer": False,
    "ckpt_format": "torch_dist",
    "iteration": 5,
    "consumed_train_samples": 40,
    "consumed_valid_samples": 0,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 100,
    "seed": 1234,
    "lr": 1e-3,
    "min_lr": 0.0,
    "lr_decay_style": "constant",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "weight_decay": 0.1,
    "clip_grad": 1.0,
}
"""Those of a training script, as Megatron-LM keeps them in a checkpoint."""

_GROUPS = {"group_query_attention": True, "num_query_groups": 2}
_EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 12}
FAMILIES = {
    "gpt2": {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": False,
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": False,
    },
    "llama": {**_GROUPS, "rotary_base": 500000, "use_rope_scaling": True},
    "mistral": {**_GROUPS, "rotary_base": 1000000},
    "qwen2": {
        **_GROUPS,
        "add_qkv_bias": True,
        "norm_epsilon": 1e-6,
        "untie_embeddings_and_output_weights": False,
    },
    "qwen3": {**_GROUPS, "kv_channels": 6, "qk_layernorm": True, "norm_epsilon": 1e-6},
    "mixtral": {**_GROUPS, **_EXPERTS},
    "qwen2_moe": {
        **_EXPERTS,
        "add_qkv_bias": True,
        "norm_epsilon": 1e-6,
        "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": 20,
        "moe_shared_expert_gate": True,
    },
    "qwen3_moe": {
        **_GROUPS,
        **_EXPERTS,
        "kv_channels": 6,
        "qk_layernorm": True,
        "norm_epsilon": 1e-6,
    },
}
_OF_OPTIMIZER = ("lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "bf16")
_BASE = {"gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}


def arguments_of(family, **changes):
    """Return the arguments of a training of this family."""
    return {**ARGUMENTS, **FAMILIES[family], **changes}


def transformer_config(arguments, **layout):
    """Make the configuration from arguments as Megatron-LM's training does."""
    from megatron.core.transformer import TransformerConfig

    names = {each.name for each in dataclasses.fields(TransformerConfig)}
    chosen = {name: value for name, value in arguments.items() if name in names}
    chosen |= {
        "gated_linear_unit": arguments["swiglu"],
        "activation_func": _BASE["silu" if arguments["swiglu"] else "gelu"],
        "num_moe_experts": arguments["num_experts"],
        "layernorm_zero_centered_gamma": arguments["apply_layernorm_1p"],
        "layernorm_epsilon": arguments["norm_epsilon"],
        "moe_token_dispatcher_type": "allgather",  # the one that needs no streams of CUDA
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "pipeline_dtype": torch.float32,
    }
    return TransformerConfig(**{**chosen, **layout})


def build_model(arguments, **layout):
    """Return this rank's part of the model.

    Args:
        arguments: See `arguments_of`.
        layout: Fields of TransformerConfig for the numbers of ranks.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = transformer_config(arguments, **layout)
    common = {
        "vocab_size": arguments["padded_vocab_size"],
        "max_sequence_length": arguments["max_position_embeddings"],
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "share_embeddings_and_output_weights": not arguments["untie_embeddings_and_output_weights"],
        "position_embedding_type": arguments["position_embedding_type"],
        "rotary_percent": arguments["rotary_percent"],
        "rotary_base": arguments["rotary_base"],
    }
    spec = get_gpt_layer_local_spec(
        arguments["num_experts"],
        arguments["moe_grouped_gemm"],
        arguments["qk_layernorm"],
        normalization=arguments["normalization"],
    )
    if arguments.get("hybrid_layer_pattern"):
        return _hybrid_model(config, spec, arguments["hybrid_layer_pattern"], common)
    scaling = {
        "rope_scaling": arguments["use_rope_scaling"],
        "rope_scaling_factor": arguments["rope_scaling_factor"],
    }
    return GPTModel(config, spec, **common, **scaling)


def _hybrid_model(config, spec, pattern, common):
    """Return a HybridModel of local layers, each of which is one half of a GPT layer."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    hybrid_block.TENorm = WrappedTorchNorm  # named there directly
    names = spec.submodules.sharded_state_dict_keys_map
    attention = dataclasses.replace(
        spec.submodules,
        pre_mlp_layernorm=IdentityOp,
        mlp=IdentityOp,
        mlp_bda=IdentityFuncOp,
        sharded_state_dict_keys_map={k: v for k, v in names.items() if k.startswith("input")},
    )
    experts = config.num_moe_experts is not None
    mlp = dataclasses.replace(
        spec.submodules,
        input_layernorm=IdentityOp,
        self_attention=IdentityOp,
        self_attn_bda=IdentityFuncOp,
        # As the layers of Transformer Engine, which Hybrid uses, are stored.
        sharded_state_dict_keys_map=(
            {} if experts else {k: v for k, v in names.items() if k.startswith("pre_mlp")}
        ),
    )
    stack = hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(spec.module, submodules=attention),
        mlp_layer=ModuleSpec(MLPLayer, submodules=mlp),
        moe_layer=ModuleSpec(spec.module, submodules=mlp),
    )
    return HybridModel(
        config,
        ModuleSpec(hybrid_block.HybridStack, submodules=stack),
        hybrid_layer_pattern=pattern,
        **common,
    )


def randomize(model, seed=7):
    """Fill all weights, also those of norms and biases, with numbers that matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, each in sorted(model.named_parameters()):
            drawn = torch.randn(each.shape, generator=generator)
            norm = "norm" in name and name.endswith("weight")
            each.copy_(1 + 0.1 * drawn if norm else 0.2 * drawn)


def token_ids(arguments):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, arguments["vocab_size"], (2, 17), generator=generator)


def compute_logits(model, ids):
    """Return [batch, length, padded vocabulary] on the last stage, None on the others."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    positions = torch.arange(ids.shape[1]).expand_as(ids)
    later = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    shape = (ids.shape[1], ids.shape[0], model.config.hidden_size)
    with torch.no_grad():
        if not parallel_state.is_pipeline_first_stage():
            hidden = torch.empty(shape)
            distributed.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(hidden)
        output = model(ids, positions, later)
        if parallel_state.is_pipeline_last_stage():
            return gather_from_tensor_model_parallel_region(output)
        distributed.send(output, parallel_state.get_pipeline_model_parallel_next_rank())
    return None


def samples(arguments, first, count):
    """Return tokens [count, 1 + sequence length] of the samples from ``first`` on."""
    found = []
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(10_000 + number)
        found.append(torch.randint(0, arguments["vocab_size"], (SAMPLE + 1,), generator=generator))
    return torch.stack(found)


def micro_batches(arguments, consumed, rank, ranks):
    """Yield this data-parallel rank's micro-batches in the order of Megatron's sampler."""
    micro, whole = arguments["micro_batch_size"], arguments["global_batch_size"]
    while True:
        batch = samples(arguments, consumed, whole)
        for start in range(rank * micro, whole, micro * ranks):
            text = batch[start : start + micro]
            mask = torch.ones(micro, SAMPLE)
            mask[:, : 1 + start % 3] = 0.0  # micro-batches of unlike numbers of tokens
            yield {
                "tokens": text[:, :-1].contiguous(),
                "labels": text[:, 1:].contiguous(),
                "loss_mask": mask,
                "attention_mask": torch.ones(1, 1, SAMPLE, SAMPLE, dtype=torch.bool).triu(1),
                "position_ids": torch.arange(SAMPLE).expand(micro, -1),
            }
        consumed += whole


def loss_func(loss_mask, output_tensor, model=None):
    """As in ``pretrain_gpt.py`` of 0.16 and 0.19."""
    losses = output_tensor.view(-1).float()
    loss_mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * loss_mask)
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    report = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(data_iterator, model, return_schedule_plan=False):
    """As in ``pretrain_gpt.py`` of 0.16 and 0.19."""
    from megatron.core.utils import get_attr_wrapped_model

    get_attr_wrapped_model(model, "vp_stage")  # of which the batch depends there
    data = next(data_iterator)
    output = model(
        data["tokens"],
        data["position_ids"],
        data["attention_mask"],
        labels=data["labels"],
        loss_mask=data["loss_mask"],
    )
    return output, partial(loss_func, data["loss_mask"], model=model)


class Training:
    """Megatron's distributed optimizer and schedules, as its ``training.py`` joins them."""

    def __init__(self, model, arguments):
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, check_for_nan_in_grad=False
        )
        self.arguments = arguments
        self.model = DistributedDataParallel(model.config, ddp, model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                **{name: arguments[name] for name in _OF_OPTIMIZER},
                params_dtype=torch.bfloat16 if arguments["bf16"] else torch.float32,
                use_distributed_optimizer=True,
            ),
            [self.model],
        )
        samples = arguments["train_iters"] * arguments["global_batch_size"]
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=arguments["lr"],
            min_lr=arguments["min_lr"],
            lr_warmup_steps=0,
            lr_decay_steps=samples,
            lr_decay_style=arguments["lr_decay_style"],
            start_wd=arguments["weight_decay"],
            end_wd=arguments["weight_decay"],
            wd_incr_steps=samples,
            wd_incr_style="constant",
        )
        model.config.finalize_model_grads_func = finalize_model_grads
        model.config.grad_scale_func = self.optimizer.scale_loss

    def steps(self, count):
        """Train; return the loss of each step, the mean over its micro-batches and replicas."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        arguments = self.arguments
        rank = parallel_state.get_data_parallel_rank()
        ranks = parallel_state.get_data_parallel_world_size()
        micro = arguments["micro_batch_size"]
        reader = micro_batches(arguments, arguments["consumed_train_samples"], rank, ranks)
        losses = []
        for _ in range(count):
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            reports = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=reader,
                model=[self.model],
                num_microbatches=arguments["global_batch_size"] // micro // ranks,
                seq_length=SAMPLE,
                micro_batch_size=micro,
                forward_only=False,
            )
            ok, self.norm, _ = self.optimizer.step()
            assert ok
            self.scheduler.step(arguments["global_batch_size"])
            means = [float(each["lm loss"][0] / each["lm loss"][1]) for each in reports]
            mean = torch.tensor(sum(means) / max(len(means), 1))
            distributed.all_reduce(mean, group=parallel_state.get_data_parallel_group())
            losses.append(float(mean) / ranks)
            arguments["iteration"] += 1
            arguments["consumed_train_samples"] += arguments["global_batch_size"]
        return losses


def sharded_state(model, metadata=None):
    return {"model": model.sharded_state_dict(metadata=metadata)}


def save_checkpoint(folder, model, arguments, training=None):
    """Write what Megatron-LM's ``save_checkpoint`` writes in the format ``torch_dist``."""
    from megatron.core import dist_checkpointing
    from megatron.core.rerun_state_machine import RerunMode
    from megatron.core.transformer.enums import AttnBackend

    arguments = {
        **arguments,
        "attention_backend": AttnBackend.auto,
        "rerun_mode": RerunMode.DISABLED,
        "params_dtype": torch.float32,
    }
    iteration = arguments["iteration"]
    target = Path(folder) / f"iter_{iteration:07d}"
    target.mkdir(parents=True, exist_ok=True)
    content = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False}
    state = {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0,
        **sharded_state(model, content),
    }
    if training is not None:
        state["optimizer"] = training.optimizer.sharded_state_dict(state, metadata=content)
        state["opt_param_scheduler"] = training.scheduler.state_dict()
    distributed.barrier()
    dist_checkpointing.save(state, str(target), content_metadata=content)
    if distributed.get_rank() == 0:
        (Path(folder) / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def load_arguments(folder):
    """Return the arguments that a checkpoint keeps, and the folder of its iteration."""
    from megatron.core import dist_checkpointing

    iteration = (Path(folder) / "latest_checkpointed_iteration.txt").read_text().strip()
    step = Path(folder) / (iteration if iteration == "release" else f"iter_{int(iteration):07d}")
    return {**ARGUMENTS, **vars(dist_checkpointing.load_common_state_dict(str(step))["args"])}, step


def load_weights(step, model):
    """Load as Megatron does: what is missing or unexpected is an error."""
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(sharded_state(model), str(step))
    model.load_state_dict(state["model"], strict=True)


def initialize(rank, world, store, options):
    """Make the process groups of a rank."""
    stub_cuda()
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        options.tensor, options.pipeline, expert_model_parallel_size=options.expert
    )


def _run(rank, world, store, options):
    torch.set_num_threads(1)
    OnCpu().__enter__()
    initialize(rank, world, store, options)
    layout = {
        "tensor_model_parallel_size": options.tensor,
        "pipeline_model_parallel_size": options.pipeline,
        "expert_model_parallel_size": options.expert,
    }
    changes = json.loads(options.arguments)
    source = options.source if options.command == "save" else options.folder
    if source is None:
        if world > 1:
            raise SystemExit("several ranks need --from, the folder of a model")
        arguments = arguments_of(options.family, **changes)
        model = build_model(arguments, **layout)
        randomize(model)
    else:
        arguments, step = load_arguments(source)
        arguments |= changes
        model = build_model(arguments, **layout)
        load_weights(step, model)
    model.eval()
    ids = token_ids(arguments)
    logits = compute_logits(model, ids)
    found = {"ids": ids, "logits": logits}
    if options.command == "save":
        arguments |= layout
        if options.steps:
            training = Training(model.train(), arguments)
            found["losses"] = training.steps(options.steps)
            found["logits"] = compute_logits(model.eval(), ids)
            save_checkpoint(options.folder, model, arguments, training)
            model.train()
            found["next_losses"] = training.steps(NEXT)
        else:
            save_checkpoint(options.folder, model, arguments)
        target = Path(options.folder) / "reference.pt"
    else:
        target = Path(options.file)
    if found["logits"] is not None and rank == world - 1:
        found["logits"] = found["logits"].clone()
        torch.save(found, target)
    distributed.barrier()
    distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    save = commands.add_parser("save")
    save.add_argument("--family", choices=FAMILIES, default="llama")
    save.add_argument("--from", dest="source")
    save.add_argument("--steps", type=int, default=0, help="train, and save the optimizer as well")
    logits = commands.add_parser("logits")
    for each in save, logits:
        each.add_argument("folder")
        each.add_argument("--arguments", default="{}", help="JSON: changes of Megatron's arguments")
        for axis in "tensor", "pipeline", "expert", "data":
            each.add_argument(f"--{axis}", type=int, default=1)
    logits.add_argument("file")
    options = parser.parse_args()
    # The ranks of experts are data-parallel ones.
    world = options.tensor * options.pipeline * options.expert * options.data
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        if world == 1:
            _run(0, 1, store, options)
        else:
            torch.multiprocessing.spawn(_run, (world, store, options), nprocs=world)
    print("megatron-core", importlib.metadata.version("megatron-core"))


if __name__ == "__main__":
    main()
