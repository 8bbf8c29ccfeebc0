# SPDX-License-Identifier: Apache-2.0
"""Every format of Megatron's checkpoints, made by plain loops: the same weights come out."""

import argparse
import contextlib
import enum
import json
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

import megatron_folders as made
from megatron_models import lies_at
from wavemare.errors import CheckpointError
from wavemare.megatron.pickles import Inert
from wavemare.megatron.store import open_store
from wavemare.models.source import spans_of

REAL = Path(__file__).parents[2] / "data" / "megatron"


def check(folder, state, **options):
    """Compare all weights, and some parts of each; return the store."""
    store = open_store(folder, **options)
    assert {n: (s.shape, s.dtype) for n, s in store.weights.stored.items()} == {
        name: (tuple(weight.shape), weight.dtype) for name, weight in state.items()
    }
    generator = torch.Generator().manual_seed(3)
    for name, weight in state.items():
        torch.testing.assert_close(store.weights.read(name), weight, rtol=0, atol=0)
        spans = spans_of(store.weights, name)
        assert spans is None or lies_at(weight, spans)
        for count in range(1, weight.dim() + 1):
            index = []
            for size in weight.shape[:count]:
                cut = torch.randint(0, size + 1, (2,), generator=generator).sort().values.tolist()
                index.append(slice(*cut))
            part = store.weights.read(name, tuple(index))
            torch.testing.assert_close(part, weight[tuple(index)], rtol=0, atol=0)
    return store


@pytest.mark.parametrize("family", made.FAMILIES)
@pytest.mark.parametrize(
    ("form", "ranks"),
    [("stacked", 1), ("stacked", 2), ("numbered", 2), ("singleton", 2), ("hybrid", 1)],
)
def test_torch_dist(tmp_path, family, form, ranks):
    state, args = made.model(family), made.arguments(family)
    content = made.keys(state, ranks, form, gated=family != "gpt2")
    content["optimizer.state.exp_avg.output_layer.weight"] = [((0, 0), torch.ones(2, 3))]
    content["rng_state/shard_0.0_1.1"] = [{"any": 1}]
    made.torch_dist(tmp_path, content, args, common="object" if ranks == 2 else "file")
    store = check(tmp_path, state)
    assert (store.format, store.iteration, store.lost_fp8) == ("torch_dist", 5, False)
    assert store.arguments == args
    assert store.common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    for key, value in made.read_dcp(store.step_folder).items():
        torch.testing.assert_close(store.raw.read(key), value, rtol=0, atol=0)
    assert open_store(store.step_folder).iteration == 5
    apart = {name for name in state if spans_of(store.weights, name) is None}
    by_columns = ("linear_proj.weight", "linear_fc2.weight")
    assert apart == {name for name in state if ranks > 1 and name.endswith(by_columns)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_data_types(tmp_path, dtype):
    state = made.model("llama", dtype=dtype)
    made.torch_dist(tmp_path, made.keys(state), made.arguments("llama"))
    store = open_store(tmp_path)
    for name, weight in state.items():
        assert store.weights.read(name).view(torch.uint8).equal(weight.view(torch.uint8))


@pytest.mark.parametrize("family", made.FAMILIES)
def test_fsdp_dtensor(tmp_path, family):
    state, args = made.model(family), made.arguments(family)
    made.fsdp_dtensor(tmp_path, state, args, gated=family != "gpt2")
    store = check(tmp_path, state)
    assert (store.format, store.iteration, store.arguments) == ("fsdp_dtensor", 5, args)


@pytest.mark.parametrize("spec", ["local", "te"])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gpt2", {}),
        ("gpt2", {"tp": 2, "pp": 2}),
        ("llama", {"tp": 2}),
        ("qwen3", {"pp": 2, "vpp": 2}),
        ("qwen2-moe", {"tp": 2}),
        ("qwen2-moe", {"ep": 2}),
        ("qwen2-moe", {"tp": 2, "pp": 2, "vpp": 2, "ep": 2}),
    ],
)
def test_rank_files(tmp_path, family, spec, sizes):
    state, args = made.model(family), made.arguments(family)
    made.rank_files(tmp_path, state, args, spec=spec, gated=family != "gpt2", **sizes)
    store = check(tmp_path, state)
    assert (store.format, store.iteration) == ("torch", 5)
    assert store.arguments["expert_model_parallel_size"] == sizes.get("ep", 1)


