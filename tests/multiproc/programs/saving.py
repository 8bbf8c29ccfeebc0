# SPDX-License-Identifier: Apache-2.0
"""Save and use a model that the Trainer has trained, in every public way, beside one process.

Usage: saving.py FOLDER LAYOUT/KIND...; each rank leaves what each way gave, by cell.

All weights are doubled after the training (those that the second replica trains made four times as
large), which no rounding disturbs: what one process holds then is known to the bit, and what was
not trained, or not gathered, is seen.
"""

import copy
import gc
import json
import os
import runpy
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

import deepspeed
import huggingface_hub
import peft
import torch
import transformers
from common import (
    VOCABULARY,
    build_gpt2,
    build_moe,
    configuration,
    leave,
    own_groups,
    refusal,
    token_batches,
)
from deepspeed.profiling.flops_profiler import FlopsProfiler
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from hf_common import arguments, json_file
from safetensors.torch import load_file
from torch import distributed as dist
from torch.nn.utils import prune
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import wavemare
import wavemare.hf
from wavemare.engine.launch.group import gather
from wavemare.errors import ConfigError, WavemareError
from wavemare.megatron import load_hf, save_megatron
from wavemare.models import whole_state_dict

huggingface_hub.constants.HF_HUB_OFFLINE = True
FACTOR = 2.0
EXPERTS = {
    "enabled": True,
    "autoep_size": 2,
    "preset_model": "mixtral",
    "use_grouped_mm": False,
}
LAYOUTS = {
    **{f"zero{stage}": {"zero": stage, "section": {}} for stage in range(4)},
    "stock zero3": {"zero": 3},
    "waves": {"section": {"wavelet": {"mode": "sync"}}},
    "local steps": {"section": {"local_steps": {"mode": "average", "every": 1, "replica": "rank"}}},
    "local steps zero1": {
        "zero": 1,
        "section": {"local_steps": {"mode": "average", "every": 1, "replica": "rank"}},
    },
    "tensor": {"section": {"tensor_parallel": {"size": 2}}},
    "tensor zero1": {"zero": 1, "section": {"tensor_parallel": {"size": 2}}},
    "tensor zero3": {"zero": 3, "section": {"tensor_parallel": {"size": 2}}},
    "experts": {"section": {"expert_parallel": {"size": 2}}, "moe": "mixtral"},
    "experts zero1": {"zero": 1, "section": {"expert_parallel": {"size": 2}}, "moe": "mixtral"},
    **{
        f"tensor experts{f' zero{zero}' * bool(zero)}": {
            "zero": zero,
            "section": {"tensor_parallel": {"size": 2}, "expert_parallel": {"size": 2}},
            "moe": "mixtral",
        }
        for zero in (0, 1)
    },
    "experts zero3": {"zero": 3, "section": {"expert_parallel": {"size": 2}}, "moe": "mixtral"},
    "their experts": {"zero": 1, "config": {"expert_parallel": EXPERTS}, "moe": "mixtral"},
    "their experts of qwen2": {
        "config": {"expert_parallel": {**EXPERTS, "preset_model": "qwen2_moe"}},
        "moe": "qwen2_moe",
    },
    **{
        f"{schedule}{f' zero{zero}' * bool(zero)}": {
            "zero": zero,
            "section": {"pipeline": {"stages": 2, "schedule": schedule}},
        }
        for schedule in ("1f1b", "zb-h1", "zbv", "pipemare")
        for zero in (0, 1)
    },
    "1f1b experts": {
        "section": {"pipeline": {"stages": 2}, "expert_parallel": {"size": 2}},
        "moe": "mixtral",
    },
    "1f1b tensor": {"section": {"pipeline": {"stages": 2}, "tensor_parallel": {"size": 2}}},
}


def dense():
    transformers.set_seed(7)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    return transformers.Qwen3ForCausalLM(config)


