# SPDX-License-Identifier: Apache-2.0
"""Megatron's weights by transformers' names and back, against plain loops."""

import re

import pytest
import torch
from safetensors.torch import save_file

from megatron_models import CONFIGS, build, lies_at
from support.refusals import refuses
from wavemare.errors import ModelError
from wavemare.megatron.keys import HfWeights, MegatronWeights
from wavemare.models.folder import HfFolder
from wavemare.models.source import Cast, MemorySource, spans_of
from wavemare.models.tensor_file import TensorFile

PADDED = 40


def all_of(source):
    return {name: source.read(name) for name in source.stored}


def by_hand(model, experts):
    """Megatron's weights of a Llama or a Qwen2-MoE, one row at a time."""
    state, config = model.state_dict(), model.config
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    size = config.hidden_size // heads
    found = {}

    def vocabulary(weight):
        return torch.stack([weight[min(row, len(weight) - 1)] for row in range(PADDED)])

    def grouped(part, end):
        query, key, value = (state[f"{part}.{name}_proj.{end}"] for name in "qkv")
        rows = []
        for group in range(groups):
            for head in range(heads // groups):
                first = (group * (heads // groups) + head) * size
                rows += [query[first + row] for row in range(size)]
            rows += [key[group * size + row] for row in range(size)]
            rows += [value[group * size + row] for row in range(size)]
        return torch.stack(rows)

    def gate_and_up(part):
        gate, up = state[f"{part}.gate_proj.weight"], state[f"{part}.up_proj.weight"]
        return torch.stack([*gate, *up])

    found["embedding.word_embeddings.weight"] = vocabulary(state["model.embed_tokens.weight"])
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
        attention = f"{ours}.self_attention"
        found[f"{attention}.linear_qkv.layer_norm_weight"] = state[
            f"{theirs}.input_layernorm.weight"
        ]
        found[f"{attention}.linear_qkv.weight"] = grouped(f"{theirs}.self_attn", "weight")
        if experts:
            found[f"{attention}.linear_qkv.bias"] = grouped(f"{theirs}.self_attn", "bias")
        found[f"{attention}.linear_proj.weight"] = state[f"{theirs}.self_attn.o_proj.weight"]
        found[f"{ours}.mlp.linear_fc1.layer_norm_weight"] = state[
            f"{theirs}.post_attention_layernorm.weight"
        ]
        if not experts:
            found[f"{ours}.mlp.linear_fc1.weight"] = gate_and_up(f"{theirs}.mlp")
            found[f"{ours}.mlp.linear_fc2.weight"] = state[f"{theirs}.mlp.down_proj.weight"]
            continue
        found[f"{ours}.mlp.router.weight"] = state[f"{theirs}.mlp.gate.weight"]
        block = model.model.layers[layer].mlp
        inner = config.moe_intermediate_size
        first, second = [], []
        for expert in range(config.num_experts):
            both = block.experts.gate_up_proj.detach()[expert]
            first.append(torch.cat([both[:inner], both[inner:]]))
            second.append(block.experts.down_proj.detach()[expert])
        found[f"{ours}.mlp.experts.linear_fc1.weight"] = torch.stack(first)
        found[f"{ours}.mlp.experts.linear_fc2.weight"] = torch.stack(second)
        shared = f"{theirs}.mlp.shared_expert"
        found[f"{ours}.mlp.shared_experts.linear_fc1.weight"] = gate_and_up(shared)
        found[f"{ours}.mlp.shared_experts.linear_fc2.weight"] = state[f"{shared}.down_proj.weight"]
        found[f"{ours}.mlp.shared_experts.gate_weight"] = state[f"{shared}_gate.weight"]
    found["decoder.final_layernorm.weight"] = state["model.norm.weight"]
    found["output_layer.weight"] = vocabulary(state["lm_head.weight"])
    return found


@pytest.mark.parametrize("name", ["llama", "qwen2_moe"])
def test_where_every_row_goes(name):
    model = build(name)
    source = MegatronWeights(MemorySource(model.state_dict()), model.config, padded=PADDED)
    expected = by_hand(model, experts=name == "qwen2_moe")
    found = all_of(source)
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        assert source.stored[key].shape == tuple(weight.shape)
        assert torch.equal(found[key], weight), key
    back = all_of(HfWeights(MemorySource(expected), model.config))
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_and_every_part(name):
    """A part that is read alone is the part of the whole; the whole is the model's."""
    model = build(name)
    state = model.state_dict()
    there = MegatronWeights(MemorySource(state), model.config, padded=PADDED)
    back = HfWeights(MemorySource(all_of(there)), model.config)
    assert back.stored.keys() == state.keys()
    generator = torch.Generator().manual_seed(5)
    for source, whole in ((there, all_of(there)), (back, state)):
        for key, weight in whole.items():
            assert torch.equal(source.read(key), weight), key
            for count in range(1, weight.dim() + 1):
                cuts = [torch.randint(0, n + 1, (2,), generator=generator) for n in weight.shape]
                index = tuple(slice(*cut.sort().values.tolist()) for cut in cuts[:count])
                assert torch.equal(source.read(key, index), weight[index]), (key, index)


_TRANSPOSED = re.compile(
    r".*(linear_(qkv|proj|fc1|fc2)|c_(attn|proj|fc))\.weight|.*(_qkv|_attn)\.bias"
)


@pytest.mark.parametrize("name", CONFIGS)
def test_where_bytes_lie_in_files(tmp_path, name):
    """All but what is transposed can be copied, and the bytes are the ones read."""
    model = build(name)
    model.save_pretrained(tmp_path / "hf")
    there = MegatronWeights(HfFolder(tmp_path / "hf"), model.config, padded=PADDED)
    save_file(all_of(there), tmp_path / "megatron")
    back = HfWeights(TensorFile(tmp_path / "megatron"), model.config)
    for source in (there, back):
        for key in source.stored:
            spans = spans_of(source, key)
            turned = name.startswith("gpt2") and _TRANSPOSED.fullmatch(key)
            assert (spans is None) == bool(turned), key
            if spans is not None:
                assert lies_at(source.read(key), spans), key


def test_what_becomes_another_type_is_not_copied(tmp_path):
    """Also one of the same length."""
    model = build("llama").half()
    model.save_pretrained(tmp_path)
    folder, wanted = HfFolder(tmp_path), torch.bfloat16
    there = MegatronWeights(folder, model.config, padded=PADDED, dtype=wanted)
    for source in (there, Cast(folder, wanted)):
        assert {spans_of(source, name) for name in source.stored} == {None}
        assert {weight.dtype for weight in all_of(source).values()} == {wanted}
    same = Cast(folder, torch.float16)
    assert all(spans_of(same, name) == folder.spans(name) for name in same.stored)


class Counting(MemorySource):
    """Counts the numbers that are read."""

    numbers = 0

    def read(self, name, index=()):
        part = super().read(name, index)
        self.numbers += part.numel()
        return part


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_tensor_parallel_half_reads_half(name):
    model = build(name)
    whole = MegatronWeights(MemorySource(model.state_dict()), model.config, padded=PADDED)
    source = Counting(all_of(whole))
    weights = HfWeights(source, model.config)
    for key in ("q_proj", "k_proj", "v_proj"):
        weight = f"model.layers.0.self_attn.{key}.weight"
        rows = weights.stored[weight].shape[0] // 2
        weights.read(weight, (slice(rows, 2 * rows),))
    # The three stand together in one group of two.
    fused = source.stored["decoder.layers.0.self_attention.linear_qkv.weight"].shape
    assert source.numbers == fused[0] * fused[1] // 2


def test_norms_without_their_one(tmp_path):
    model = build("llama, biases")
    stored = all_of(MegatronWeights(MemorySource(model.state_dict()), model.config, padded=PADDED))
    for key in stored:
        if "norm" in key and key.endswith("weight"):
            stored[key] = stored[key].double() - 1
        else:
            stored[key] = stored[key].double()
    save_file(stored, tmp_path / "megatron")
    source = HfWeights(TensorFile(tmp_path / "megatron"), model.config, centered=True)
    assert {n for n in source.stored if spans_of(source, n) is None} == {
        name for name in source.stored if "norm" in name and name.endswith("weight")
    }
    found = all_of(source)
    for key, value in model.state_dict().items():
        assert torch.equal(found[key], value.double()), key


@pytest.mark.parametrize("wanted", [None, torch.bfloat16, torch.float32])
def test_the_one_of_half_precision_norms(wanted):
    """It is added in float32, as Megatron's kernels do, and rounded to what is wanted."""
    model = build("llama")
    stored = all_of(MegatronWeights(MemorySource(model.state_dict()), model.config, padded=PADDED))
    key = "decoder.final_layernorm.weight"
    stored = {name: weight.bfloat16() for name, weight in stored.items()}
    stored[key] = torch.linspace(-0.01, 0.01, 16).bfloat16()
    source = HfWeights(MemorySource(stored), model.config, centered=True, dtype=wanted)
    found, exact = source.read("model.norm.weight"), stored[key].float() + 1
    assert source.stored["model.norm.weight"].dtype == found.dtype == (wanted or torch.bfloat16)
    assert torch.equal(found, exact.to(found.dtype))
    assert torch.equal(found.float(), exact) == (wanted is torch.float32)


@pytest.mark.parametrize(
    ("dtype", "wanted", "is_kept"),
    [
        (torch.float16, None, True),
        (torch.bfloat16, torch.float32, True),
        (torch.float64, torch.float32, True),
        (torch.float64, None, False),
        (torch.float32, torch.float64, False),
        (torch.float8_e4m3fn, None, False),
        (torch.float8_e4m3fn, torch.bfloat16, False),
        (torch.int8, None, False),
        (torch.int8, torch.bfloat16, False),
    ],
)
def test_types_that_megatron_has(dtype, wanted, is_kept):
    model = build("llama")
    state = model.state_dict()
    name = "model.layers.1.self_attn.k_proj.weight"
    state[name] = state[name].to(dtype)
    if is_kept:
        source = MegatronWeights(MemorySource(state), model.config, padded=PADDED, dtype=wanted)
        assert {weight.dtype for weight in all_of(source).values()} <= {
            torch.float32,
            torch.bfloat16,
            torch.float16,
        }
        return
    with pytest.raises(ModelError) as caught:
        MegatronWeights(MemorySource(state), model.config, padded=PADDED, dtype=wanted)
    assert caught.value.key == "weight"


def test_weights_without_a_place_are_named():
    model = build("llama")
    state = model.state_dict()
    stored = all_of(MegatronWeights(MemorySource(state), model.config, padded=PADDED))
    stored["mtp.layers.0.eh_proj.weight"] = torch.zeros(2)
    with refuses(ModelError, "weights", "mtp.layers.0.eh_proj.weight"):
        HfWeights(MemorySource(stored), model.config)
    with refuses(ModelError, "weights", "model.layers.0.extra"):
        MegatronWeights(
            MemorySource(state | {"model.layers.0.extra": torch.zeros(2)}),
            model.config,
            padded=PADDED,
        )