@pytest.mark.parametrize("version", [0, 1, 2, 3])
@pytest.mark.parametrize(("zipped", "sizes"), [(False, {"tp": 2}), (True, {"tp": 2, "pp": 2})])
def test_legacy_models(tmp_path, version, sizes, zipped):
    state = made.model("gpt2")
    args = made.arguments("gpt2")
    made.legacy(tmp_path, state, args if zipped else {}, version=version, zipped=zipped, **sizes)
    store = check(tmp_path, state, num_attention_heads=None if zipped else made.HEADS)
    assert store.format == "torch"


def test_an_old_file_that_does_not_say_its_heads(tmp_path):
    made.legacy(tmp_path, made.model("gpt2"), {}, version=0)
    with pytest.raises(CheckpointError, match="--num-attention-heads"):
        open_store(tmp_path)


def test_a_checkpoint_of_bridge(tmp_path):
    """It has no arguments, but a configuration with the names of its classes, and a tokenizer."""
    state = made.model("llama")
    step = made.torch_dist(tmp_path, made.keys(state), {})
    torch.save({"checkpoint_version": 3.0, "iteration": 5}, step / "common.pt")
    config = {"model": {"_target_": "os.system", "num_layers": 4, "hidden_size": 8}}
    (step / "run_config.yaml").write_text(
        yaml.dump(config) + "dtype: !!python/name:torch.bfloat16 ''\n"
        "kind: !!python/object/apply:os.system [touch marker]\n"
    )
    (step / "tokenizer").mkdir()
    trained = {
        "step": torch.tensor(5, dtype=torch.int32),
        "consumed_train_samples": torch.tensor(40),
    }
    torch.save(trained, step / "train_state.pt")
    torch.save(trained, tmp_path / "latest_train_state.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    store = check(tmp_path, state)
    assert (store.iteration, store.arguments) == (5, {})
    assert store.run_config["model"]["num_layers"] == 4
    assert store.common["train_state"] == {"step": 5, "consumed_train_samples": 40}
    assert store.tokenizer == step / "tokenizer"


@pytest.mark.parametrize("name", ["weights", "model_weights"])
def test_a_checkpoint_of_nemo(tmp_path, name):
    state = made.model("llama")
    content = {f"module.{key}": value for key, value in made.keys(state).items()}
    made.torch_dist(tmp_path / "x", content, {}).rename(tmp_path / name)
    assert check(tmp_path, state).iteration == 5


def test_one_chunk_for_all_layers(tmp_path):
    """As converters write it that know nothing of layers."""
    state = made.model("qwen2-moe")
    content = made.keys(state)
    for key, pieces in content.items():
        if key.startswith("decoder.layers.") and pieces != [None]:
            ends = [[a + n for a, n in zip(first, p.shape, strict=True)] for first, p in pieces]
            whole = torch.empty([max(end) for end in zip(*ends, strict=True)])
            for (first, piece), end in zip(pieces, ends, strict=True):
                whole[tuple(slice(*cut) for cut in zip(first, end, strict=True))] = piece
            content[key] = [((0,) * whole.dim(), whole)]
    made.torch_dist(tmp_path, content, {})
    check(tmp_path, state)


def test_a_part_reads_only_the_chunks_that_it_needs(tmp_path):
    state = made.model("llama")
    step = made.torch_dist(tmp_path, made.keys(state, ranks=2), {})
    key = "decoder.layers.self_attention.linear_qkv.weight"
    places = made.metadata(step).storage_data
    spoilt = next(i for i in places if i.fqn == key and i.offset == (1, 8, 0))
    info = places[spoilt]
    content = bytearray((step / info.relative_path).read_bytes())
    content[info.offset : info.offset + info.length] = bytes(info.length)
    (step / info.relative_path).write_bytes(content)
    weights, name = (
        open_store(tmp_path).weights,
        "decoder.layers.1.self_attention.linear_qkv.weight",
    )
    assert torch.equal(weights.read(name, (slice(0, 8),)), state[name][:8])
    with pytest.raises(CheckpointError):
        weights.read(name, (slice(0, 9),))


def test_what_is_read_belongs_to_the_caller(tmp_path):
    state = made.model("llama")
    made.torch_dist(tmp_path, made.keys(state), {})
    store = open_store(tmp_path)
    for _ in range(2):
        for name, weight in state.items():
            read = store.weights.read(name)
            assert torch.equal(read, weight)
            read.zero_()


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_history_of_fp8_is_told(tmp_path, form):
    state = made.model("llama")
    scales = torch.tensor(list(b"..amax_history_fwd.."), dtype=torch.uint8)
    if form == "torch_dist":
        content = made.keys(state)
        content["decoder.layers.mlp.linear_fc2._extra_state/shard_0_4"] = [scales]
        made.torch_dist(tmp_path, content, {})
    else:
        step = made.rank_files(tmp_path, state, {})
        file = step / "mp_rank_00" / "model_optim_rng.pt"
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(file)
        loaded["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = scales
        torch.save(loaded, file)
    store = check(tmp_path, state)
    assert store.lost_fp8


def test_several_iterations(tmp_path):
    for iteration in (5, 10):
        state = made.model("llama", seed=iteration)
        made.torch_dist(tmp_path, made.keys(state), {}, iteration=iteration)
    assert open_store(tmp_path).iteration == 10
    check(tmp_path / "iter_0000005", made.model("llama", seed=5))
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    latest.write_text("5")
    check(tmp_path, made.model("llama", seed=5))
    latest.write_text("7")
    with pytest.raises(CheckpointError, match="iter_0000010"):
        open_store(tmp_path)
    latest.unlink()
    with pytest.raises(CheckpointError, match="iter_0000010"):
        open_store(tmp_path)


def without(name):
    return lambda step: (step / name).unlink()


def described(**said):
    return lambda step: (step / "metadata.json").write_text(json.dumps(said))


def renamed(step):
    step.rename(step.with_name("iter_0000006"))
    (step.parent / "latest_checkpointed_iteration.txt").write_text("6")


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (described(sharded_backend="zarr", sharded_backend_version=1), "zarr"),
        (described(), "None"),
        (lambda step: (step / "metadata.json").write_text("{"), "JSON"),
        (without("metadata.json"), "metadata.json"),
        (without(".metadata"), ".metadata"),
        (without("__0_1.distcp"), "__0_1.distcp"),
        (renamed, "iteration 5"),
    ],
)
def test_what_is_missing_is_named(tmp_path, spoil, match):
    step = made.torch_dist(tmp_path, made.keys(made.model("llama")), {})
    spoil(step)
    with pytest.raises(CheckpointError, match=match):
        open_store(tmp_path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda c: c.update({"decoder.layers.2.mixer.in_proj.weight": [((0,), torch.ones(2))]}),
            "Mamba",
        ),
        (lambda c: c.pop("decoder.layers.2.self_attention.linear_qkv.weight"), "layer"),
        (
            lambda c: c.update(
                {"decoder.layers.8.mlp.linear_fc2.weight": [((0, 0), torch.ones(2, 2))]}
            ),
            "layer 8",
        ),
    ],
)
def test_other_hybrid_models(tmp_path, change, match):
    content = made.keys(made.model("llama"), form="hybrid")
    for key in [k for k in content if k.startswith("decoder.layers.2.") and "qkv.weight" not in k]:
        if match == "layer":
            del content[key]
    change(content)
    made.torch_dist(tmp_path, content, {})
    with pytest.raises(CheckpointError, match=match):
        open_store(tmp_path)