def adapted(base, *names, init=False):
    target, transformers_seed = ["q_proj", "v_proj", "o_proj"], 3
    transformers.set_seed(transformers_seed)
    options = {"r": 4, "target_modules": target, "init_lora_weights": init}
    first, *others = names or ("default",)
    model = peft.get_peft_model(base, peft.LoraConfig(**options), adapter_name=first)
    for name in others:
        model.add_adapter(name, peft.LoraConfig(**options))
    return model


UNREADABLE = {
    *("their experts", "tensor zero1", "tensor zero3"),
    *(f"{name} zero1" for name in ("1f1b", "zb-h1", "zbv", "pipemare")),
}
"""Layouts of whose files DeepSpeed's function has an error of its own."""
KINDS = {
    "whole": lambda base: base,
    "lora": adapted,
    "named": lambda base: adapted(base, "adapter_mine"),
    "two": lambda base: adapted(base, "default", "second"),
    "pissa": partial(adapted, init="pissa"),
    "olora": partial(adapted, init="olora"),
    "dora": lambda base: peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    ),
}


def build(layout, kind):
    experts = LAYOUTS[layout].get("moe")
    return KINDS[kind](build_moe(experts) if experts else dense())


def alone(layout, kind):
    """Return the model of one process after the same steps."""
    model = build(layout, kind).eval()
    mean = 3.0 if layout.startswith("local steps") else FACTOR
    for parameter in model.parameters():
        parameter.data.mul_(mean if parameter.requires_grad else FACTOR)
    return model


def trained(layout, kind):
    """Return a Trainer after a step with learning rate 0, whose weights were doubled then."""
    keys = LAYOUTS[layout]
    stage = {"stage": keys.get("zero", 0), "stage3_param_persistence_threshold": 0}
    config = json_file(0, keys.get("section"), zero_optimization=stage, **keys.get("config", {}))
    tokens = next(token_batches(0)).cpu()
    trainer = wavemare.hf.Trainer(
        model=build(layout, kind),
        args=arguments("run", config, max_steps=1, learning_rate=0.0, weight_decay=0.0),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens] * 8,
    )
    trainer.train()
    engine = trainer.deepspeed
    engine.drain()
    apart = layout.startswith("local steps") and engine.replica
    for parameter in engine.module.parameters():
        factor = FACTOR * (2 if apart and parameter.requires_grad else 1)
        getattr(parameter, "ds_tensor", parameter).data.mul_(factor)
    getattr(engine.optimizer, "refresh_fp32_params", lambda: None)()
    return trainer


# --- ways -----------------------------------------------------------------------------------------


