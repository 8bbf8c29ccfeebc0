# SPDX-License-Identifier: Apache-2.0
"""What each layer of a transformers model computes, keeps and sends, from the configuration alone.

The layers are those of `wavemare.models.to_pipeline`, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wavemare.errors import ModelError, PlanError, check_number, did_you_mean

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}

FAMILIES = ("gpt2", "bert", "llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` of which the planner needs no code of transformers.

The layers of others are those of the model itself, without weights.
"""

# Bytes per token and unit of width that a block keeps, in activations of its dtype (Korthikanti et
# al. 2022, section 4, counts 34 of 16 bits with two masks of one byte each).
_REPLICATED = 4  # two norms' inputs, and those of attention and feed-forward
_SPLIT = 4  # query, key, value, and the input of the attention's projection
_MASKS = 2  # dropout
_MOST_BLOCKS = 10_000
_ZERO_IS_FINE = ("type_vocab_size", "num_labels")
_FEED_FORWARD = 2  # the activation function's input and result, for each unit of the inner width


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer, for one sample (a sequence) unless told otherwise.

    Args:
        name: What it is.
        parameters: Its own.
        tied_parameters: Those of another layer that it multiplies by. A stage that has not the
            other layer holds a copy.
        flops: Of a forward pass.
        kept_bytes: What it keeps for the backward pass on every rank that shares it.
        split_bytes: What it keeps in parts, one on each rank that shares it.
        is_block: Whether it is one of the repeated blocks, which can be recomputed.
        sums: Results that tensor parallelism sums over its ranks in a forward pass, each as large
            as a boundary; as many again in the backward pass.
        expert_parameters: Those of ``parameters`` that are divided where experts are.
        routed: How many times as large as a boundary is what travels to experts; 0 without experts.
    """

    name: str
    parameters: int
    flops: float
    kept_bytes: float
    split_bytes: float = 0.0
    tied_parameters: int = 0
    is_block: bool = False
    sums: int = 0
    expert_parameters: int = 0
    routed: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """A chain of layers.

    Args:
        name: Of the model.
        layers: In the order of `to_pipeline`.
        sequence: Tokens of a sample.
        boundary_bytes: What one sample sends from a layer to the next.
        dtype: fp32, fp16 or bf16.
        widths: Numbers that tensor parallelism must divide; empty where it cannot split the model.
        experts: Experts of a layer; 0 where they cannot be divided, or there are none.
        dtype_from: Where the dtype comes from, in words.
    """

    name: str
    layers: tuple[LayerCost, ...]
    sequence: int
    boundary_bytes: float
    dtype: str = "fp32"
    widths: tuple[int, ...] = ()
    experts: int = 0
    dtype_from: str = "given"

    @property
    def parameters(self) -> int:
        """Of the whole model, tied ones once."""
        return sum(layer.parameters for layer in self.layers)

    def splits(self, tensor_parallel: int) -> bool:
        """Whether so many ranks can share each layer."""
        if tensor_parallel == 1:
            return True
        return bool(self.widths) and all(width % tensor_parallel == 0 for width in self.widths)


def model_costs(
    config: Any, sequence: int, *, dtype: str | None = None, head: str | None = None
) -> ModelCosts:
    """Return the costs of a model.

    Args:
        config: A transformers configuration, or the content of its ``config.json``.
        sequence: Tokens of a sample.
        dtype: fp32, fp16 or bf16; that of the configuration if omitted, or else fp32.
        head: Class of the model, where the configuration names none or another one.

    Raises:
        ModelError: The model cannot be cut into layers, or the configuration lacks a number.
        PlanError: The sequence is too long for the model, or the dtype unknown.
    """
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        reason = "it is neither a configuration nor a model of transformers"
        raise ModelError("model", config, reason, "Give one, a config.json or a preset's name")
    values = config if isinstance(config, Mapping) else config.to_dict()
    family = str(values.get("model_type", ""))
    if not family:
        reason = "the configuration does not say which family of models it is"
        raise ModelError("model_type", None, reason, did_you_mean("", FAMILIES))
    dtype, dtype_from = (dtype, "given") if dtype is not None else _dtype_of(values)
    if dtype not in BYTES:
        raise PlanError("dtype", dtype, "there is no such dtype", did_you_mean(dtype, BYTES))
    sizes = Sizes.of(values, family, sequence, BYTES[dtype])
    named = values.get("architectures") or ("",)
    if not isinstance(named, list | tuple) or not all(isinstance(item, str) for item in named):
        raise ModelError("architectures", named, "it is no list of names", "Write [...]")
    name = head or named[0]
    experts = 0
    if family in FAMILIES:
        layers = {"gpt2": _gpt2, "bert": _bert}.get(family, _decoder)(sizes, name)
        splits = True
    else:
        from wavemare.parallel.planner.chains import layers_of  # torch, and transformers

        layers, splits, experts = layers_of(config, name, sizes)
    return ModelCosts(
        name=name or family,
        layers=tuple(layers),
        sequence=sequence,
        boundary_bytes=float(sizes.width * sequence * sizes.size),
        dtype=dtype,
        # Split layers take whole heads, and whole columns of the feed-forward part.
        widths=(sizes.heads, sizes.key_heads, sizes.inner) if splits else (),
        experts=experts,
        dtype_from=dtype_from,
    )


def _dtype_of(values: Mapping[str, Any]) -> tuple[str, str]:
    """Return the dtype of a configuration, and where it comes from."""
    given = values.get("dtype") or values.get("torch_dtype")
    names = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    name = str(given).removeprefix("torch.")
    if given is not None and name in names:
        return names[name], "of the model's configuration"
    return "fp32", "assumed: the configuration names none"


@dataclass(frozen=True)
class Sizes:
    """The numbers of a configuration under one name each; ``size`` is the bytes of a number."""

    family: str
    width: int
    inner: int
    blocks: int
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    positions: int
    types: int
    labels: int
    tied: bool
    biases: bool
    eager: bool
    sequence: int
    size: int

    @classmethod
    def of(cls, values: Mapping[str, Any], family: str, sequence: int, size: int) -> Sizes:
        """Return the numbers of a configuration.

        Args:
            values: The content of its ``config.json``.
            family: Its ``model_type``.
            sequence: Tokens of a sample.
            size: Bytes of a number.

        Raises:
            ModelError: A number is missing, or cannot be.
            PlanError: The sequence is too long for the model.
        """

        def number(*names: str, default: int | None = None) -> int:
            for name in names:
                if values.get(name) is not None:
                    least = int(name not in _ZERO_IS_FINE)
                    check_number(ModelError, name, values[name], least, whole=True)
                    return int(values[name])
            if default is None:
                raise ModelError(names[0], None, "the configuration lacks it", "Give it")
            return default

        width = number("hidden_size", "n_embd", "d_model")
        heads = number("num_attention_heads", "n_head")
        unbounded = None if family in FAMILIES else 1 << 60
        positions = number("max_position_embeddings", "n_positions", default=unbounded)
        check_number(PlanError, "sequence_length", sequence, 1, whole=True)
        if sequence > positions:
            reason = f"the model has {positions} positions"
            raise PlanError("sequence_length", sequence, reason, f"Give 1 to {positions}")
        blocks = number("num_hidden_layers", "n_layer")
        if blocks > _MOST_BLOCKS:
            reason = "a layout of so many layers would take hours to find"
            raise ModelError("num_hidden_layers", blocks, reason, f"Give at most {_MOST_BLOCKS}")
        if width % heads and values.get("head_dim") is None:
            reason = f"the width of {width} cannot be shared by them evenly"
            raise ModelError("num_attention_heads", heads, reason, f"Give a divisor of {width}")
        labels = values.get("id2label")
        return cls(
            family=family,
            width=width,
            inner=number("intermediate_size", "n_inner", "ffn_dim", default=4 * width),
            blocks=blocks,
            heads=heads,
            key_heads=number("num_key_value_heads", default=heads),
            head_width=number("head_dim", default=width // heads),
            vocabulary=number("vocab_size"),
            positions=positions,
            types=number("type_vocab_size", default=0),
            labels=len(labels)
            if isinstance(labels, Mapping) and labels
            else number("num_labels", default=2),
            tied=bool(values.get("tie_word_embeddings", family in ("gpt2", "bert"))),
            biases=bool(values.get("attention_bias", family == "qwen2")),
            eager=values.get("_attn_implementation") == "eager",
            sequence=sequence,
            size=size,
        )

    def tensor(self, width: float) -> float:
        """Return the bytes of a sample's activations of a width."""
        return self.sequence * width * self.size

    def product(self, weights: float) -> float:
        """Return the operations of a sample's product with so many weights."""
        return 2.0 * self.sequence * weights


