# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's options, in one table: what each of them sets here, or why it sets nothing.

`arguments.py` makes options of a command line from it, and docs/reference.py the tables of
docs/megatron-options.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any

from wavemare.engine.config.shape import SECTION
from wavemare.errors import ConfigError

MODEL, JSON, RECIPE, IDLE, REFUSED = "model", "JSON", "recipe", "idle", "refused"
"""What a row does: describes the model, changes the configuration, stands for another option, has
no meaning here, or asks for something that is not done here."""
TOKENIZERS = ("HuggingFaceTokenizer", "GPT2BPETokenizer", "BertWordPieceLowerCase")
_DERIVED = {
    "scheduler",
    "optimizer.type",
    "zero_optimization.stage",
    f"{SECTION}.pipeline.chunks",
    f"{SECTION}.pipeline.partition",
    f"{SECTION}.expert_parallel.size",
}
"""What `training.config` makes of several options together."""
_ZERO = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


@dataclass(frozen=True)
class Row:
    """An option of Megatron-LM.

    Args:
        name: Its name, without the dashes before it.
        use: One of the five words above.
        kind: Of its value; ``bool`` is a flag, ``list`` takes several words.
        sets: The key of the JSON, or what else it sets, for readers.
        text: For ``--help``; of an idle or a refused row the reason.
        remedy: Of a refused row.
        usual: Words that a refused row accepts, because they ask for nothing.
    """

    name: str
    use: str
    kind: type = bool
    sets: str = ""
    text: str = ""
    remedy: str = ""
    usual: tuple[str, ...] = ()

    @property
    def path(self) -> tuple[str, ...]:
        """Keys of the JSON whose value the option is; empty if the value is derived."""
        if self.use != JSON or self.sets in _DERIVED:
            return ()
        return tuple(self.sets.split("."))

    @property
    def attribute(self) -> str:
        """The name in Python."""
        return self.name.replace("-", "_")

    def field(self) -> tuple[str, Any, Any]:
        """Return name, type and default of a field of a dataclass for HfArgumentParser."""
        text = self.text
        if self.use in (IDLE, REFUSED):
            text = argparse.SUPPRESS
        elif self.use == JSON:
            text = f"{self.sets}{': ' * bool(text)}{text}"
        metadata: dict[str, Any] = {"help": text}
        if "_" in self.name:
            metadata["aliases"] = [f"--{self.name}"]
        if self.kind is bool:
            return self.attribute, bool, field(default=False, metadata=metadata)
        kind = list[str] if self.kind is list else self.kind
        return self.attribute, kind | None, field(default=None, metadata=metadata)


def _rows(use: str, kind: type, *lines: tuple[str, ...]) -> list[Row]:
    """Return rows of one use and kind, from (name, what it sets, text)."""
    found = [(*line, "", "")[:3] for line in lines]
    return [Row(name, use, kind, sets, text) for name, sets, text in found]


def _idle(reason: str, flags: str = "", values: str = "") -> list[Row]:
    """Return rows that have no meaning here for one reason: flags, and names with values."""
    found = [Row(name, IDLE, bool, text=reason) for name in flags.split()]
    return found + [Row(name, IDLE, list, text=reason) for name in values.split()]


def _refused(reason: str, remedy: str, flags: str = "", values: str = "") -> list[Row]:
    """Return rows that are refused for one reason; ``name=a|b`` accepts the words a and b."""
    found = [Row(name, REFUSED, bool, text=reason, remedy=remedy) for name in flags.split()]
    for word in values.split():
        name, _, usual = word.partition("=")
        words = tuple(usual.split("|")) if usual else ()
        found.append(Row(name, REFUSED, list, text=reason, remedy=remedy, usual=words))
    return found


