# SPDX-License-Identifier: Apache-2.0
"""``wavemare.accelerate`` beside accelerate's own, and ``wavemare.hf.patch``."""

import importlib

import accelerate
import torch
import transformers
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DeepSpeedPlugin, DummyOptim
from common import leave, refusal
from hf_common import Rows, plain_model

import wavemare
import wavemare.accelerate


def configuration(section=None):
    values = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    return values if section is None else {**values, "wavemare": section}


def loop(accelerator_class, section=None, rows=2, state=None, **options):
    AcceleratorState._reset_state(reset_partial_state=True)
    if state is not None:
        PartialState(**state)
    config = {**configuration(section), "train_micro_batch_size_per_gpu": rows}
    accelerator = accelerator_class(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        gradient_accumulation_steps=2,
        **options,
    )
    model = plain_model("gpt2")
    transformers.set_seed(3)
    loader = torch.utils.data.DataLoader(Rows("gpt2", 15), batch_size=rows)
    model, optimizer, loader = accelerator.prepare(model, DummyOptim(model.parameters()), loader)
    losses, gathered = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss).mean().item())
        gathered.append(len(accelerator.gather_for_metrics(batch["labels"])))
    engine, state = type(model), accelerator.get_state_dict(model)
    expected = {name: list(weight.shape) for name, weight in plain_model("gpt2").named_parameters()}
    shapes = {name: list(weight.shape) for name, weight in (state or {}).items()}
    return {
        "whole": state and expected.items() <= shapes.items(),
        "class": f"{engine.__module__}.{engine.__name__}",
        "sparse": getattr(model, "sparse", None) is not None,
        "losses": losses,
        "gathered": gathered,
    }


def patched():
    import wavemare.hf

    stock = transformers.trainer.Trainer
    importlib.import_module("wavemare.hf.patch")
    return {
        "trainer": transformers.Trainer is wavemare.hf.Trainer,
        "module": transformers.trainer.Trainer is wavemare.hf.Trainer,
        "derived": issubclass(transformers.Seq2SeqTrainer, wavemare.hf.Trainer),
        "stock": issubclass(wavemare.hf.Trainer, stock) and stock is not wavemare.hf.Trainer,
    }


if __name__ == "__main__":
    wavemare.init_distributed()
    ours = wavemare.accelerate.Accelerator
    auto = {"sparse_collective": {"mode": "auto"}}
    leave(
        {
            "stock": loop(accelerate.Accelerator, state={"cpu": True}),
            "ours": loop(ours),
            "told": loop(ours, cpu=True),
            "told staged": refusal(lambda: loop(ours, {"pipeline": {"stages": 2}}, cpu=True)),
            "late": refusal(lambda: loop(ours, state={})),
            "sparse": loop(ours, auto),
            "pipeline": refusal(lambda: loop(ours, {"pipeline": {"stages": 2}})),
            "waves": refusal(lambda: loop(ours, {"wavelet": {"mode": "sync"}})),
            "tensor": loop(ours, {"tensor_parallel": {"size": 2}}, 4),
            "patched": patched(),
        }
    )
