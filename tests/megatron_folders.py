# SPDX-License-Identifier: Apache-2.0
"""Megatron's checkpoint folders as its ranks would write them, made by plain loops.

torch's own writer makes those of distributed checkpoints. Nothing here uses wavemare.
"""

import argparse
import json
import math
import pickle
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

HIDDEN, HEADS, GROUPS, HEAD, FFN, TOKENS, EXPERTS, EXPERT_FFN, SHARED = 8, 4, 2, 2, 12, 16, 4, 6, 10
FAMILIES = ("gpt2", "llama", "qwen3", "qwen2-moe")


def model(family, layers=4, dtype=torch.float32, seed=0):
    """A model's weights by canonical names."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    state = {"embedding.word_embeddings.weight": make(TOKENS, HIDDEN)}
    gpt2 = family == "gpt2"
    groups = HEADS if gpt2 else GROUPS
    if gpt2:
        state["embedding.position_embeddings.weight"] = make(20, HIDDEN)
    for number in range(layers):
        part = {
            "self_attention.linear_qkv.layer_norm_weight": make(HIDDEN),
            "self_attention.linear_qkv.weight": make((HEADS + 2 * groups) * HEAD, HIDDEN),
            "self_attention.linear_proj.weight": make(HIDDEN, HEADS * HEAD),
            "mlp.linear_fc1.layer_norm_weight": make(HIDDEN),
        }
        if family == "qwen3":
            part["self_attention.q_layernorm.weight"] = make(HEAD)
            part["self_attention.k_layernorm.weight"] = make(HEAD)
        if family == "qwen2-moe":
            part["self_attention.linear_qkv.bias"] = make((HEADS + 2 * groups) * HEAD)
            part["mlp.router.weight"] = make(EXPERTS, HIDDEN)
            part["mlp.experts.linear_fc1.weight"] = make(EXPERTS, 2 * EXPERT_FFN, HIDDEN)
            part["mlp.experts.linear_fc2.weight"] = make(EXPERTS, HIDDEN, EXPERT_FFN)
            part["mlp.shared_experts.linear_fc1.weight"] = make(2 * SHARED, HIDDEN)
            part["mlp.shared_experts.linear_fc2.weight"] = make(HIDDEN, SHARED)
            part["mlp.shared_experts.gate_weight"] = make(1, HIDDEN)
        else:
            part["mlp.linear_fc1.weight"] = make(FFN if gpt2 else 2 * FFN, HIDDEN)
            part["mlp.linear_fc2.weight"] = make(HIDDEN, FFN)
        if gpt2:
            part["self_attention.linear_qkv.layer_norm_bias"] = make(HIDDEN)
            part["self_attention.linear_qkv.bias"] = make(3 * HIDDEN)
            part["self_attention.linear_proj.bias"] = make(HIDDEN)
            part["mlp.linear_fc1.layer_norm_bias"] = make(HIDDEN)
            part["mlp.linear_fc1.bias"] = make(FFN)
            part["mlp.linear_fc2.bias"] = make(HIDDEN)
        state |= {f"decoder.layers.{number}.{name}": weight for name, weight in part.items()}
    state["decoder.final_layernorm.weight"] = make(HIDDEN)
    if gpt2:
        state["decoder.final_layernorm.bias"] = make(HIDDEN)
    else:
        state["output_layer.weight"] = make(TOKENS, HIDDEN)
    return state


def arguments(family, **more):
    """What Megatron keeps of its command line."""
    return {
        "num_layers": 4,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "untie_embeddings_and_output_weights": family != "gpt2",
        "swiglu": family != "gpt2",
        "params_dtype": torch.float32,
        "consumed_train_samples": 40,
        **more,
    }


def layer_of(name):
    """The layer's number and the rest of the name; None outside the layers."""
    if not name.startswith("decoder.layers."):
        return None, name
    _, _, number, rest = name.split(".", 3)
    return int(number), rest