_MODEL_ROWS = [
    *_rows(
        MODEL,
        int,
        ("num-layers", "num_hidden_layers", "layers"),
        ("hidden-size", "hidden_size", "width"),
        ("ffn-hidden-size", "intermediate_size", "width of the feed-forward layers"),
        ("num-attention-heads", "num_attention_heads", "heads"),
        ("num-query-groups", "num_key_value_heads", "heads of keys and values"),
        ("kv-channels", "head_dim", "width of a head"),
        ("max-position-embeddings", "max_position_embeddings", "positions"),
        ("rotary-base", "rope_parameters.rope_theta", "base of the rotary positions"),
        ("num-experts", "num_local_experts or num_experts", "experts of a layer"),
        ("moe-router-topk", "num_experts_per_tok", "experts of a token"),
        ("moe-ffn-hidden-size", "moe_intermediate_size", "width of an expert"),
        (
            "moe-shared-expert-intermediate-size",
            "shared_expert_intermediate_size",
            "width of the shared expert",
        ),
    ),
    *_rows(
        MODEL,
        float,
        ("norm-epsilon", "rms_norm_eps or layer_norm_epsilon", "epsilon of the norms"),
        ("layernorm-epsilon", "the same", "older name of --norm-epsilon"),
        ("rotary-percent", "", "rotated share of a head; only 1, as the families here rotate all"),
        ("rope-scaling-factor", "rope_parameters.factor", "with --use-rope-scaling; 8 if omitted"),
        ("hidden-dropout", "resid_pdrop and embd_pdrop", "dropout outside of attention (GPT-2)"),
        ("attention-dropout", "attention_dropout or attn_pdrop", "dropout in attention"),
        ("init-method-std", "initializer_range", "standard deviation of new weights"),
        (
            "moe-aux-loss-coeff",
            "router_aux_loss_coef, output_router_logits",
            "factor of the load-balancing loss of experts",
        ),
    ),
    *_rows(
        MODEL,
        str,
        ("normalization", "the family", "LayerNorm or RMSNorm"),
        ("position-embedding-type", "the family", "learned_absolute or rope"),
        ("window-size", "sliding_window", "tokens that one sees before and after it, as 4095,0"),
        (
            "moe-router-load-balancing-type",
            "output_router_logits",
            "aux_loss or none",
        ),
    ),
    *_rows(
        MODEL,
        bool,
        ("group-query-attention", "num_key_value_heads", "--num-query-groups, or 1 if omitted"),
        ("use-rotary-position-embeddings", "the family", "as --position-embedding-type rope"),
        ("use-rope-scaling", "rope_parameters", "scale rotary positions as Llama 3.1 does"),
        ("swiglu", "the family", "feed-forward layers with a gate"),
        ("disable-bias-linear", "the family", "no biases"),
        ("add-qkv-bias", "the family", "biases of queries, keys and values (Qwen2)"),
        ("qk-layernorm", "the family", "norms of queries and keys (Qwen3)"),
        (
            "untie-embeddings-and-output-weights",
            "tie_word_embeddings: false",
            "a head with weights of its own",
        ),
        ("no-bias-gelu-fusion", "activation_function", "exact GELU"),
        ("openai-gelu", "activation_function", "OpenAI's GELU"),
        ("moe-router-pre-softmax", "norm_topk_prob: false", "softmax before the top-k choice"),
    ),
]