def test_a_symbol_of_the_hybrid_pattern(tmp_path):
    content = made.keys(made.model("llama"), form="hybrid")
    made.torch_dist(tmp_path, content, {"hybrid_layer_pattern": "*-*-*-M-"})
    with pytest.raises(CheckpointError, match=r"layer 6 .*'M'"):
        open_store(tmp_path)


def test_ranks_that_are_missing(tmp_path):
    step = made.rank_files(tmp_path, made.model("llama"), made.arguments("llama"), tp=2, pp=2)
    (step / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match="tensor rank 1, pipeline rank 1"):
        open_store(tmp_path)


@pytest.mark.parametrize(
    ("args", "sizes", "match"),
    [
        ({"group_query_attention": True, "num_query_groups": 1}, {"tp": 2}, "1 groups"),
        ({"expert_tensor_parallel_size": 1}, {"tp": 2, "ep": 2}, "expert_tensor_parallel_size"),
    ],
)
def test_ranks_that_share_in_another_way(tmp_path, args, sizes, match):
    state = made.model("qwen2-moe", layers=2)
    made.rank_files(tmp_path, state, made.arguments("qwen2-moe", **args), **sizes)
    with pytest.raises(CheckpointError, match=match):
        open_store(tmp_path)


def other_version(content):
    content["checkpoint_version"] = 2.0


def other_iteration(content):
    content["iteration"] = 4


