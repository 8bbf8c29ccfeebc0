# SPDX-License-Identifier: Apache-2.0
"""Train transformers models as pipelines of two stages beside the unsplit models.

Arguments: result folder, a folder for models, a JSON object of models by case.
"""

import gc
import json
import resource
import sys
import weakref
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from common import QUIET, difference, leave, train_plainly, weights_digest
from deepspeed.utils import groups

import wavemare
from wavemare.engine import init_distributed
from wavemare.errors import ModelError
from wavemare.models import save_pretrained, to_pipeline, whole_state_dict

STEPS, ACCUMULATION, MICRO, LENGTH, VOCABULARY, CLIP = 4, 2, 2, 10, 80, 0.1
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(name):
    transformers.set_seed(7)
    if name == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=32,
            n_layer=3,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
            **QUIET,
        )
        return transformers.GPT2LMHeadModel(config)
    if name in ("bert-mlm", "bert-cls"):
        config = transformers.BertConfig(
            **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3
        )
        kind = (
            transformers.BertForMaskedLM
            if name == "bert-mlm"
            else transformers.BertForSequenceClassification
        )
        return kind(config)
    config = transformers.Qwen3Config(
        **SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=name == "qwen3"
    )
    return transformers.Qwen3ForCausalLM(config)


def batches(name):
    generator = torch.Generator().manual_seed(13)
    result = []
    for _ in range(STEPS * ACCUMULATION):
        ids = torch.randint(3, VOCABULARY, (MICRO, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, -3:] = 0
        labels = ids.clone() if name != "bert-cls" else ids[:, 0] % 3
        result.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return result


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=5e-3)


def start(module, **changes):
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "steps_per_print": None,
        **changes,
    }
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer(list(module.parameters())), config=config
    )
    return engine


def build_untied(name):
    """The model with a head of its own, by the means of PyTorch alone."""
    model = build(name)
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    return model


def train_whole(name, make=build):
    """The unsplit model under plain PyTorch: losses, gradient norms, weights."""
    model = make(name).train()
    adam = optimizer(model.parameters())
    data = iter(batches(name))
    losses, norms = train_plainly(
        model, adam, data, steps=STEPS, micro_batches=ACCUMULATION, clip=CLIP
    )
    return losses, norms, model.state_dict()


def train_pipeline(engine, name):
    data = iter([engine.module.split_batch(batch) for batch in batches(name)])
    return [engine.train_batch(data).item() for _ in range(STEPS)]


def tied_copies_equal(module):
    """Compare each tied weight with its first owner's."""
    equal = True
    for weight, group in module.get_tied_weights_and_groups():
        first = weight.detach().clone()
        torch.distributed.broadcast(first, src=0, group=group)
        equal = equal and torch.equal(first, weight.detach())
    return equal


def train(folder, name, **options):
    settings = options.pop("config", {})
    module = to_pipeline(build(name), num_stages=2, **options)
    make = build_untied if options.get("untie") else build
    engine = start(module, **settings)
    losses = train_pipeline(engine, name)
    weights = whole_state_dict(engine)
    result = {
        "losses": losses,
        "stage": module.stage_id,
        "own": sum(p.numel() for p in module.parameters()),
        "whole": sum(p.numel() for p in build(name).parameters()),
        "tied": len(module.tied_comms),
        "tied_equal": tied_copies_equal(module),
        "gathered": weights is not None,
        "counted": module.num_parameters - sum(p.numel() for p in make(name).parameters()),
        "untied": dict(module.untied),
        "copies": [tuple(p.shape) for p in module.untied_parameters().values()],
        "replicated": sum(getattr(p, "ds_pipe_replicated", False) for p in module.parameters()),
    }
    if weights is not None:
        expected, norms, state = train_whole(name, make)
        result |= {"expected": expected, "norms": norms, "difference": difference(weights, state)}
        result["apart"] = [
            float((weights[copy] - weights[source]).abs().max())
            for copy, source in module.untied.items()
        ]
    return result


def save_untouched(folder, name):
    if torch.distributed.get_rank() == 0:
        build(name).save_pretrained(folder / "theirs")
    torch.distributed.barrier()
    model = type(build(name)).from_pretrained(folder / "theirs")
    engine = start(to_pipeline(model, num_stages=2))
    save_pretrained(engine, folder / "ours")
    return {}


def untied_engine(name):
    module = to_pipeline(build(name), num_stages=2, untie=True)
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage": 1},
        "steps_per_print": None,
    }
    return wavemare.initialize(
        model=module, optimizer=optimizer(list(module.parameters())), config=config
    )[0]