_JSON_ROWS = [
    *_rows(
        JSON,
        int,
        (
            "micro-batch-size",
            "train_micro_batch_size_per_gpu",
            "samples of a micro-batch; given alone, a step has one micro-batch",
        ),
        ("global-batch-size", "train_batch_size", "samples of a step, over all ranks"),
        (
            "tensor-model-parallel-size",
            f"{SECTION}.tensor_parallel.size",
            "ranks that share a layer",
        ),
        ("pipeline-model-parallel-size", f"{SECTION}.pipeline.stages", "pipeline stages"),
        (
            "num-virtual-stages-per-pipeline-rank",
            f"{SECTION}.pipeline.chunks",
            "stages per rank, with the schedule interleaved",
        ),
        (
            "num-layers-per-virtual-pipeline-stage",
            f"{SECTION}.pipeline.chunks",
            "the same, given as layers per stage; needs --num-layers",
        ),
        (
            "decoder-first-pipeline-num-layers",
            f"{SECTION}.pipeline.partition",
            "layers of the first stage; needs --num-layers",
        ),
        (
            "decoder-last-pipeline-num-layers",
            f"{SECTION}.pipeline.partition",
            "layers of the last stage; needs --num-layers",
        ),
        (
            "expert-model-parallel-size",
            f"{SECTION}.expert_parallel.size",
            "ranks that share experts",
        ),
        ("lr-warmup-iters", "scheduler", "steps of warm-up"),
        ("lr-warmup-samples", "scheduler", "the same as a number of samples"),
        ("lr-decay-iters", "scheduler", "steps of the whole schedule; at least those of training"),
        ("lr-decay-samples", "scheduler", "the same as a number of samples"),
        ("hysteresis", "fp16.hysteresis", "overflows until the loss scale is lowered"),
    ),
    *_rows(
        JSON,
        float,
        ("lr", "optimizer.params.lr", "the highest learning rate"),
        ("min-lr", "scheduler", "lowest learning rate of the cosine schedule"),
        ("lr-warmup-fraction", "scheduler", "share of the steps for warm-up, such as 0.1"),
        ("weight-decay", "optimizer.params.weight_decay", "weight decay"),
        ("adam-beta1", "optimizer.params.betas.0", "first beta of Adam"),
        ("adam-beta2", "optimizer.params.betas.1", "second beta of Adam"),
        ("adam-eps", "optimizer.params.eps", "epsilon of Adam"),
        ("sgd-momentum", "optimizer.params.momentum", "momentum of SGD"),
        ("loss-scale", "fp16.loss_scale", "fixed scale of the loss, with --fp16"),
        ("initial-loss-scale", "fp16.initial_scale_power", "first loss scale, a power of 2"),
        ("min-loss-scale", "fp16.min_loss_scale", "lowest loss scale"),
        ("loss-scale-window", "fp16.loss_scale_window", "steps until the loss scale is raised"),
        ("clip-grad", "gradient_clipping", "largest norm of the gradients"),
        (
            "distributed-timeout-minutes",
            f"{SECTION}.watchdog.timeout_s",
            "minutes that ranks wait before a run is ended",
        ),
    ),
    *_rows(
        JSON,
        str,
        ("lr-decay-style", "scheduler", "cosine, linear or constant"),
        ("optimizer", "optimizer.type", "adam (AdamW) or sgd"),
        ("tensorboard-dir", "tensorboard.output_path", "folder of TensorBoard; also turns it on"),
        ("wandb-project", "wandb.project", "project of Weights & Biases; also turns it on"),
        (
            "data-parallel-sharding-strategy",
            "zero_optimization.stage",
            f"{', '.join(_ZERO)}: ZeRO 0 to 3",
        ),
    ),
    *_rows(
        JSON,
        bool,
        ("fp16", "fp16.enabled", "train in fp16"),
        ("bf16", "bf16.enabled", "train in bf16"),
        ("use-distributed-optimizer", "zero_optimization.stage", "ZeRO 1 at least"),
        ("use-torch-fsdp2", "zero_optimization.stage", "ZeRO 3"),
        ("async-save", f"{SECTION}.checkpoint.background", "save in the background"),
    ),
]

_RECIPE_ROWS = [
    Row("eval-iters", RECIPE, int, "--eval_samples", "batches of each evaluation, the last too"),
    Row("train-samples", RECIPE, int, "--max_steps", "samples of a run; needs --global-batch-size"),
    Row("data-path", RECIPE, list, "--data", "data, or a blend; split 969,30,1 without --split"),
    Row("save", RECIPE, str, "--output", "the run folder"),
    Row(
        "load",
        RECIPE,
        str,
        "--output, or the first weights",
        "the folder of a run that goes on, or a checkpoint of Megatron to start from",
    ),
    Row(
        "pretrained-checkpoint",
        RECIPE,
        str,
        "the first weights",
        "checkpoint of Megatron to start from if the folder of --load has none",
    ),
    Row("save-megatron", RECIPE, str, "a folder", "write a checkpoint of Megatron at the end"),
    Row("use-checkpoint-args", RECIPE, bool, "the model", "take the model from the checkpoint"),
    Row("finetune", RECIPE, bool, "the first weights", "start with step 0; always so here"),
    Row("no-load-optim", RECIPE, bool, "the first weights", "load no optimizer; always so here"),
    Row("exit-on-missing-checkpoint", RECIPE, bool, "a check", "fail if --load has no checkpoint"),
]
"""Options that `arguments.py` resolves."""