def share(name, weight, rank, ranks, gated):
    """A tensor rank's part of a weight as the rank holds it, and where its pieces belong."""
    axis = weight.dim() - 2 if weight.dim() > 1 else 0
    if any(
        word in name for word in ("layer_norm", "layernorm", "router", "gate_weight", "position")
    ):
        return weight, [((0,) * weight.dim(), weight)]
    if name.endswith(("linear_proj.bias", "linear_fc2.bias")):
        return weight, [((0,) * weight.dim(), weight)]
    if "linear_proj" in name or "linear_fc2" in name:
        axis = weight.dim() - 1
    halves = 2 if gated and "linear_fc1" in name else 1
    rows = weight.shape[axis] // halves // ranks
    pieces = []
    for half in range(halves):
        start = (half * ranks + rank) * rows
        first = [0] * weight.dim()
        first[axis] = start
        pieces.append((tuple(first), weight.narrow(axis, start, rows)))
    return torch.cat([piece for _, piece in pieces], dim=axis), pieces


class _Chunks(DefaultSavePlanner):
    """Saves pieces of tensors, as the ranks of a job together would."""

    def create_local_plan(self):
        items = []
        for key, value in self.state_dict.items():
            if not isinstance(value, list) or not value or not isinstance(value[0], tuple):
                items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
                continue
            dims = range(value[0][1].dim())
            size = [max(first[d] + piece.shape[d] for first, piece in value) for d in dims]
            for number, (first, piece) in enumerate(value):
                chunk = ChunkStorageMetadata(torch.Size(first), piece.shape)
                data = TensorWriteData(chunk, TensorProperties(dtype=piece.dtype), torch.Size(size))
                index = MetadataIndex(key, first, number)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index):
        value = self.state_dict[index.fqn]
        if index.offset is None:
            return value
        return next(p for first, p in value if tuple(first) == tuple(index.offset)).clone()