def other_arguments(content):
    content["args"].tensor_model_parallel_size = 4


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (other_version, "checkpoint_version"),
        (other_iteration, "iteration"),
        (lambda content: content.pop("iteration"), "iteration"),
        (other_arguments, "tensor_model_parallel_size"),
    ],
)
def test_ranks_of_several_saves(tmp_path, change, match):
    step = made.rank_files(tmp_path, made.model("llama"), made.arguments("llama"), tp=2, pp=2)
    file = step / "mp_rank_01_001" / "model_optim_rng.pt"
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(file)
    change(content)
    torch.save(content, file)
    with pytest.raises(CheckpointError, match=match):
        open_store(tmp_path)


def test_ranks_that_differ_in_what_they_share(tmp_path):
    step = made.rank_files(tmp_path, made.model("llama"), made.arguments("llama"), tp=2)
    file = step / "mp_rank_01" / "model_optim_rng.pt"
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded = torch.load(file)
    loaded["model"]["decoder.final_layernorm.weight"] += 1
    torch.save(loaded, file)
    weights = open_store(tmp_path).weights
    assert spans_of(weights, "decoder.final_layernorm.weight") is None  # both have to be read
    with pytest.raises(
        CheckpointError, match=r"different values of decoder\.final_layernorm\.weight"
    ):
        weights.read("decoder.final_layernorm.weight")


@pytest.mark.parametrize("folder", sorted(p.name for p in REAL.iterdir() if p.is_dir()))
def test_what_megatron_core_itself_wrote(folder):
    store = open_store(REAL / folder)
    expected = made.read_dcp(store.step_folder)
    assert store.raw.stored.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(store.raw.read(key), value), key
    pairs = 2 if "hybrid" in folder else 1
    for name in store.weights.stored:
        number, rest = made.layer_of(name)
        key = rest.replace("mlp.experts.", "mlp.experts.experts.")
        if number is not None and pairs == 1:
            value = expected[f"decoder.layers.{key}"][number]
        elif number is not None:
            at = 2 * number + ("self_attention" not in key)
            place = f"decoder.layers.{at}."
            norm = key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
            value = expected[place + (key if place + key in expected else norm)]
        else:
            value = expected.get(key, expected.get(key.replace("final_layernorm", "final_norm")))
        assert torch.equal(store.weights.read(name), value), name


class ModelType(enum.Enum):
    encoder_or_decoder = 1


class ModelTypeByName(enum.Enum):
    """As Python 3.11.0 to 3.11.3 write it."""

    encoder_or_decoder = 1

    def __reduce_ex__(self, protocol):
        return getattr, (type(self), self.name)


class MCoreSavePlan(SavePlan):
    pass


class MCoreMetadata(Metadata):
    pass


@pytest.fixture
def of_megatron(monkeypatch):
    """Have classes of this file pickled as Megatron's, whose modules are absent afterwards."""

    @contextlib.contextmanager
    def pickled_as(*kinds):
        with monkeypatch.context() as there:
            names = ["megatron", "megatron.core", "megatron.core.any"]
            for name in names:
                there.setitem(sys.modules, name, types.ModuleType(name))
            for kind in kinds:
                there.setattr(kind, "__module__", names[-1])
                setattr(sys.modules[names[-1]], kind.__name__, kind)
            yield

    return pickled_as


@pytest.mark.parametrize("kind", [ModelType, ModelTypeByName])
@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_arguments_that_are_objects_of_megatron(tmp_path, of_megatron, kind, form):
    """Megatron's training sets ``args.model_type``, an enumeration, before it saves."""
    state = made.model("llama")
    args = made.arguments("llama", model_type=kind.encoder_or_decoder)
    with of_megatron(kind):
        if form == "torch":
            made.rank_files(tmp_path, state, args)
        else:
            made.torch_dist(tmp_path, made.keys(state), args)
    found = check(tmp_path, state).arguments
    assert found["params_dtype"] is torch.float32
    assert isinstance(found["model_type"], Inert)
    assert found["model_type"].kind == f"megatron.core.any.{kind.__name__}"


def test_a_description_of_earlier_versions(tmp_path, of_megatron):
    """0.12 to 0.15 have classes of their own in .metadata, and the plans of all ranks."""
    state = made.model("llama")
    step = made.torch_dist(tmp_path, made.keys(state), {})
    metadata = made.metadata(step)
    with of_megatron(MCoreMetadata, MCoreSavePlan):
        earlier = MCoreMetadata(metadata.state_dict_metadata, storage_data=metadata.storage_data)
        earlier.all_local_plans = [MCoreSavePlan([])]
        earlier.mcore_data = {"any": {"nd_reformulated_orig_global_shape": (2, 3)}}
        content = pickle.dumps(earlier)
    (step / ".metadata").write_bytes(content)
    check(tmp_path, state)