_IDLE_ROWS = [
    *_idle("recipes have no other choice", "use-mcore-models use-te no-position-embedding"),
    *_idle("the layers are transformers'", values="transformer-impl spec"),
    *_idle(
        "attn_implementation of transformers chooses the kernel",
        "use-flash-attn",
        "attention-backend",
    ),
    *_idle("every recipe uses DeepSpeed", "deepspeed"),
    *_idle("norms are computed on all ranks; the results are equal", "sequence-parallel"),
    *_idle("activations are kept; the results are equal", "recompute-activations"),
    *_idle(
        "activations are kept; the results are equal",
        "distribute-saved-activations",
        "recompute-granularity recompute-method recompute-num-layers recompute-modules",
    ),
    *_idle(
        "the engine decides what it overlaps",
        "overlap-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step "
        "no-overlap-p2p-communication overlap-p2p-communication-warmup-flush tp-comm-overlap "
        "delay-grad-reduce align-grad-reduce align-param-gather overlap-moe-expert-parallel-comm "
        "no-align-grad-reduce no-align-param-gather",
        "ddp-bucket-size ddp-num-buckets",
    ),
    *_idle(
        "it chooses between kernels whose results differ only by rounding",
        "no-masked-softmax-fusion no-bias-swiglu-fusion no-bias-dropout-fusion "
        "no-rope-fusion no-gradient-accumulation-fusion no-persist-layer-norm "
        "cross-entropy-loss-fusion moe-grouped-gemm moe-permute-fusion moe-router-fusion "
        "moe-use-legacy-grouped-gemm attention-softmax-in-fp32 no-query-key-layer-scaling "
        "apply-query-key-layer-scaling accumulate-allreduce-grads-in-fp32 "
        "accumulate-all-reduce-grads-in-fp32 use-precision-aware-optimizer",
        "cross-entropy-fusion-impl moe-token-dispatcher-type moe-router-dtype "
        "grad-reduce-in-bf16 main-grads-dtype main-params-dtype",
    ),
    *_idle(
        "recipes recognize the format of a checkpoint; --save writes DeepSpeed's files, and "
        "--save-megatron writes torch_dist",
        "auto-detect-ckpt-format use-dist-ckpt ckpt-assume-constant-structure "
        "ckpt-fully-parallel-save ckpt-fully-parallel-load no-ckpt-fully-parallel-save "
        "dist-ckpt-optim-fully-reshardable use-persistent-ckpt-worker",
        "ckpt-format dist-ckpt-format dist-ckpt-strictness ckpt-fully-parallel-save-process-group",
    ),
    *_idle(
        "a checkpoint always holds all that its run needs to go on",
        "no-save-optim no-save-rng no-load-rng override-opt_param-scheduler "
        "use-checkpoint-opt_param-scheduler",
    ),
    *_idle(
        "metrics.jsonl in the run folder has the figures",
        "log-throughput log-params-norm log-num-zeros-in-grad log-progress log-device-memory-used "
        "log-timers-to-tensorboard log-memory-to-tensorboard log-validation-ppl-to-tensorboard "
        "log-world-size-to-tensorboard log-batch-size-to-tensorboard log-straggler "
        "log-loss-scale-to-tensorboard no-log-loss-scale-to-tensorboard "
        "no-log-learnig-rate-to-tensorboard",
        "log-memory-interval timing-log-level timing-log-option tensorboard-log-interval "
        "tensorboard-queue-size wandb-exp-name wandb-save-dir wandb-entity logging-level",
    ),
    *_idle(
        "the launcher and torch decide this",
        "use-cpu-initialization use-ring-exchange-p2p disable-gloo-process-groups "
        "enable-gloo-process-groups use-gloo-process-groups lazy-mpu-init "
        "no-use-tokenizer-model-from-checkpoint-args use-tp-pp-dp-mapping nccl-ub",
        "distributed-backend high-priority-stream-groups nccl-communicator-config-path",
    ),
    *_idle(
        "it does not change the results",
        "manual-gc no-mmap-bin-files no-create-attention-mask-in-dataloader "
        "check-for-nan-in-loss-and-grad no-check-for-nan-in-loss-and-grad "
        "check-for-large-grads calculate-per-token-loss moe-shared-expert-overlap "
        "profile use-pytorch-profiler enable-cuda-graph external-cuda-graph exit-signal-handler",
        "num-workers dataloader-type data-cache-path manual-gc-interval manual-gc-eval "
        "empty-unused-memory-level profile-step-start profile-step-end profile-ranks "
        "cuda-graph-impl cuda-graph-scope num-dataset-builder-threads "
        "check-weight-hash-across-dp-replicas-interval",
    ),
    *_idle(
        "stages are cut by the computation of their layers",
        "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split "
        "standalone-embedding-stage",
    ),
    *_idle("weights of norms are kept without an offset of 1", "apply-layernorm-1p"),
    *_idle("--data-parallel-sharding-strategy decides this", "use-megatron-fsdp use-custom-fsdp"),
    *_idle("experts have no capacity and drop no token", "moe-pad-expert-input-to-capacity"),
]

