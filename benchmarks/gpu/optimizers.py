# SPDX-License-Identifier: Apache-2.0
"""Part ``optimizers``: the share of a step that Muon and SOAP take, at few and at many tokens."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.request import ADAMW
from benchmarks.gpu.run import skip
from benchmarks.gpu.step import GPT_124M, TINY_GPT, autocast_gpt, random_batch
from benchmarks.gpu.timing import Scene, Times, make_rows
from benchmarks.run import describe_error
from wavemare.engine.optim.optimizers import muon_groups
from wavemare.pipeline.optim.soap_muon import SOAP, Muon

_RATE = 1e-6
_MICRO_BATCHES = (1, 8)


def measure(scene: Scene) -> Iterator[dict[str, Any]]:
    """Yield the rows.

    The passes of a micro-batch and the optimizers' steps are timed apart. SOAP's bases are
    refreshed once in ten steps: a round is ten steps of each optimizer. ``optimizer_s`` is of one
    step, ``share`` its part of ``median_s``, the whole step.
    """
    size = TINY_GPT if scene.job.tiny else GPT_124M
    model, batch = autocast_gpt(scene, size), random_batch(size, scene.device)
    weights = list(model.parameters())
    soap = SOAP(weights, lr=_RATE)
    steps = int(soap.defaults["refresh"])
    optimizers: dict[str, torch.optim.Optimizer] = {
        ADAMW: torch.optim.AdamW(weights, lr=_RATE, fused=scene.on_gpu),
        "Muon": Muon(list(muon_groups(model, weights, {})), lr=_RATE),
        "SOAP": soap,
    }

    def passes() -> None:
        model.zero_grad()
        model(**batch).loss.backward()

    def ten_steps(optimizer: torch.optim.Optimizer) -> None:
        for _ in range(steps):
            optimizer.step()

    passes()
    tokens = size.batch * size.sequence
    for name, optimizer in list(optimizers.items()):
        try:
            ten_steps(optimizer)
        except Exception as error:  # a solver may be missing, or memory
            del optimizers[name]
            yield skip("optimizers", describe_error(error), system=name)
    compute = scene.rounds({"passes": passes})["passes"]
    systems = {name: lambda each=each: ten_steps(each) for name, each in optimizers.items()}
    stepped = scene.rounds(systems, number=steps)
    passes_s = Times(*(median(values) for values in zip(*compute, strict=True)))
    for count in _MICRO_BATCHES:
        samples = {
            name: [
                Times(t.device_s + count * passes_s.device_s, t.host_s + count * passes_s.host_s)
                for t in rounds
            ]
            for name, rounds in stepped.items()
        }
        own_s = {name: median(t.device_s for t in rounds) for name, rounds in stepped.items()}
        share = {name: own_s[name] / median(t.device_s for t in samples[name]) for name in own_s}
        case = f"{count * tokens} tokens"
        yield from make_rows("optimizers", case, samples, optimizer_s=own_s, share=share)