def second_half(engine, name):
    data = [engine.module.split_batch(batch) for batch in batches(name)]
    rest = iter(data[STEPS // 2 * ACCUMULATION :])
    return [engine.train_batch(rest).item() for _ in range(STEPS // 2)]


def save_untied(folder, name):
    """Train half of the steps, save a checkpoint and the model, train the rest."""
    engine = untied_engine(name)
    data = iter([engine.module.split_batch(batch) for batch in batches(name)])
    for _ in range(STEPS // 2):
        engine.train_batch(data)
    digest = weights_digest(engine)
    engine.save_checkpoint(str(folder / "checkpoint"), tag="half")
    save_pretrained(engine, folder / "model")
    return {"digest": digest, "losses": second_half(engine, name)}


def load_untied(folder, name):
    """Load what :func:`save_untied` left and train the rest."""
    engine = untied_engine(name)
    fresh = weights_digest(engine)
    engine.load_checkpoint(str(folder / "checkpoint"), tag="half")
    digest = weights_digest(engine)
    return {"fresh": fresh, "digest": digest, "losses": second_half(engine, name)}


def zero(folder, name):
    """Save plain engines of all ZeRO stages, untouched and after a step."""
    differences = []
    for stage in range(4):
        engine = start(build(name), zero_optimization={"stage": stage})
        save_pretrained(engine, folder / f"untouched_{stage}")
        batch = batches(name)[0]
        for _ in range(ACCUMULATION):
            engine.backward(engine(**batch).loss)
            engine.step()
        save_pretrained(engine, folder / f"trained_{stage}")
        loaded = type(engine.module).from_pretrained(folder / f"trained_{stage}")
        differences.append(difference(loaded.state_dict(), build(name).state_dict()))
    if torch.distributed.get_rank() == 0:
        build(name).save_pretrained(folder / "theirs")
    return {"moved": differences}


def memory(folder, name, **options):
    """Which parameters live on when the caller has dropped the model."""
    gc.collect()
    before = count_vocabularies()
    model = build(name)
    alive = [weakref.ref(parameter) for parameter in model.parameters()]
    module = to_pipeline(model, num_stages=2, **options)
    del model
    gc.collect()
    kept = {id(parameter()) for parameter in alive if parameter() is not None}
    return {
        "kept": len(kept),
        "own": len(list(module.parameters())),
        "whole": len(alive),
        "vocabularies": count_vocabularies() - before,
    }


def count_vocabularies():
    """Return how many weights there are with a row for each token; not those kept for saving."""
    return sum(
        isinstance(thing, torch.nn.Parameter)
        and thing.shape[0] == VOCABULARY
        and thing.ndim == 2
        and not thing.is_meta
        for thing in gc.get_objects()
    )


def half(folder, name):
    """Train and save in bfloat16."""
    engine = start(to_pipeline(build(name), num_stages=2), bf16={"enabled": True})
    losses = train_pipeline(engine, name)
    save_pretrained(engine, folder / "half")
    loaded = type(build(name)).from_pretrained(folder / "half")
    weights = whole_state_dict(engine)
    result = {"losses": losses, "tied_equal": tied_copies_equal(engine.module)}
    if weights is not None:
        result |= {
            "type": str(loaded.dtype),
            "difference": difference(weights, loaded.state_dict()),
            "expected": train_whole(name)[0],
        }
    return result


def failure(folder, name):
    """Rank 0 cannot write: all ranks learn of it."""
    module = to_pipeline(build(name), num_stages=2)
    (folder / "occupied").touch()
    torch.distributed.barrier()
    errors = []
    for place in (folder / "occupied", folder / "small"):
        if place.name == "small":  # the disk: safetensors has an error of its own for it
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
        try:
            save_pretrained(module, place)
        except ModelError as error:
            errors.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    return {"errors": errors}


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    init_distributed()
    reentrant = {"pipeline": {"activation_checkpoint_interval": 1}}
    plain = {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": False}}
    cases = {
        "train": train,
        "train-reentrant": lambda f, n: train(f, n, config=reentrant),
        "train-non-reentrant": lambda f, n: train(f, n, config=plain),
        "train-untied": lambda f, n: train(f, n, untie=True),
        "train-zero1": lambda f, n: train(f, n, config={"zero_optimization": {"stage": 1}}),
        "save": save_untouched,
        "save-untied": save_untied,
        "load-untied": load_untied,
        "zero": zero,
        "failure": failure,
        "memory": memory,
        "memory-untied": lambda f, n: memory(f, n, untie=True),
        "half": half,
    }
    results: dict[str, Any] = {}
    for case, names in json.loads(sys.argv[3]).items():
        groups.mpu = None  # that of the engine before
        for name in names:
            place = folder / case.removeprefix("save-").removeprefix("load-") / name
            place.mkdir(exist_ok=True, parents=True)
            results.setdefault(case, {})[name] = cases[case](place, name)
    leave(results)