_FAMILIES = "Describe a GPT-2, Llama, Qwen or Mixtral, or give another model to DeepSpeed's script"
_REFUSED_ROWS = [
    *_refused(
        "none of the models here computes this",
        _FAMILIES,
        "squared-relu quick-geglu rotary-interleaved multi-latent-attention "
        "attention-output-gate apply-residual-connection-post-layernorm "
        "moe-router-enable-expert-bias experimental-attention-variant",
        "window-attn-skip-freq q-lora-rank kv-lora-rank qk-head-dim "
        "qk-pos-emb-head-dim v-head-dim mtp-num-layers softmax-scale hybrid-layer-pattern "
        "hybrid-override-pattern hybrid-attention-ratio hybrid-mlp-ratio "
        "linear-attention-freq moe-layer-freq=1 "
        "moe-router-score-function=softmax moe-router-topk-scaling-factor=1|1.0 "
        "moe-router-num-groups moe-router-group-topk moe-router-bias-update-rate "
        "moe-input-jitter-eps moe-z-loss-coeff=0|0.0 moe-expert-capacity-factor "
        "softmax-type=vanilla no-rope-freq yarn-original-max-position-embeddings "
        "glu-linear-offset heterogeneous-layers-config-path "
        "rotary-scaling-factor mscale mscale-all-dim rotary-seq-len-interpolation-factor",
    ),
    *_refused(
        "weights and gradients have 16 or 32 bits here",
        "Use --bf16",
        "fp8-param-gather",
        "fp8-format fp8-recipe fp4-format fp8-margin fp8-amax-history-len fp8-amax-compute-algo",
    ),
    *_refused(
        "sequences are not divided over ranks",
        "Give 1",
        values="context-parallel-size=1 hierarchical-context-parallel-sizes",
    ),
    *_refused(
        "recipes do not make such groups of ranks",
        "Leave it out",
        values="expert-tensor-parallel-size=1 pipeline-model-parallel-split-rank "
        "num-distributed-optimizer-instances=1 encoder-num-layers",
    ),
    *_refused(
        "here, a partition says where stages begin",
        "Give --set wavemare.pipeline.partition=[0,...], the first layer of each stage",
        values="pipeline-model-parallel-layout",
    ),
    *_refused(
        "the number of samples per step is constant here",
        "Leave it out",
        values="rampup-batch-size step-batch-size-schedule",
    ),
    *_refused(
        "the path of --load names the iteration",
        "Give --load FOLDER/iter_0001000",
        values="ckpt-step override-ckpt-iteration",
    ),
    *_refused(
        "all parameters have the same weight decay here",
        "Leave it out",
        "apply-wd-to-qk-layernorm",
        "no-weight-decay-cond-type",
    ),
    *_refused(
        "the schedules are DeepSpeed's, and start from the learning rate 0",
        "Use --lr-decay-style cosine, linear or constant, or a scheduler of the JSON",
        values="lr-wsd-decay-style lr-wsd-decay-iters lr-wsd-decay-samples lr-warmup-init=0|0.0 "
        "decoupled-lr decoupled-min-lr start-weight-decay end-weight-decay "
        "weight-decay-incr-style=constant",
    ),
    *_refused(
        "a sample may hold several documents without a border, as by default in Megatron",
        "Leave it out",
        "reset-position-ids reset-attention-mask eod-mask-loss",
    ),
    *_refused(
        "training and validation use shares of the same data here",
        "Use --data-path with --split",
        "mock-data",
        "train-data-path valid-data-path test-data-path data-args-path per-split-data-args-path",
    ),
    *_refused(
        "a run ends after its last step, or at SIGTERM",
        "Give --train-iters, and let the launcher send SIGTERM",
        values="exit-interval exit-duration-in-mins",
    ),
    *_refused(
        "transformers initializes the weights",
        "Leave it out",
        "init-method-xavier-uniform",
    ),
    *_refused(
        "a recipe always trains",
        "Leave it out",
        "skip-train",
    ),
]