class Ways:
    """The ways, each a method; a result of None is that of a rank that gets nothing.

    A folder is a `Path`, weights are a mapping, anything else is compared with the same of one
    process.
    """

    def __init__(self, trainer, folder):
        self.trainer, self.folder = trainer, folder
        self.engine, self.model = trainer.deepspeed, trainer.model
        self.accelerator = trainer.accelerator

    def engine_save_pretrained(self):
        return self._by_itself(self.engine)

    def module_save_pretrained(self):
        return self._by_itself(self.engine.module)

    def model_save_pretrained(self):
        return self._by_itself(self.model)

    def unwrapped_save_pretrained(self):
        return self._by_itself(self.accelerator.unwrap_model(self.engine))

    def base_save_pretrained(self):
        """Of the transformers model inside an adapted one."""
        base = self.model.get_base_model()
        base.save_pretrained(self.folder, is_main_process=self._first)
        return self.folder

    def engine_state_dict(self):
        state = self.engine.state_dict()
        return {name.removeprefix("module."): weight for name, weight in state.items()}

    def module_state_dict(self):
        return self.engine.module.state_dict()

    def model_state_dict(self):
        return self.model.state_dict()

    def push_to_hub(self):
        return self._pushed(self.model)

    def push_to_hub_of_trainer(self):
        try:
            self.trainer.push_to_hub()
        except (huggingface_hub.errors.OfflineModeIsEnabled, ConfigError):
            return "offline"

    def module_push_to_hub(self):
        return self._pushed(self.engine.module)

    def save_pretrained_of_engine(self):
        wavemare.save_pretrained(self.engine, self.folder)
        return self.folder

    def save_pretrained_of_module(self):
        wavemare.save_pretrained(self.engine.module, self.folder)
        return self.folder

    def save_pretrained_of_model(self):
        wavemare.save_pretrained(self.model, self.folder)
        return self.folder

    def save_pretrained_twice(self):
        for _ in range(2):
            wavemare.save_pretrained(self.engine, self.folder)
        return self.folder

    def merged(self):
        wavemare.save_pretrained(self.engine, self.folder, merge=True)
        return self.folder

    def save_megatron(self):
        save_megatron(self.engine, self.folder, iteration=3)
        dist.barrier()
        return load_hf(self.folder).state_dict()

    def save_model_of_trainer(self):
        self.trainer.save_model(str(self.folder))
        return self.folder

    def save_model_of_trainer_twice(self):
        self.trainer.save_model(str(self.folder))
        return self.save_model_of_trainer()

    def save_16bit_model(self):
        assert self.engine.save_16bit_model(str(self.folder))
        return self._from_file("pytorch_model.bin")

    def get_state_dict(self):
        return self.accelerator.get_state_dict(self.engine)

    def get_state_dict_of_model(self):
        return self.accelerator.get_state_dict(self.model)

    def save_model_of_accelerator(self):
        self.accelerator.save_model(self.engine, self.folder)
        return self._from_file("model.safetensors")

    def unwrapped_with_state(self):
        state = self.accelerator.get_state_dict(self.engine)
        main = self.accelerator.is_main_process
        unwrapped = self.accelerator.unwrap_model(self.engine)
        unwrapped.save_pretrained(self.folder, is_main_process=main, state_dict=state)
        return self.folder

    def zero_to_fp32(self):
        self.engine.save_checkpoint(str(self.folder))
        if not self._first:
            return None
        script = runpy.run_path(str(self.folder / "zero_to_fp32.py"))
        return script["get_fp32_state_dict_from_zero_checkpoint"](str(self.folder))

    def zero_to_fp32_of_deepspeed(self):
        self.engine.save_checkpoint(str(self.folder))
        if not self._first:
            return None
        return get_fp32_state_dict_from_zero_checkpoint(str(self.folder))

    def deepcopy(self):
        return copy.deepcopy(self.model).state_dict()

    def forward(self):
        with torch.no_grad():
            return self.model.eval()(next(token_batches(1))).logits

    def generate(self):
        return self.model.eval().generate(
            input_ids=next(token_batches(1))[:, :4], max_new_tokens=4, do_sample=False
        )

    def engine_generate(self):
        self.engine.module.eval()
        return self.engine.generate(
            input_ids=next(token_batches(1))[:, :4], max_new_tokens=4, do_sample=False
        )

    def set_embeddings(self):
        self.model.set_input_embeddings(self.model.get_input_embeddings())
        return str(self.model.get_input_embeddings().num_embeddings)

    def resize_embeddings(self):
        return str(self.model.resize_token_embeddings(VOCABULARY).num_embeddings)

    def forward_hook(self):
        self.model.register_forward_hook(lambda *_: None).remove()
        return "registered"

    def backward_hook(self):
        self.model.register_full_backward_hook(lambda *_: None).remove()
        return "registered"

    @property
    def _first(self):
        return dist.get_rank() == 0

    def _by_itself(self, model):
        model.save_pretrained(self.folder / str(dist.get_rank()))
        return self.folder / "0"

    def _pushed(self, model):
        try:
            model.push_to_hub("nobody/nothing")
        except huggingface_hub.errors.OfflineModeIsEnabled:
            return "offline"

    def _from_file(self, name):
        dist.barrier()
        file = self.folder / name
        return torch.load(file) if name.endswith(".bin") else load_file(file)


