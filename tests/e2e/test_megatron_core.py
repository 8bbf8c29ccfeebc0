# SPDX-License-Identifier: Apache-2.0
"""megatron-core itself as the oracle: its checkpoints and logits, and its models on our engines.

``make test-megatron`` installs it and runs these tests. Another version of Python has another
version of it: 3.11 has 0.16.1, 3.12 has 0.19.2.
"""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from wavemare.megatron import load_hf, open_checkpoint
from wavemare.megatron.convert import convert
from wavemare.megatron.optimizer import write_universal

pytestmark = pytest.mark.nightly

TOOL = Path(__file__).parents[1] / "tools" / "megatron_core.py"
DATA = Path(__file__).parents[1] / "data" / "megatron"
FAMILIES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""The model of transformers that computes the same; nothing tells Mistral from Llama."""
CLOSE = 1e-5


@pytest.fixture(scope="module", autouse=True)
def version():
    if importlib.util.find_spec("megatron") is None:
        pytest.fail("megatron-core is not installed: pip install 'wavemare[megatron]'")
    return tuple(map(int, importlib.metadata.version("megatron-core").split(".")[:2]))


def tool(*words):
    """Run megatron-core's side in interpreters of its own."""
    command = [sys.executable, "-W", "ignore", str(TOOL), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder of a family's checkpoint, which megatron-core writes at the first use."""
    made = {}

    def make(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            tool("save", folder, "--family", family)
            made[family] = folder
        return made[family]

    return make


def difference(model, reference):
    with torch.no_grad():
        logits = model(reference["ids"]).logits
    theirs = reference["logits"][..., : logits.shape[-1]]
    assert theirs.abs().max() > 1
    return float((logits - theirs).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_megatrons_model_and_of_transformers_are_close(family, saved):
    folder = saved(family)
    reference = torch.load(folder / "reference.pt")
    model = load_hf(folder)
    assert type(model).__name__ == FAMILIES[family]
    assert model.config.vocab_size == 62
    assert difference(model, reference) < CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_what_we_write_loads_in_megatron_without_flags(family, saved, tmp_path):
    """At one rank, 2 tensor-parallel ranks, and 2 stages; with experts at 2 expert ranks."""
    source = saved(family)
    convert(source, tmp_path / "hf", "hf")
    convert(tmp_path / "hf", tmp_path / "back", "megatron")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    layouts = [(), ("--tensor", 2), ("--pipeline", 2)]
    if "moe" in family or family == "mixtral":
        layouts.append(("--expert", 2))
    for number, layout in enumerate(layouts):
        found = tmp_path / f"logits-{number}.pt"
        tool("logits", tmp_path / "back", found, *layout)
        assert difference(model, torch.load(found)) < CLOSE, layout


@pytest.mark.parametrize(
    ("family", "layout"),
    [("llama", ("--tensor", 2)), ("qwen3", ("--pipeline", 2)), ("mixtral", ("--expert", 2))],
)
def test_checkpoints_of_split_models_read_as_those_of_one_rank(family, layout, saved, tmp_path):
    tool("save", tmp_path / "split", "--from", saved(family), *layout)
    whole, split = open_checkpoint(saved(family)), open_checkpoint(tmp_path / "split")
    assert list(whole.weights.stored) == list(split.weights.stored)
    for name in whole.weights.stored:
        assert torch.equal(whole.weights.read(name), split.weights.read(name)), name


@pytest.mark.parametrize("pattern", ["*-*-", "*E*E"])
def test_logits_of_a_hybrid_model(pattern, version, tmp_path):
    if version < (0, 19):
        pytest.skip("HybridModel is of megatron-core 0.19 and newer")
    changes = json.dumps({"num_layers": 4, "hybrid_layer_pattern": pattern})
    family = "mixtral" if "E" in pattern else "mistral"
    tool("save", tmp_path / "hybrid", "--family", family, "--arguments", changes)
    model = load_hf(tmp_path / "hybrid")
    assert model.config.num_hidden_layers == 2
    assert difference(model, torch.load(tmp_path / "hybrid" / "reference.pt")) < CLOSE


CASES = {
    "llama": ({}, [(1, [0, 1, 2]), (2, [0, 1, 2])]),
    "gpt2": ({}, [(2, [1])]),
    "qwen3": ({}, [(2, [0, 2])]),
    "mixtral": ({"moe_aux_loss_coeff": 0.5}, [(1, [1])]),
}
"""Changes of the arguments; tensor-parallel ranks, and ZeRO stages with them."""
REFUSED = [
    ("ModelError", "is one stage of a model"),
    ("ModelError", "model.config.moe_router_enable_expert_bias"),
    ("ModelError", "model.config.calculate_per_token_loss"),
    ("ModelError", "model.config.gradient_accumulation_fusion"),
    ("ModelError", "unwrap_model"),
    ("ConfigError", "mpu"),
]


def test_our_engines_train_megatrons_models_as_torch_does(launch, saved):
    """Losses and norms of torch's AdamW in one process; checkpoints resume bit for bit."""
    cases = {
        family: {"folder": str(saved(family)), "changes": changes, "runs": runs}
        for family, (changes, runs) in CASES.items()
    }
    finished = launch("megatron_core.py", json.dumps(cases)).check()
    found = finished.result(0)
    for family, (_, runs) in CASES.items():
        twin = found[family]["twin"]
        assert twin["losses"][-1] < twin["losses"][0]
        assert min(twin["norms"][:3]) > 0.5  # so that they are clipped
        for tensor, stages in runs:
            for zero_stage in stages:
                run = found[family][f"tensor_{tensor}_zero_{zero_stage}"]
                assert run["losses"] == pytest.approx(twin["losses"], rel=1e-5), (family, tensor)
                assert run["norms"] == pytest.approx(twin["norms"], rel=1e-4), (family, tensor)
                assert run["again"][0] == run["again"][1]
                assert run["digests"][0] == run["digests"][1]
                assert all(tokens in (26, 28, 30) for _, tokens in run["reports"])
    for (kind, words), told in zip(REFUSED, found["refusals"], strict=True):
        assert told.startswith(kind)
        assert words in told


def test_the_optimizers_state_of_another_layout(saved, tmp_path):
    """That of Megatron's distributed optimizer on 4 ranks becomes the same universal checkpoint."""
    tool("save", tmp_path / "one", "--from", saved("llama"), "--steps", 3)
    layout = "--tensor", 2, "--data", 2
    tool("save", tmp_path / "other", "--from", saved("llama"), "--steps", 3, *layout)
    for name in "one", "other":
        write_universal(open_checkpoint(tmp_path / name), tmp_path / f"{name}-universal")
    files = sorted((tmp_path / "one-universal").rglob("*.pt"))
    assert len(files) > 100
    for file in files:
        if file.stem in ("fp32", "exp_avg", "exp_avg_sq"):
            place = file.relative_to(tmp_path / "one-universal")
            ours = torch.load(file)["param"]
            theirs = torch.load(tmp_path / "other-universal" / place)["param"]
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-7)