TABLE: Mapping[str, Row] = {
    row.attribute: row
    for row in (*_MODEL_ROWS, *_JSON_ROWS, *_RECIPE_ROWS, *_IDLE_ROWS, *_REFUSED_ROWS)
}
"""All rows by their names in Python."""


def of_use(*uses: str) -> list[Row]:
    """Return the rows of some uses."""
    return [row for row in TABLE.values() if row.use in uses]


if TYPE_CHECKING:

    @dataclass(frozen=True)
    class MegatronArguments:
        """Megatron's options."""

        def __getattr__(self, name: str) -> Any: ...

else:
    MegatronArguments = make_dataclass(
        "MegatronArguments", [row.field() for row in TABLE.values()], frozen=True
    )
    MegatronArguments.__module__, MegatronArguments.__doc__ = __name__, "Megatron's options."


def given(arguments: Any, *uses: str) -> dict[str, Any]:
    """Return the options of some uses that a command line has given, by their names in Python."""
    found = {row.attribute: getattr(arguments, row.attribute) for row in of_use(*uses)}
    return {k: value for k, value in found.items() if value is not None and value is not False}


def check(arguments: Any) -> list[str]:
    """Refuse what is not done here; return the names of the given options without a meaning.

    Raises:
        ConfigError: Naming the first option that asks for something else.
    """
    for name, value in given(arguments, REFUSED).items():
        row = TABLE[name]
        if row.kind is bool or not {*value} <= {*row.usual}:
            shown = value if row.kind is bool else " ".join(value)
            raise ConfigError(f"--{row.name}", shown, row.text, row.remedy)
    return [f"--{TABLE[name].name}" for name in given(arguments, IDLE, REFUSED)]


def names(attributes: Iterable[str]) -> str:
    """Return options as a user writes them, with commas between."""
    return ", ".join(f"--{TABLE[each].name}" for each in attributes)


def zero_stage(arguments: Any) -> int | None:
    """Return the stage of ZeRO that the options ask for; None if they say nothing.

    Raises:
        ConfigError: There is no such strategy.
    """
    strategy = arguments.data_parallel_sharding_strategy
    if strategy is not None and strategy not in _ZERO:
        key, reason = "--data-parallel-sharding-strategy", "there is no such strategy"
        raise ConfigError(key, strategy, reason, f"Use one of {', '.join(_ZERO)}")
    if strategy is not None:
        return _ZERO[strategy]
    if arguments.use_torch_fsdp2:
        return _ZERO["optim_grads_params"]
    return _ZERO["optim"] if arguments.use_distributed_optimizer else None