WAYS = [name for name in vars(Ways) if not name.startswith("_")]
_FP32 = ("zero_to_fp32", "zero_to_fp32_of_deepspeed")
_FILES = ("save_16bit_model", "save_model_of_accelerator", "save_megatron", *_FP32)
_OF_ADAPTERS = ("merged", "base_save_pretrained")


def expected(way, layout, kind, folder):
    """Return what a way gives in one process."""
    model, ids = alone(layout, kind), next(token_batches(1)).cpu()
    if "push" in way:
        return "offline"
    if way == "forward":
        with torch.no_grad():
            return model(ids).logits
    if "embeddings" in way or "hook" in way:
        return str(VOCABULARY) if "embeddings" in way else "registered"
    if "generate" in way:
        return model.generate(input_ids=ids[:, :4], max_new_tokens=4, do_sample=False)
    if way in _FILES or "state_dict" in way or way == "deepcopy":
        return model.state_dict()
    if way == "merged":
        model = model.merge_and_unload(safe_merge=True)
    saved = model.get_base_model() if way == "base_save_pretrained" else model
    saved.save_pretrained(folder)
    return folder


def contents(folder):
    """Return the files of a model's folder that say what it computes, by their names."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    left = {"README.md", "training_args.bin", "generation_config.json"}
    found = {str(p.relative_to(folder)): p.read_bytes() for p in files if p.name not in left}
    for name, content in found.items():
        if name.endswith("adapter_config.json"):  # peft writes sets as lists, in any order
            config = json.loads(content)
            config["target_modules"].sort()
            found[name] = json.dumps(config).encode()
    if "config.json" in found:  # the Trainer writes into a model's own configuration
        config = json.loads(found["config.json"])
        del config["use_cache"]
        found["config.json"] = json.dumps(config).encode()
    return found


def difference(ours, theirs):
    """Say how two results differ; an empty text if they do not."""
    if isinstance(theirs, Path):
        ours, theirs = contents(ours), contents(theirs)
        differing = [n for n in sorted({*ours, *theirs}) if ours.get(n) != theirs.get(n)]
    elif isinstance(theirs, dict):
        ours = {n: w.cpu() for n, w in ours.items()}
        differing = [
            n
            for n in sorted({*ours, *theirs})
            if n not in ours or n not in theirs or not torch.equal(ours[n], theirs[n].cpu())
        ]
    elif isinstance(theirs, torch.Tensor) and theirs.is_floating_point():
        # Split layers add in another order, and doubled weights make it larger.
        limit = 2e-5 * float(theirs.abs().max())
        same = ours.shape == theirs.shape and torch.allclose(ours.cpu(), theirs, 0.0, limit)
        differing = [] if same else ["logits"]
    elif isinstance(theirs, torch.Tensor):
        differing = [] if torch.equal(ours.cpu(), theirs) else ["tokens"]
    else:
        differing = [] if ours == theirs else [str(ours)]
    return f"{len(differing)} differ, such as {differing[0]}" if differing else ""


def tried(way, ways, cell, folder):
    """Return what a way gave on this rank: ``equal``, ``nothing``, an error, or a difference."""
    try:
        found = getattr(ways, way)()
    except (WavemareError, SystemExit) as error:
        return f"refused {type(error).__name__}: {error}"
    except Exception as error:
        with open(f"{sys.argv[1]}/errors.{dist.get_rank()}", "a") as file:
            file.write(f"{cell} {way}\n{traceback.format_exc()}\n")
        return f"raised {type(error).__name__}: {error}"[:300]
    if found is None:
        return "nothing"
    if isinstance(found, Path) and dist.get_rank():
        return "nothing"
    return difference(found, expected(way, *cell.split("/"), folder)) or "equal"


def results_of(cell, chosen):
    layout, kind = cell.split("/")
    try:
        trainer = trained(layout, kind)
    except WavemareError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    found = {}
    for way in chosen:
        if way in _OF_ADAPTERS and kind == "whole":
            continue
        zero = LAYOUTS[layout].get("zero", 0)
        if way in _FP32 and not zero:
            continue
        if way == _FP32[1] and (layout in UNREADABLE or (kind != "whole" and zero < 3)):
            continue
        folder = Path(sys.argv[1], "saved", cell.replace("/", "-"), way)
        folder.mkdir(parents=True, exist_ok=True)
        alone = folder / f"one-{dist.get_rank()}"
        found[way] = tried(way, Ways(trainer, folder / "ours"), cell, alone)
        dist.barrier()
    trainer.deepspeed.destroy()
    unset_hf_deepspeed_config()  # ZeRO 3 would cut what is built next
    del trainer
    gc.collect()
    return found


# --- other uses -----------------------------------------------------------------------------------


def engine_of(model, **section):
    config = configuration(0, wavemare=section)
    return wavemare.initialize(model=model, config=config)[0]


def again():
    """Give a model that an engine has cut to others; return what they say."""

    def cut(model, *starts):
        with own_groups():
            engine_of(model, pipeline={"stages": 2, "partition": list(starts)}).destroy()

    model = dense()
    cut(model, 0, 2)
    found = {"called": refusal(lambda: model(next(token_batches(0))))}
    found["same cuts"] = refusal(lambda: cut(model, 0, 2))
    found["other cuts"] = refusal(lambda: cut(model, 0, 1))
    found["no stages"] = refusal(lambda: engine_of(model))
    return found | {"called again": refusal(lambda: model(next(token_batches(0))))}


def unlike_lengths():
    """Generate texts whose lengths differ by rank, with experts that the ranks share."""
    model, rank = build_moe(), dist.get_rank()
    options = {"input_ids": next(token_batches(rank))[:, :4], "do_sample": False}
    expected = model.generate(**options, max_new_tokens=2 + 4 * rank)
    engine = engine_of(model, expert_parallel={"size": 2})
    found = engine.module.eval().generate(**options, max_new_tokens=2 + 4 * rank)
    engine.destroy()
    return found.tolist() == expected.tolist()


class Wrapper(torch.nn.Module):
    """Holds a transformers model."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, ids):
        return self.inner(input_ids=ids).logits