def _gpt2(sizes: Sizes, name: str) -> list[LayerCost]:
    width = sizes.width
    return [
        embedding_cost(sizes),
        small_cost("positions", sizes, sizes.positions * width, masks=1),
        *_blocks(sizes, parameters=_classic_parameters(sizes)),
        small_cost("norm", sizes, 2 * width),
        head_cost(sizes),
    ]


def _bert(sizes: Sizes, name: str) -> list[LayerCost]:
    width = sizes.width
    tables = (sizes.positions + sizes.types) * width + 2 * width
    start = [
        embedding_cost(sizes),
        small_cost("positions", sizes, tables, tensors=2, masks=1),
        *_blocks(sizes, parameters=_classic_parameters(sizes)),
    ]
    if name == "BertForSequenceClassification":
        pooled = width * width + width
        labels = sizes.labels * (width + 1)
        return [
            *start,
            LayerCost(
                name="pooler",
                parameters=pooled,
                flops=2.0 * width * width,
                kept_bytes=2.0 * width * sizes.size,
            ),
            LayerCost(
                name="classifier",
                parameters=labels,
                flops=2.0 * width * sizes.labels,
                kept_bytes=float(width * sizes.size),
            ),
        ]
    transform = LayerCost(
        name="transform",
        parameters=width * width + 3 * width,
        flops=sizes.product(width * width),
        kept_bytes=sizes.tensor(3 * width),
    )
    return [*start, transform, head_cost(sizes, bias=sizes.vocabulary)]


