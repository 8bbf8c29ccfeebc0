# SPDX-License-Identifier: Apache-2.0
"""Layers with weights in int8: their products, copies and files, against torchao."""

import copy
import pickle
from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch
import transformers
from torch.nn import functional

from support.refusals import refuses
from wavemare.errors import ModelError
from wavemare.models.int8 import Int8Linear, Int8Weight
from wavemare.models.quantized import dequantized, part_of, prepare

NEEDS_TORCHAO = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
ROWS, COLUMNS = 40, 96


@pytest.fixture
def layer():
    torch.manual_seed(0)
    made = Int8Linear(COLUMNS, ROWS)
    numbers = torch.randint(-128, 128, (ROWS, COLUMNS), dtype=torch.int8)
    made.weight = Int8Weight(numbers, torch.rand(ROWS, 1) / 100, torch.float32)
    return made.requires_grad_(False)


def pass_of(call, value, autocast=False):
    value = value.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = call(value)
    gradient = torch.linspace(-1, 1, result.numel()).reshape(result.shape).to(result)
    result.backward(gradient)
    return result.detach(), value.grad


def test_a_product_is_that_of_the_numbers_times_their_scales(layer):
    whole = layer.weight.data.double() * layer.weight.scale.double()
    value = torch.randn(3, 5, COLUMNS, dtype=torch.float64)
    expected = pass_of(lambda x: functional.linear(x, whole, layer.bias.double()), value)
    for own, other in zip(pass_of(layer, value.float()), expected, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.dequantize().double(), whole)


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_together_are_the_whole(layer, dim):
    ends = (0, 16, 40) if dim == 0 else (0, 32, 96)
    parts = [part_of(layer.weight, dim, [piece]) for piece in pairwise(ends)]
    assert torch.equal(torch.cat([dequantized(part) for part in parts], dim), layer.dequantize())


def test_scales_are_copied_pickled_loaded_and_keep_their_type(layer):
    expected = dict(layer.state_dict())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        other.weight.data.zero_()
        other.weight.scale.zero_()
        assert layer.weight.scale.all()
        other.load_state_dict(expected)
        other.half()
        assert other.weight.dtype is torch.int8
        assert torch.equal(other.weight.scale, layer.weight.scale)
        assert torch.equal(other.weight.data, layer.weight.data)
    with pytest.raises(RuntimeError, match=r"weight\.scale"):
        layer.load_state_dict({n: w for n, w in expected.items() if "scale" not in n})


@NEEDS_TORCHAO
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_gradients_are_the_bits_of_torchao(dtype, autocast):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(1)
    theirs = torch.nn.Sequential(torch.nn.Linear(COLUMNS, ROWS, dtype=dtype)).requires_grad_(False)
    quantize_(theirs, Int8WeightOnlyConfig())
    ours, value = copy.deepcopy(theirs), torch.randn(3, 5, COLUMNS, dtype=dtype)
    prepare(ours)
    found, expected = (pass_of(each, value, autocast) for each in (ours, theirs))
    assert type(ours[0]) is Int8Linear
    assert all(map(torch.equal, found, expected))
    assert torch.equal(ours[0].dequantize(), theirs[0].weight.dequantize())


@pytest.fixture
def load(make_model, tmp_path):
    def made(quantized):
        make_model("llama").save_pretrained(tmp_path / "whole")
        config = transformers.TorchAoConfig(quantized)
        kind = transformers.AutoModelForCausalLM
        return kind.from_pretrained(tmp_path / "whole", quantization_config=config)

    return made


@NEEDS_TORCHAO
def test_a_model_is_saved_by_transformers_as_before(load, tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig

    model = load(Int8WeightOnlyConfig())
    ids = torch.arange(16)[None]
    expected = model(ids).logits
    prepare(model)
    assert torch.equal(model(ids).logits, expected)
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(ids).logits, expected)


@NEEDS_TORCHAO
@pytest.mark.parametrize("form", ["tensor", "activations"])
def test_other_forms_of_torchao_are_refused(load, form):
    from torchao import quantization

    forms = {
        "tensor": lambda: quantization.Int8WeightOnlyConfig(granularity=quantization.PerTensor()),
        "activations": quantization.Int8DynamicActivationInt8WeightConfig,
    }
    with refuses(ModelError, "model", "LlamaForCausalLM") as caught:
        prepare(load(forms[form]()))
    assert "Int8Tensor" in caught.value.reason
