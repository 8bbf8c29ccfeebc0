# SPDX-License-Identifier: Apache-2.0
"""Linear layers and vocabularies of which each rank holds a part, and the sums between ranks.

The sums are functions that autograd knows (Shoeybi et al. 2019, section 3). Tensors are summed in
their own type: gloo and NCCL both add bfloat16 and float16, and round after each addition.

Outside a split region the ranks draw the same random numbers, from generators in the same state, so
that what is replicated stays equal. A region's own numbers follow from one that all draw at its
beginning. So there is no second state: whoever saves and restores the generators of torch, such as
activation checkpointing, restores the regions too.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from wavemare.engine.labels import IGNORED
from wavemare.engine.launch.group import group_for
from wavemare.engine.waves.passes import default_generators, wait
from wavemare.errors import ModelError

_Map = Callable[[Tensor, Any], Tensor]


def copy_to_group(value: Tensor, group: Any) -> Tensor:
    """Return a tensor, equal on all ranks, that each uses in its own way: its gradients add up.

    Identity in the forward pass, all-reduce in the backward pass (Megatron-LM's f).
    """
    return GroupMap.apply(value, group, _unchanged, _summed)


def reduce_from_group(value: Tensor, group: Any) -> Tensor:
    """Return the sum over the ranks, which all go on with in the same way.

    All-reduce in the forward pass, identity in the backward pass (Megatron-LM's g).
    """
    return GroupMap.apply(value, group, _summed, _unchanged)


def gather_from_group(value: Tensor, group: Any) -> Tensor:
    """Return the ranks' tensors side by side in the last dimension.

    All ranks must go on in the same way: in the backward pass each takes its part of the gradient.
    """
    return GroupMap.apply(value, group, _gathered, _own)


def sum_gradients(parameter: Tensor, group: Any) -> Any:
    """Sum each gradient of a parameter that ranks hold alike and use on parts; return the handle.

    What is summed is the gradient of one backward pass, not what has accumulated. Hooks that the
    parameter has come after it. A frozen one is summed once it is trained.
    """
    hooks = parameter._backward_hooks or {}
    before = dict(hooks)
    hooks.clear()
    is_trained = parameter.requires_grad
    parameter.requires_grad_()  # torch hooks no other
    handle = parameter.register_hook(lambda gradient: _summed(gradient, group))
    parameter.requires_grad_(is_trained)
    if before:
        hooks.update(before)
    return handle


def part_for_rank(value: Tensor, group: Any) -> Tensor:
    """Return this rank's part of the last dimension of what all ranks have.

    The inverse of `gather_from_group`: in the backward pass the gradients are gathered.
    """
    return GroupMap.apply(value, group, _own, _gathered)


class GroupMap(torch.autograd.Function):
    """A linear map over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any, there: _Map, back: _Map) -> Tensor:
        """Map a tensor there; ``back`` maps the gradient."""
        ctx.group, ctx.there, ctx.back = group, there, back
        return there(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Map the gradient back, by a map that has a gradient itself, as penalties need."""
        return GroupMap.apply(gradient, ctx.group, ctx.back, ctx.there), None, None, None


def _unchanged(value: Tensor, group: Any) -> Tensor:
    return value.view_as(value)


def _summed(value: Tensor, group: Any) -> Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    wait(dist.all_reduce(total, group=group_for(total, group), async_op=True))
    return total


def all_parts(value: Tensor, group: Any) -> list[Tensor]:
    """Return the ranks' tensors, of one shape, on all of them."""
    value = value.contiguous()
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    wait(dist.all_gather(parts, value, group=group_for(value, group), async_op=True))
    return parts


def _gathered(value: Tensor, group: Any) -> Tensor:
    return torch.cat(all_parts(value, group), dim=-1)


def _own(value: Tensor, group: Any) -> Tensor:
    return value.chunk(dist.get_world_size(group), dim=-1)[dist.get_rank(group)].contiguous()


class InputCopies:
    """Copies an input once for all layers of a module that read it: one sum of its gradients.

    Args:
        module: The module; what was copied is kept during its forward pass.
        group: The ranks.
    """

    def __init__(self, module: nn.Module, group: Any) -> None:
        self._group = group
        self._last: dict[int, tuple[Tensor, Tensor]] = {}  # by thread
        self.handle = module.register_forward_hook(self._forget, always_call=True)

    def copy(self, value: Tensor) -> Tensor:
        """Return `copy_to_group` of an input."""
        known, copied = self._last.get(threading.get_ident(), (None, value))
        if known is not value:
            copied = copy_to_group(value, self._group)
            self._last[threading.get_ident()] = value, copied
        return copied

    def _forget(self, *_: Any) -> None:
        self._last.pop(threading.get_ident(), None)


class ParallelLinear(nn.Module):
    """A linear layer of which each rank holds a part of the weight.

    Args:
        weight: The rank's part, (outputs, inputs).
        bias: (outputs,).
        group: The ranks.
        transposed: The weight is (inputs, outputs), as in GPT-2's ``Conv1D``.

    Attributes:
        quantized: The layer that multiplies by a part in 4 or 8 bits; None without.
    """

    quantized: Any = None

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, group: Any, *, transposed: bool
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.group = group
        self.transposed = transposed

    def local_product(self, value: Tensor, bias: Tensor | None) -> Tensor:
        """Map (..., inputs) to (..., outputs) by the rank's part of the weight."""
        if self.quantized is not None:
            found: Tensor = self.quantized.forward(value)
            return found
        return F.linear(value, self.weight.t() if self.transposed else self.weight, bias)


class ColumnParallelLinear(ParallelLinear):
    """A linear layer of which each rank computes some of the outputs.

    Args:
        weight: The rank's part, (outputs / ranks, inputs).
        bias: The rank's part, (outputs / ranks,).
        group: The ranks.
        transposed: The weight is (inputs, outputs / ranks), as in GPT-2's ``Conv1D``.
        copies: Copies the input, also for other layers; each call copies it if omitted.
        gathers: Whether all ranks get all outputs.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: Any,
        *,
        transposed: bool = False,
        copies: InputCopies | None = None,
        gathers: bool = False,
    ) -> None:
        super().__init__(weight, bias, group, transposed=transposed)
        self.gathers = gathers
        self._copies = copies

    def forward(self, value: Tensor) -> Tensor:
        """Map (..., inputs), equal on all ranks, to this rank's (..., outputs / ranks)."""
        copies = self._copies
        value = copy_to_group(value, self.group) if copies is None else copies.copy(value)
        part = self.local_product(value, self.bias)
        return gather_from_group(part, self.group) if self.gathers else part


class RowParallelLinear(ParallelLinear):
    """A linear layer of which each rank reads some of the inputs; the ranks' results are summed.

    Args:
        weight: The rank's part, (outputs, inputs / ranks).
        bias: The whole bias, (outputs,), which all ranks hold.
        group: The ranks.
        transposed: The weight is (inputs / ranks, outputs), as in GPT-2's ``Conv1D``.
        random: What follows the sum draws the numbers that all ranks draw.
        splits: Whether the input is whole, (..., inputs), on all ranks.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: Any,
        *,
        transposed: bool,
        random: SplitRandom,
        splits: bool = False,
    ) -> None:
        super().__init__(weight, bias, group, transposed=transposed)
        self.splits = splits
        self._random = random

    def forward(self, value: Tensor) -> Tensor:
        """Map this rank's (..., inputs / ranks) to (..., outputs), equal on all ranks."""
        self._random.leave()
        if self.splits:
            value = part_for_rank(value, self.group)
        total = reduce_from_group(self.local_product(value, None), self.group)
        return total if self.bias is None else total + self.bias


_SEEDS = 2**32  # torch's generator of the CPU looks at no more bits than these
_SPACING = 2654435769  # odd, so that ranks never share a seed; the golden ratio of 2**32


class SplitRandom:
    """Gives a rank numbers of its own between :meth:`enter` and :meth:`leave`.

    Each of two passes that take turns has its own regions.

    Args:
        rank: The rank in its group.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._outside: dict[int, tuple[torch.Generator, Tensor]] = {}  # by thread

    def enter(self, device: torch.device) -> None:
        """Begin a region of a device, unless one is open."""
        if threading.get_ident() in self._outside:
            return
        common = int(torch.randint(_SEEDS, ()))
        generator = default_generators(device)[-1]
        self._outside[threading.get_ident()] = generator, generator.get_state()
        generator.manual_seed((common + self._rank * _SPACING) % _SEEDS)

    def leave(self) -> None:
        """End the region, if one is open: go on with the numbers that all ranks draw."""
        if threading.get_ident() in self._outside:
            generator, state = self._outside.pop(threading.get_ident())
            generator.set_state(state)

    def surround(self, module: nn.Module, dropout: str) -> tuple[Any, Any]:
        """Make the forward pass of a module a region, up to a `RowParallelLinear` in it.

        Args:
            module: The module.
            dropout: Its attribute, a dropout module or a probability: without, no region begins.

        Returns:
            The handles of two hooks.
        """

        def enter(module: nn.Module, *_: Any) -> None:
            drops = getattr(module, dropout, 0.0)
            if module.training and getattr(drops, "p", drops) > 0:
                self.enter(next(module.parameters()).device)

        return (
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(lambda *_: self.leave(), always_call=True),
        )


def align_generators(device: torch.device, group: Any) -> None:
    """Give all ranks the first one's states: of torch on the CPU and a device, Python and NumPy."""
    for generator in default_generators(device):
        shared = generator.get_state()
        dist.broadcast(shared, group_src=0, group=group_for(shared, group))
        generator.set_state(shared)
    version, words, normal = random.getstate()
    kind, keys, position, has_normal, other_normal = cast(Any, numpy.random.get_state())
    numbers = torch.tensor([*words, *keys.tolist(), position, has_normal, normal is not None])
    normals = torch.tensor([normal or 0.0, other_normal], dtype=torch.float64)
    for shared in (numbers, normals):
        dist.broadcast(shared, group_src=0, group=group_for(shared, group))
    *both, position, has_normal, known = numbers.tolist()
    words, keys = both[: len(words)], numpy.array(both[len(words) :], dtype=numpy.uint32)
    normal, other_normal = normals.tolist()
    random.setstate((version, tuple(words), normal if known else None))
    numpy.random.set_state((kind, keys, position, has_normal, other_normal))


_ROW_MULTIPLE = 8


@dataclass(frozen=True)
class VocabularyShare:
    """Which tokens a rank holds, of a vocabulary that is spread over the ranks.

    All ranks hold the same number of rows, a multiple of 8, so that products stay aligned. The last
    ones are padding: zero, never read, without probability, and so with a gradient of zero.

    Args:
        tokens: Size of the whole vocabulary.
        rank: The rank in its group.
        ranks: Size of the group.
    """

    tokens: int
    rank: int
    ranks: int

    @property
    def rows(self) -> int:
        """How many rows each rank holds, with padding."""
        return -(-self.tokens // (self.ranks * _ROW_MULTIPLE)) * _ROW_MULTIPLE

    @property
    def first(self) -> int:
        """The token of this rank's first row."""
        return self.rank * self.rows

    @property
    def held(self) -> int:
        """How many of this rank's rows are tokens; the others, at its end, are padding."""
        return min(max(self.tokens - self.first, 0), self.rows)

    def part(self, whole: Tensor) -> Tensor:
        """Return a view of this rank's rows of a tensor (tokens, ...), without padding."""
        return whole.narrow(0, min(self.first, self.tokens), self.held)

    def padded(self, part: Tensor) -> Tensor:
        """Return a copy of the rank's rows (held, ...) with rows of zeros at the end."""
        result = part.new_zeros((self.rows, *part.shape[1:]))
        result[: self.held] = part
        return result

    def locate(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's row here, and whether it is here; where it is not, the row is 0.

        A token that no rank holds fails as an index would: with RuntimeError on a CPU, with the
        device's assertion elsewhere.
        """
        known = (tokens >= 0) & (tokens < self.tokens)
        torch._assert_async(known.all(), f"a token is not one of the {self.tokens} known")
        rows = tokens - self.first
        here = (rows >= 0) & (rows < self.held)
        return rows.masked_fill(~here, 0), here


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are spread over the ranks.

    Args:
        weight: The rank's rows, (rows, hidden).
        share: Which tokens these are.
        group: The ranks.
        padding_idx: A token whose row gets no gradient here, as in ``nn.Embedding``.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        share: VocabularyShare,
        group: Any,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.share = share
        self.group = group
        row = -1 if padding_idx is None else padding_idx - share.first
        self._padding_row = row if 0 <= row < share.held else None

    @classmethod
    def standing_for(
        cls, whole: Any, weight: nn.Parameter, share: VocabularyShare, group: Any
    ) -> VocabParallelEmbedding:
        """Return the split form of an embedding, also of a subclass, such as one that scales.

        Args:
            whole: The embedding, whose forward pass is ``nn.Embedding``'s or calls it.
            weight: See the class.
            share: See the class.
            group: See the class.
        """
        split = cls(weight, share, group, whole.padding_idx)
        if type(whole) is not nn.Embedding:
            # By the order of the bases, its call of nn.Embedding's forward pass is one of ours.
            lookup = type("Lookup", (nn.Embedding,), {"forward": cls.forward})
            split.__class__ = type(f"Split{type(whole).__name__}", (type(whole), lookup, cls), {})
            own = {"weight", "_parameters", "share", "group", "_padding_row"}
            kept = {name: value for name, value in split.__dict__.items() if name in own}
            split.__dict__ = {**whole.__dict__, **kept}
        return split

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens, (batch, sequence), into (batch, sequence, hidden)."""
        rows, here = self.share.locate(tokens)
        embedded = F.embedding(rows, self.weight, self._padding_row)
        return reduce_from_group(embedded.masked_fill(~here[..., None], 0), self.group)

    def __deepcopy__(self, memo: object) -> NoReturn:
        reason = "its layers hold a process group, and its copy would call the model itself"
        raise ModelError("model", "a split model", reason, "Copy the model before it is split")


class VocabParallelHead(ColumnParallelLinear):
    """An output projection of which each rank computes the logits of its tokens.

    Args:
        weight: The rank's rows, (rows, hidden); may be that of the embedding.
        bias: The rank's part, (rows,).
        share: Which tokens these are.
        group: The ranks.

    Attributes:
        gives_whole: Whether a call returns the logits of all tokens.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, share: VocabularyShare, group: Any
    ) -> None:
        super().__init__(weight, bias, group)
        self.share = share
        self.gives_whole = False

    def forward(self, value: Tensor) -> Tensor:
        """Map (..., hidden) to this rank's logits, or to those of all tokens."""
        logits = super().forward(value)
        return self.gather(logits) if self.gives_whole else logits

    def gather(self, logits: Tensor) -> Tensor:
        """Return the logits of all tokens, (..., tokens), from each rank's (..., rows)."""
        return gather_from_group(logits, self.group)[..., : self.share.tokens]

    def whole(self) -> SimpleNamespace:
        """Return ``weight``, (tokens, hidden), and ``bias`` of all ranks, or None for no bias.

        Gradients of a loss that is equal on all ranks reach each rank's rows.
        """
        bias = self.bias if self.bias is None else self.gather(self.bias)
        return SimpleNamespace(weight=self.gather(self.weight.t()).t(), bias=bias)

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        num_items: Tensor | int | None = None,
        ignored: int = IGNORED,
    ) -> Tensor:
        """Return `vocab_parallel_cross_entropy` of this rank's logits; ``ignored`` is as -100."""
        if ignored != IGNORED:
            labels = labels.masked_fill(labels == ignored, IGNORED)
        return vocab_parallel_cross_entropy(logits, labels, self.share, self.group, num_items)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    share: VocabularyShare,
    group: Any,
    num_items: Tensor | int | None = None,
) -> Tensor:
    """Return the mean cross-entropy over the labels other than -100, equal on all ranks.

    It is computed in fp32. What the ranks exchange is three numbers for each position: the largest
    logit, the sum of exponentials and the label's logit.

    Args:
        logits: This rank's, (..., rows).
        labels: Tokens of the whole vocabulary, (...), equal on all ranks.
        share: Which tokens the rows are.
        group: The ranks.
        num_items: Divides the sum in place of the number of labels that count.
    """
    counts = labels != IGNORED
    rows, here = share.locate(labels.masked_fill(~counts, 0))
    losses = _CrossEntropy.apply(logits, rows, here, share.held, group)
    total = losses.masked_fill(~counts, 0.0).sum()
    return total / (counts.sum() if num_items is None else num_items)


def next_tokens(labels: Tensor) -> Tensor:
    """Return for each position, (batch, sequence), the label of the next one; -100 for the last."""
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:]


class _CrossEntropy(torch.autograd.Function):
    """Loss of each position: log of the sum of exponentials, less the label's logit."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, here: Tensor, held: int, group: Any
    ) -> Tensor:
        scores = logits.float()
        if held < logits.shape[-1]:
            padding = torch.arange(logits.shape[-1], device=logits.device) >= held
            scores = scores.masked_fill(padding, float("-inf"))
        largest = scores.amax(dim=-1)
        group = group_for(largest, group)
        wait(dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group, async_op=True))
        scores = scores - largest[..., None]
        label_score = scores.gather(-1, rows[..., None]).squeeze(-1).masked_fill(~here, 0.0)
        exponentials = scores.exp_()
        sums = torch.stack([exponentials.sum(dim=-1), label_score])
        wait(dist.all_reduce(sums, group=group, async_op=True))
        total, label_score = sums
        ctx.save_for_backward(exponentials.div_(total[..., None]), rows, here)
        ctx.dtype = logits.dtype
        return total.log() - label_score

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, rows, here = ctx.saved_tensors
        result = probabilities * gradient[..., None]
        result.scatter_add_(-1, rows[..., None], -(gradient * here)[..., None])
        return result.to(ctx.dtype), None, None, None, None