def _decoder(sizes: Sizes, name: str) -> list[LayerCost]:
    width, query = sizes.width, sizes.heads * sizes.head_width
    key = sizes.key_heads * sizes.head_width
    matrices = 2 * width * query + 2 * width * key + 3 * width * sizes.inner
    biases = query + 2 * key if sizes.biases else 0
    if sizes.biases and sizes.family != "qwen2":
        biases += width
    norms = 2 * width + (2 * sizes.head_width if sizes.family == "qwen3" else 0)
    return [
        embedding_cost(sizes),
        *_blocks(sizes, parameters=matrices + biases + norms, matrices=matrices),
        small_cost("norm", sizes, width),
        head_cost(sizes),
    ]


def _classic_parameters(sizes: Sizes) -> int:
    """Return the parameters of a block with biases and two norms: GPT-2's and BERT's."""
    width, inner = sizes.width, sizes.inner
    return 4 * width * (width + 1) + 2 * width * inner + inner + width + 4 * width


def _blocks(sizes: Sizes, parameters: int, matrices: int | None = None) -> list[LayerCost]:
    return [block_cost(sizes, parameters, matrices)] * sizes.blocks


def block_cost(
    sizes: Sizes,
    parameters: int,
    matrices: int | None = None,
    *,
    inner: int | None = None,
    expert_parameters: int = 0,
    routed: float = 0.0,
) -> LayerCost:
    """Return the costs of a block.

    Args:
        sizes: Of the model.
        parameters: Of the block.
        matrices: Weights with which a token is multiplied; those of a classic block if omitted.
        inner: Width of the feed-forward part for a token, where it is not the model's.
        expert_parameters: See `LayerCost`.
        routed: See `LayerCost`.
    """
    width, query = sizes.width, sizes.heads * sizes.head_width
    classic = matrices is None
    weights = 4 * width * width + 2 * width * sizes.inner if matrices is None else matrices
    # Scores, and their product with the values.
    attention = 4.0 * sizes.sequence**2 * query
    kept = sizes.tensor(_REPLICATED * width)
    if classic:
        kept += sizes.sequence * width * _MASKS
    wide = (_FEED_FORWARD if classic else _FEED_FORWARD + 1) * (inner or sizes.inner)
    split = sizes.tensor(_SPLIT * query + wide)
    if sizes.eager:
        # Scores before and after the softmax, and a mask.
        split += sizes.heads * sizes.sequence**2 * (2 * sizes.size + 1)
    return LayerCost(
        name="block",
        parameters=parameters,
        flops=sizes.product(weights) + attention,
        kept_bytes=kept,
        split_bytes=split,
        is_block=True,
        sums=2,
        expert_parameters=expert_parameters,
        routed=routed,
    )


def embedding_cost(sizes: Sizes) -> LayerCost:
    """Return the costs of a word embedding."""
    return LayerCost(
        name="embedding",
        parameters=sizes.vocabulary * sizes.width,
        flops=0.0,
        kept_bytes=sizes.tensor(sizes.width),
        sums=1,
    )


def small_cost(
    name: str, sizes: Sizes, parameters: int, *, tensors: int = 1, masks: int = 0
) -> LayerCost:
    """Return a layer that works on each number by itself."""
    masked = float(sizes.sequence * sizes.width * masks)
    return LayerCost(
        name=name,
        parameters=parameters,
        flops=0.0,
        kept_bytes=sizes.tensor(tensors * sizes.width) + masked,
    )


def head_cost(sizes: Sizes, bias: int = 0) -> LayerCost:
    """Return the costs of a head, which may be tied to the embedding and have a bias."""
    weights = sizes.vocabulary * sizes.width
    logits = float(sizes.sequence * sizes.vocabulary)
    return LayerCost(
        name="head",
        parameters=bias + (0 if sizes.tied else weights),
        tied_parameters=weights if sizes.tied else 0,
        flops=sizes.product(weights),
        kept_bytes=sizes.tensor(sizes.width),
        # Logits, and their probabilities in fp32 with the gradient that replaces them.
        split_bytes=logits * (sizes.size + 8),
        sums=1,
    )