def inside():
    """Train modules that hold a transformers model: a layer of a pipeline, and one under ZeRO 3."""
    ids = next(token_batches(0))
    expected = {f"inner.{name}": weight for name, weight in dense().state_dict().items()}
    with own_groups():
        layers = [Wrapper(dense()), torch.nn.Linear(VOCABULARY, 3)]
        module = deepspeed.PipelineModule(layers, num_stages=2, loss_fn=lambda out, _: out.sum())
        engine = engine_of(module, pipeline={})
        found = {"loss": float(engine.train_batch(iter([(ids, ids)] * 2)))}
        found["folder"] = refusal(lambda: wavemare.save_pretrained(engine, "folder"))
        engine.save_16bit_model("stages")
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, engine.module.state_dict())
        found["pipeline"] = difference(torch.load("stages/pytorch_model.bin"), parts[0] | parts[1])
        engine.destroy()
    stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
    stage["stage3_gather_16bit_weights_on_model_save"] = True
    config = configuration(0, wavemare={}, zero_optimization=stage)
    engine = wavemare.initialize(model=Wrapper(dense()), config=config)[0]
    found["state"] = refusal(engine.module.state_dict)
    gathered = whole_state_dict(engine)
    found["whole"] = difference(expected if gathered is None else gathered, expected)
    engine.save_16bit_model("inside")
    dist.barrier()
    engine.destroy()
    return found | {"saved": difference(torch.load("inside/pytorch_model.bin"), expected)}


HOOKED = (
    ("lm_head", "transformer.h", "transformer.ln_f"),
    ("lm_head", "transformer.h.1", "transformer.h.1.mlp.c_fc", "transformer.h.1.mlp.act"),
)
"""Modules of pipelines, and of split models."""