def write_dcp(step, content):
    """Write tensors, given as lists of (first index, piece), and objects, by torch's writer."""
    planner = _Chunks(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = dcp.FileSystemWriter(step, thread_count=2, sync_files=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, storage_writer=writer, planner=planner, no_dist=True)


def read_dcp(step):
    """The tensors of a folder, by torch's reader."""
    reader = dcp.FileSystemReader(step)
    described = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in described.items()
        if hasattr(each, "size")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def chunks(name, weight, ranks, gated):
    """The pieces of a weight that the tensor ranks, and the ranks of experts, write."""
    if "mlp.experts." in name:
        return [
            ((expert, *first), piece[None])
            for expert in range(EXPERTS)
            for first, piece in chunks(name.replace("experts.", ""), weight[expert], ranks, gated)
        ]
    found = {}
    for rank in range(ranks):
        found |= dict(share(name, weight, rank, ranks, gated)[1])
    return list(found.items())


def keys(state, ranks=1, form="stacked", gated=True):
    """A torch_dist folder's tensors: lists of pieces by key.

    form: "stacked", "numbered", "singleton" (halves and experts have keys of their own) or
    "hybrid" (attention and MLP count as layers).
    """
    content = {}
    for name, weight in state.items():
        number, rest = layer_of(name)
        key = rest.replace("mlp.experts.", "mlp.experts.experts.")
        if is_moe(state) and rest == "mlp.linear_fc1.layer_norm_weight":
            key = "pre_mlp_layernorm.weight"
        pieces = chunks(rest, weight, ranks, gated)
        if number is None:
            key = name.replace("final_layernorm", "final_norm") if form == "hybrid" else name
            content[key] = pieces
        elif form == "stacked":
            added = [((number, *first), piece[None]) for first, piece in pieces]
            content.setdefault(f"decoder.layers.{key}", []).extend(added)
        elif form == "hybrid":
            content[f"decoder.layers.{2 * number + ('self_attention' not in key)}.{key}"] = pieces
        elif form == "singleton" and "linear_fc" in key and "layer_norm" not in key:
            content |= _singletons(f"decoder.layers.{number}.{key}", weight, ranks, gated)
        else:
            content[f"decoder.layers.{number}.{key}"] = pieces
    layers = 1 + max(layer_of(name)[0] or 0 for name in state)
    for number in range(layers) if form == "stacked" else ():
        for linear in ("self_attention.linear_qkv", "mlp.linear_fc1"):
            content[f"decoder.layers.{linear}._extra_state/shard_{number}_{layers}"] = [None]
    return content


def is_moe(state):
    """Whether a model has experts."""
    return any("mlp.router" in name for name in state)


def _singletons(key, weight, ranks, gated):
    found = {}
    own = {key: weight}
    if "experts.experts." in key:
        own = {
            key.replace("experts.experts.", f"experts.experts.{expert}."): weight[expert]
            for expert in range(EXPERTS)
        }
    for place, each in own.items():
        if gated and "linear_fc1" in place:
            for suffix, half in zip("wv", each.chunk(2), strict=True):
                found[f"{place}_{suffix}"] = chunks("linear_fc1.weight", half, ranks, False)
        else:
            found[place] = chunks(place.replace("experts.", ""), each, ranks, False)
    return found


def torch_dist(root, content, args, *, common="file", iteration=5):
    """A torch_dist checkpoint; common is "file" (common.pt) or "object" (0.19)."""
    step = root / f"iter_{iteration:07}"
    step.mkdir(parents=True)
    state = {
        "args": argparse.Namespace(**args),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
    }
    if common == "file":
        torch.save(state, step / "common.pt")
    else:
        content = {**content, "common_state/shard_0_1": [state]}
    write_dcp(step, content)
    described = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (step / "metadata.json").write_text(json.dumps(described))
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return step


def fsdp_dtensor(root, state, args, *, gated=True, iteration=5):
    """What Megatron-FSDP writes: names of modules, halves apart, no metadata.json."""
    tensors = {}
    for name, weight in state.items():
        if "mlp.experts." in name:
            tensors |= {f"module.{name}{expert}": weight[expert] for expert in range(EXPERTS)}
        else:
            tensors[f"module.{name}"] = weight
    for name in [n for n in tensors if gated and ".linear_fc1.weight" in n]:
        for suffix, half in zip("wv", tensors.pop(name).chunk(2), strict=True):
            tensors[f"{name}_{suffix}"] = half.clone()
    content = {
        "model": tensors,
        "optimizer": {"state": {f"module.module.{n}": {"exp_avg": w} for n, w in tensors.items()}},
        "args": argparse.Namespace(**args),
        "iteration": iteration,
        "checkpoint_version": 3.0,
    }
    step = root / f"iter_{iteration:07}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=step, no_dist=True)
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return step


TE = {
    "self_attention.linear_qkv.layer_norm_": "self_attention.linear_qkv.layer_norm_",
    "mlp.linear_fc1.layer_norm_": "mlp.linear_fc1.layer_norm_",
}
LOCAL = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def rank_files(root, state, args, *, tp=1, pp=1, vpp=1, ep=1, spec="local", gated=True):
    """A checkpoint of --ckpt-format torch; a spec of Transformer Engine groups the experts."""
    step = root / "iter_0000005"
    layers = 1 + max(layer_of(name)[0] or 0 for name in state)
    each = layers // pp // vpp
    args = {
        **args,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
    }
    for t in range(tp):
        for p in range(pp):
            for e in range(ep):
                models = []
                for v in range(vpp):
                    chunk = v * pp + p
                    mine = range(chunk * each, (chunk + 1) * each)
                    own = _rank_model(state, t, tp, e, ep, mine, spec, gated)
                    outside = {n: w for n, w in state.items() if layer_of(n)[0] is None}
                    for name, weight in outside.items():
                        last = chunk == pp * vpp - 1
                        if (chunk == 0) if name.startswith("embedding") else last:
                            own[name] = share(name, weight, t, tp, gated)[0]
                    if chunk and last and "output_layer.weight" not in state:
                        word = state["embedding.word_embeddings.weight"]
                        own["output_layer.weight"] = share("word", word, t, tp, gated)[0]
                    models.append({name: weight.clone() for name, weight in own.items()})
                content = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0}
                content |= {"iteration": 5, "optimizer": {"state": {0: torch.ones(3)}}}
                if vpp == 1:
                    content["model"] = models[0]
                else:
                    content |= {f"model{v}": own for v, own in enumerate(models)}
                name = f"mp_rank_{t:02}" + (f"_{p:03}" if pp > 1 else "")
                folder = step / (name + (f"_{e:03}" if ep > 1 else ""))
                folder.mkdir(parents=True)
                torch.save(content, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    return step


def _rank_model(state, t, tp, e, ep, mine, spec, gated):
    own = {}
    for name, weight in state.items():
        number, rest = layer_of(name)
        if number not in mine:
            continue
        place = f"decoder.layers.{number - mine.start}."
        if rest.startswith("mlp.experts."):
            linear = rest.removeprefix("mlp.experts.")
            for local in range(EXPERTS // ep):
                part = share(linear, weight[e * (EXPERTS // ep) + local], t, tp, gated)[0]
                if spec == "te":
                    own[f"{place}mlp.experts.{linear}{local}"] = part
                else:
                    own[f"{place}mlp.experts.local_experts.{local}.{linear}"] = part
            continue
        names = TE if spec == "te" else LOCAL
        if spec == "te" and is_moe(state):
            names = {**TE, "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."}
        told = rest
        for long, short in names.items():
            told = told.replace(long, short)
        own[place + told] = share(rest, weight, t, tp, gated)[0]
        if spec == "te" and "linear_qkv.weight" in rest:
            own[f"{place}self_attention.linear_qkv._extra_state"] = torch.empty(0).byte()
    return own


def legacy(root, state, args, *, tp=1, pp=1, version=3, zipped=True):
    """A checkpoint of Megatron's legacy GPT, whose order of queries depends on the version."""
    step = root / "iter_0000005"
    layers = 1 + max(layer_of(name)[0] or 0 for name in state)
    each = layers // pp
    old = version < 3
    told = {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
        "self_attention.linear_qkv.": f"{'' if old else 'self_'}attention.query_key_value.",
        "self_attention.linear_proj.": f"{'' if old else 'self_'}attention.dense.",
        "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
        "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
    }
    for t in range(tp):
        for p in range(pp):
            layer_part, embedding = {}, {}
            for name, weight in state.items():
                number, rest = layer_of(name)
                part = share(rest, weight, t, tp, False)[0].clone()
                if name.startswith("embedding"):
                    embedding.setdefault(name.split(".")[1], {})["weight"] = part
                elif number is None and p == pp - 1:
                    layer_part[name.removeprefix("decoder.")] = part
                elif number is not None and number // each == p:
                    if "linear_qkv.weight" in rest or "linear_qkv.bias" in rest:
                        part = _old_order(part, HEADS // tp, version)
                    for long, short in told.items():
                        rest = short + rest.removeprefix(long) if rest.startswith(long) else rest
                    layer_part[f"layers.{number - p * each}.{rest}"] = part
            model = {"language_model": {"transformer" if old else "encoder": layer_part}}
            if p == 0:
                model["language_model"]["embedding"] = embedding
            elif p == pp - 1:
                model["word_embeddings_for_head"] = embedding["word_embeddings"]
            content = {"model": model, "iteration": 5, "checkpoint_version": float(version)}
            content |= {"args": argparse.Namespace(**args)} if args else {}
            folder = step / (f"mp_rank_{t:02}" + (f"_{p:03}" if pp > 1 else ""))
            folder.mkdir(parents=True)
            path = folder / "model_optim_rng.pt"
            torch.save(content, path, _use_new_zipfile_serialization=zipped)
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    return step


def _old_order(fused, heads, version):
    """Rows of [head][query, key, value][row] to those of version 0 or 1."""
    if version >= 2:
        return fused
    rows = len(fused) // (3 * heads)
    order = []
    if version == 0:
        for three in range(3):
            for head in range(heads):
                order += [head * 3 * rows + three * rows + row for row in range(rows)]
    else:
        for head in range(heads):
            for row in range(rows):
                order += [head * 3 * rows + three * rows + row for three in range(3)]
    assert sorted(order) == list(range(math.prod(fused.shape[:1])))
    return fused[order]


def metadata(step):
    """The description of a folder that torch wrote."""
    return pickle.loads((step / ".metadata").read_bytes())
