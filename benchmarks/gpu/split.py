# SPDX-License-Identifier: Apache-2.0
"""Part ``split``: what it costs to split the backward pass of a Llama block."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaModel, set_seed

from benchmarks.gpu.request import WHOLE
from benchmarks.gpu.run import skip
from benchmarks.gpu.timing import Scene, make_rows
from benchmarks.ranks import SEED
from benchmarks.run import describe_error
from wavemare.engine.pipe.split_backward import SplitBackward

_SPLIT = "split"
_COMPILED = "-compiled"


class _Width(NamedTuple):
    """Sizes of a block."""

    hidden: int
    inner: int
    heads: int
    key_heads: int
    tokens: int


_WIDTHS = {
    "1B": _Width(2048, 8192, 32, 8, 4096),
    "8B": _Width(4096, 14336, 32, 8, 4096),
}
_TINY_WIDTHS = {"1B": _Width(32, 64, 4, 2, 16), "8B": _Width(64, 128, 4, 2, 16)}


def measure(scene: Scene) -> Iterator[dict[str, Any]]:
    """Yield the rows, of a forward and a backward pass.

    ``split`` computes the gradient of the input, then those of the weights. ``share`` is the part
    of the time that the latter take, and ``kept_bytes`` what is kept for them. Compiled blocks are
    left whole. ``equal`` says whether all gradients of the weights are those of the whole pass of
    the same block, to the last bit.
    """
    for name, width in (_TINY_WIDTHS if scene.job.tiny else _WIDTHS).items():
        case = f"{name}, {width.tokens} tokens"
        systems: dict[str, _Passes] = {}
        for suffix in ("", _COMPILED):
            scene.note(f"{name}{suffix}")
            try:
                block = _Block(scene, width, compiled=bool(suffix))
                pair = {WHOLE: _Passes(scene, block), _SPLIT: _Passes(scene, block, split=True)}
                gradients = [passes.gradients() for passes in pair.values()]
                pair[_SPLIT].equal = all(map(torch.equal, *gradients))
            except Exception as error:  # no compiler, or too little memory
                for system in (WHOLE, _SPLIT):
                    yield skip("split", describe_error(error), case=case, system=system + suffix)
                continue
            systems |= {system + suffix: passes for system, passes in pair.items()}
        samples = scene.rounds(systems)
        own = {system: median(t.device_s for t in times) for system, times in samples.items()}
        split = {system: passes for system, passes in systems.items() if passes.weight_marks}
        shares = {
            system: median(scene.seconds(*marks) for marks in passes.weight_marks) / own[system]
            for system, passes in split.items()
        }
        equal = {system: passes.equal for system, passes in split.items()}
        kept = {system: passes.kept_bytes for system, passes in split.items()}
        yield from make_rows("split", case, samples, share=shares, equal=equal, kept_bytes=kept)


class _Block:
    """A Llama with one block, without an embedding.

    Args:
        scene: Of the part.
        width: Sizes.
        compiled: Whether the block is compiled.

    Attributes:
        module: The model.
        inputs: (1, tokens, hidden).
        gradient: Of the output.
    """

    def __init__(self, scene: Scene, width: _Width, *, compiled: bool) -> None:
        set_seed(SEED)
        config = LlamaConfig(
            vocab_size=1,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
            num_hidden_layers=1,
            hidden_size=width.hidden,
            intermediate_size=width.inner,
            num_attention_heads=width.heads,
            num_key_value_heads=width.key_heads,
            max_position_embeddings=width.tokens,
            use_cache=False,
        )
        dtype = torch.bfloat16 if scene.on_gpu else torch.float32
        kind: Any = LlamaModel
        self.module = kind(config).to(scene.device, dtype)
        if compiled:
            # Without a GPU nothing is to be seen of the compiler's code, and it takes long.
            backend = "inductor" if scene.on_gpu else "aot_eager"
            self.module.layers[0].compile(backend=backend, dynamic=False)
        shape = (1, width.tokens, width.hidden)
        self.inputs = torch.randn(shape, device=scene.device, dtype=dtype, requires_grad=True)
        self.gradient = torch.randn_like(self.inputs)

    def forward(self) -> Tensor:
        """Return (1, tokens, hidden)."""
        self.inputs.grad = None
        output: Tensor = self.module(inputs_embeds=self.inputs).last_hidden_state
        return output


class _Passes:
    """A forward and a backward pass, whole or split; gradients of weights add up.

    Args:
        scene: Of the part.
        block: What is computed.
        split: Whether the backward pass has two parts.

    Attributes:
        weight_marks: Around the second part of the last calls.
        equal: Whether the gradients are the whole pass's.
        kept_bytes: What is kept between the two parts; None before the first call.
    """

    def __init__(self, scene: Scene, block: _Block, *, split: bool = False) -> None:
        self._scene = scene
        self._block = block
        self._splitter = SplitBackward(block.module, direct=True) if split else None
        self.weight_marks: deque[tuple[Any, Any]] = deque(maxlen=scene.job.rounds)
        self.equal = True
        self.kept_bytes: int | None = None

    def __call__(self) -> None:
        """Compute both passes."""
        if self._splitter is None:
            self._block.forward().backward(self._block.gradient)
            return
        with self._splitter.step():
            output = self._block.forward()
            with self._splitter.input_pass(0):
                output.backward(self._block.gradient)
            if self.kept_bytes is None:
                self.kept_bytes = self._splitter.kept_bytes[0]
            begin = self._scene.mark()
            self._splitter.backward_weight(0)
            self.weight_marks.append((begin, self._scene.mark()))

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the weights after one call."""
        self._block.module.zero_grad()
        self()
        weights = self._block.module.parameters()
        return [weight.grad.clone() for weight in weights if weight.grad is not None]