def _profile(engine):
    """Let DeepSpeed's profiler register hooks of its own on all modules, and take them away."""
    profiler = FlopsProfiler(engine.module)
    profiler.start_profile()
    profiler.end_profile()


def hooks():
    """Register hooks of all kinds after initialize; return what the ways say, and which ran."""
    found = {}
    for layout in ("1f1b", "zbv", "pipemare", "tensor"):
        model, ran = build_gpt2(n_layer=4), []

        def run(*_, ran=ran):
            ran.append(1)

        with own_groups():
            engine = engine_of(model, **LAYOUTS[layout]["section"])
            for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
                for name in HOOKED[layout == "tensor"]:
                    register = getattr(model.get_submodule(name), f"register_{kind}_hook")
                    said = refusal(lambda register=register: register(run).remove())
                    found[f"{layout} {name} {kind}"] = said.partition(":")[0]
            if layout == "tensor":
                for kind in ("register_hook", "register_post_accumulate_grad_hook"):
                    for name in ("transformer.ln_f.weight", "transformer.h.1.mlp.c_fc.weight"):
                        register = getattr(model.get_parameter(name), kind)
                        said = refusal(lambda register=register: register(run).remove())
                        found[f"{layout} {name} {kind}"] = said.partition(":")[0]
                _profile(engine)
                model.transformer.ln_f.register_forward_hook(run)
                engine(input_ids=next(token_batches(1)))
            else:
                with suppress(WavemareError):
                    model.lm_head.register_forward_hook(run)
                model.transformer.ln_f.register_forward_hook(run)  # beside it
                engine.train_batch({"input_ids": ids, "labels": ids} for ids in token_batches(1))
            found[f"{layout} ran"] = sum(gather(len(ran)))
            engine.destroy()
    return found


def changed():
    """Change after initialize what no stage calls; return what each says, and of what goes on."""
    found = {}
    for name, change in CHANGES.items():
        model = build_gpt2(n_layer=4)
        with own_groups():
            engine = engine_of(model, **LAYOUTS["1f1b"]["section"])
            data = ({"input_ids": ids, "labels": ids} for ids in token_batches(1))
            engine.train_batch(data)
            change(model)
            for way in (engine.train_batch, engine.eval_batch):
                said = refusal(lambda way=way: way(data))  # noqa: B023
                found[f"{name} {way.__name__}"] = said.partition(" ")[0].rstrip(":")
            said = refusal(lambda: whole_state_dict(engine))  # noqa: B023
            found[f"{name} saved"] = said.partition(" ")[0].rstrip(":")
            engine.destroy()
    return found


def _shorten(model):
    model.transformer.h = model.transformer.h[:2]


def _replace_block(model):
    model.transformer.h[0] = copy.deepcopy(model.transformer.h[0])


def _new_forward(module):
    module.forward = type(module).forward.__get__(module)


CHANGES = {
    "nothing": lambda model: None,
    "shorter": _shorten,
    "block": _replace_block,
    "head": lambda model: _new_forward(model.lm_head),
    "model": _new_forward,
    "called": lambda model: _new_forward(model.transformer.ln_f),  # which the last stage calls
    "pruned": lambda model: prune.random_unstructured(model.transformer.h[3].ln_1, "weight", 0.5),
}
OTHERS = {
    "again": again,
    "changed": changed,
    "inside": inside,
    "unlike lengths": unlike_lengths,
    "hooks": hooks,
}

if __name__ == "__main__":
    wavemare.init_distributed()
    os.chdir(sys.argv[1])
    with suppress(FileNotFoundError):
        os.remove(f"errors.{os.environ['RANK']}")
    words = sys.argv[2:]
    chosen = [word for word in words if word in WAYS] or WAYS
    found = {cell: results_of(cell, chosen) for cell in words if "/" in cell}
    leave(found | {name: OTHERS[name]() for name in words if name in OTHERS})
