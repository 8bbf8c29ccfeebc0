# SPDX-License-Identifier: Apache-2.0
"""A transformers model split over a group of ranks, in place, by the plan of its class.

Before the first step a small batch shows that the ranks together compute what the model did.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch import distributed as dist
from transformers.pytorch_utils import Conv1D

from wavemare.engine.labels import IGNORED, counts_items, shifts_labels
from wavemare.engine.launch.group import gather, group_of
from wavemare.errors import ModelError
from wavemare.models.adapters import base_of, is_lora, make_ready
from wavemare.models.deferred import is_deferred, when_read
from wavemare.models.proof import example_batch, has_own_loss, undisturbed
from wavemare.models.quantized import in_fp32, is_quantized_layer, part_of_layer, whole_shape
from wavemare.parallel.tensor.checks import (
    check_adapters,
    check_vocabulary,
    checked_plan,
    gives_keys,
    key_copies,
    refusal,
)
from wavemare.parallel.tensor.hooks import (
    OF_GRADIENTS,
    OF_INPUTS,
    OF_OUTPUTS,
    forget_hooks,
    note_hooks,
)
from wavemare.parallel.tensor.layers import (
    ColumnParallelLinear,
    InputCopies,
    ParallelLinear,
    RowParallelLinear,
    SplitRandom,
    VocabParallelEmbedding,
    VocabParallelHead,
    VocabularyShare,
    align_generators,
    copy_to_group,
    next_tokens,
    reduce_from_group,
    sum_gradients,
)
from wavemare.parallel.tensor.output import gather_attentions, with_late_logits
from wavemare.parallel.tensor.partition import (
    Partition,
    check_equal_weights,
    is_copied,
    split_parameter,
)
from wavemare.parallel.tensor.plan import EXPERTS, TensorPlan

_TINY = 1e-30
_TOLERANCE = 1e-4  # of the largest element; what another order of sums changes is 1e-6


def split_model(
    model: Any,
    group: Any,
    *,
    verify: bool = True,
    experts: bool = True,
) -> Any:
    """Split attention, feed-forward layers, embedding and language-modelling head over a group.

    The model computes the same loss on all ranks as before. What transformers' plan of its class
    does not name, such as norms, stays whole on all ranks. Where there are fewer heads of keys and
    values than ranks, several ranks hold a head, and sum its gradients. A language model returns
    the logits of the whole vocabulary. Called with labels it gathers them when they are read, see
    `with_late_logits`; then all ranks have to read them. Attention probabilities are of all heads.

    The ranks' default generators are put into the first rank's state, so that they drop the same
    elements outside attention; seed all ranks of a group alike from then on.

    Args:
        model: A transformers model with equal weights on all ranks, not yet given to an engine: of
            a class with a ``base_model_tp_plan``, or GPT-2, BERT, RoBERTa or OPT; or one of these
            in a ``PeftModel`` of LoRA.
        group: The ranks, all of which call this.
        verify: Whether logits, loss and gradients of whole weights are compared with the model's
            own, on a small batch. A 16-bit model is in fp32 meanwhile. It needs the whole model,
            and so is not done where the weights are still to be read (`wavemare.models.deferred`).
        experts: Whether experts are split, too. Else they stay whole, for `split_experts`.

    Returns:
        The model.

    Raises:
        ModelError: It cannot be split so, or the ranks' weights differ. It is left as it was.
    """
    inner = base_of(model)
    with _together(inner, group):
        check_adapters(model)
        make_ready(model)
        plan = checked_plan(inner)
        copies = key_copies(inner, plan, dist.get_world_size(group))
        plan = plan if experts else plan.without_experts()
        split = _Split(inner, plan, group, copies)
        trial = _Trial(inner, plan) if verify and not is_deferred(inner) else None
    check_equal_weights(inner, group)
    try:
        with _together(inner, group):
            split.apply()
        split.sum_gradients()
        if trial is not None:
            trial.check(group)
    except BaseException:
        split.undo()
        raise
    align_generators(torch.device(get_accelerator().current_device_name()), group)
    return model


class _Split:
    """The changes that split a model; they can be undone.

    Args:
        model: The model.
        plan: Its plan.
        group: The ranks.
        copies: How many of them hold the same heads of keys and values.
    """

    def __init__(self, model: Any, plan: TensorPlan, group: Any, copies: int) -> None:
        self._model = model
        self._plan = plan
        self._group = group
        self._key_copies = copies
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._random = SplitRandom(self._rank)
        self._copies: dict[nn.Module, InputCopies] = {}
        # By identity, so that what was tied stays so. They hold the wholes, so that no identity is
        # used again.
        self._parts: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._summed: list[nn.Parameter] = []
        self._column_parents: set[nn.Module] = set()  # which have layers with parts as outputs
        self._row_parents: set[nn.Module] = set()
        self._undo: list[Callable[[], Any]] = []
        self._layers = [self._known(name, style) for name, style in plan.layers(model.base_model)]

    def _known(self, name: str, style: str) -> tuple[str, Callable[[_Split, nn.Module, str], None]]:
        """Return a layer's name and what its style does; refuse what is not known."""
        if style not in _STYLES:
            raise refusal(self._model, f"the style {style!r} of its plan, for {name}, is not known")
        layer = _found(self._model.base_model, name)
        if style in _LINEAR and is_lora(layer):
            if "colwise" in style and any(
                p.p for p in layer.lora_dropout.values() if hasattr(p, "p")
            ):
                reason = "the ranks would drop different elements of one input"
                raise ModelError(name, "lora_dropout", reason, "Set lora_dropout to 0")
            layer = layer.base_layer
        known = type(layer) in (nn.Linear, Conv1D, nn.Parameter) or is_quantized_layer(layer)
        if style in _LINEAR and not known:
            raise ModelError(
                name,
                f"{type(layer).__module__}.{type(layer).__qualname__}",
                "how wavemare.tensor_parallel would cut a module of this class is not known",
                "Merge adapters into the weights first, or leave tensor_parallel out",
            )
        return name, _STYLES[style]

    def undo(self) -> None:
        """Take all changes back."""
        while self._undo:
            self._undo.pop()()

    def apply(self) -> None:
        """Change the model."""
        base = self._model.base_model
        self._split_vocabulary()
        for name, apply in self._layers:
            apply(self, base, name)
        self._undo += [each.remove for each in gather_attentions(base, self._group)]
        for parent in self._column_parents - self._row_parents:
            self.note(parent, OF_OUTPUTS)
        for parent in self._row_parents - self._column_parents:
            self.note(parent, OF_INPUTS)

    def sum_gradients(self) -> None:
        """Sum the gradients of what several ranks hold alike and use on parts, in each pass."""
        copies, shared = self._key_copies, self._group
        if 1 < copies < self._ranks:
            first = self._rank // copies * copies
            shared = group_of(dist.get_process_group_ranks(self._group)[first : first + copies])
        copied = [part for part, _ in self._parts.values() if is_copied(part)]
        for parameters, group in ((self._summed, self._group), (copied, shared)):
            for parameter in parameters:
                if not parameter.is_floating_point():  # quantized, and so never trained
                    continue
                handle = when_read(parameter, functools.partial(sum_gradients, group=group))
                if handle is not None:
                    self.hook(handle)

    def parameter(self, whole: nn.Parameter, partition: Partition, name: str = "") -> nn.Parameter:
        """Return the rank's part of a parameter, the same one for the same parameter."""
        if id(whole) not in self._parts:
            size = whole_shape(whole)[partition.dim]
            parts = partition.blocks * self._ranks // partition.copies
            if partition.tokens is None and size % parts:
                raise ModelError(
                    name,
                    size,
                    f"this width cannot be split over {self._ranks} ranks",
                    "Use a number of ranks that divides it",
                )
            part = split_parameter(whole, partition, self._group, name)
            self._parts[id(whole)] = part, whole
        return self._parts[id(whole)][0]

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module."""
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def replace(self, name: str, old: nn.Module, new: nn.Module, base: nn.Module) -> None:
        """Put a module in another's place, with its hooks and the attributes that they may read."""
        vars(new).update({k: v for k, v in vars(old).items() if "_hook" in k or k not in vars(new)})
        parent = base.get_submodule(name.rpartition(".")[0])
        self.set(parent, name.rpartition(".")[2], new.train(old.training))

    def hook(self, handle: Any) -> None:
        """Remember a hook."""
        self._undo.append(handle.remove)

    def note(self, module: nn.Module, hooks: frozenset[str]) -> None:
        """Note that hooks of a module would see a part; see `note_hooks`."""
        note_hooks(module, hooks)
        self._undo.append(functools.partial(forget_hooks, module))

    def _note_inside(self, parent: nn.Module) -> None:
        """Note modules between a parent's layers that are split by columns and by rows."""
        for name, module in parent.named_children():
            # Other dropout than that of attention follows the sum over the ranks.
            after = isinstance(module, nn.Dropout) and name != self._plan.dropout
            if not after and not any(True for _ in module.parameters()):
                self.note(module, OF_INPUTS | OF_OUTPUTS)

    def _split_vocabulary(self) -> None:
        model, group = self._model, self._group
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        share = VocabularyShare(embedding.num_embeddings, self._rank, self._ranks)
        rows = Partition(0, tokens=share.tokens)
        names = {module: name for name, module in model.named_modules()}
        check_vocabulary(names, embedding, head)
        weight = self.parameter(embedding.weight, rows, names[embedding])
        new = VocabParallelEmbedding.standing_for(embedding, weight, share, group)
        self.replace(names[embedding], embedding, new, model)
        if head is None:
            return
        weight = self.parameter(head.weight, rows)
        bias = None if head.bias is None else self.parameter(head.bias, rows)
        for module in model.modules():  # BERT's head has the decoder's bias under another name
            for name, whole in list(module.named_parameters(recurse=False)):
                if whole is head.bias and module is not head:
                    self.set(module, name, bias)
        split_head = VocabParallelHead(weight, bias, share, group)
        self.note(split_head, OF_OUTPUTS)
        around = names[head].split(".")[:-1]  # as BERT's, which returns what its decoder does
        for depth in range(len(around)):
            self.note(model.get_submodule(".".join(around[: depth + 1])), OF_OUTPUTS)
        self.replace(names[head], head, split_head, model)
        forward = vars(model).get("forward")  # a wrapper's; usually there is only the class's
        _compute_loss_over_group(model, split_head)
        self._undo.append(functools.partial(delattr, model, "forward"))
        if forward is not None:
            self._undo[-1] = functools.partial(setattr, model, "forward", forward)

    def column(self, base: nn.Module, name: str, *, blocks: int = 1, gathers: bool = False) -> None:
        """Split the outputs of a linear layer, or the dimension -2 of a bare parameter."""
        layer = _found(base, name)
        if isinstance(layer, nn.Parameter):
            self._set_part(base, name, layer, Partition(layer.dim() - 2, blocks))
            return
        parent = base.get_submodule(name.rpartition(".")[0])
        if parent not in self._copies:
            self._copies[parent] = InputCopies(parent, self._group)
            self.hook(self._copies[parent].handle)
            if not gathers:
                self._column_parents.add(parent)
                self._note_inside(parent)
            # Feed-forward modules have neither heads nor dropout before their sum.
            if "att" in name.rpartition(".")[0] and not gathers:
                self._split_attention(parent)
        copies: InputCopies | None = self._copies[parent]
        shared = self._key_copies if gives_keys(name) and not gathers else 1
        if is_lora(layer) and not gathers:
            self.note(layer, OF_OUTPUTS)
        for part in _linear(layer, name, "lora_B"):
            old: Any = base.get_submodule(part)
            transposed = isinstance(old, Conv1D)
            cut = Partition(int(transposed), blocks, copies=shared)
            weight = self.parameter(old.weight, cut, name)
            bias = old.bias
            if bias is not None:
                bias = self.parameter(bias, Partition(0, blocks, copies=shared), name)
            new = ColumnParallelLinear(
                weight,
                bias,
                self._group,
                transposed=transposed,
                copies=copies,
                gathers=gathers,
            )
            self._keep_quantized(old, new, bias)
            self.replace(part, old, new, base)
            if not gathers:
                self.note(new, OF_OUTPUTS)
            copies = None  # the factor reads what the other one gives

    def _split_attention(self, attention: Any) -> None:
        for name in self._plan.divided:
            self.set(attention, name, getattr(attention, name) // self._ranks)
        if self._key_copies > 1:
            queries = attention.num_key_value_groups // self._key_copies
            self.set(attention, "num_key_value_groups", queries)
        for handle in self._random.surround(attention, self._plan.dropout):
            self.hook(handle)

    def row(self, base: nn.Module, name: str, *, splits: bool = False) -> None:
        """Split the inputs of a linear layer, or the last dimension of a bare parameter."""
        layer = _found(base, name)
        if isinstance(layer, nn.Parameter):
            self._set_part(base, name, layer, Partition(layer.dim() - 1))
            return
        if not splits:
            self._row_parents.add(base.get_submodule(name.rpartition(".")[0]))
        if is_lora(layer) and not splits:
            self.note(layer, OF_INPUTS)
            for dropout in layer.lora_dropout.values():
                self.note(dropout, OF_INPUTS | OF_OUTPUTS)
        for part in _linear(layer, name, "lora_A"):
            old: Any = base.get_submodule(part)
            transposed = isinstance(old, Conv1D)
            new = RowParallelLinear(
                self.parameter(old.weight, Partition(int(not transposed)), name),
                old.bias,
                self._group,
                transposed=transposed,
                random=self._random,
                splits=splits,
            )
            self._keep_quantized(old, new, None)
            self.replace(part, old, new, base)
            if not splits:
                self.note(new, OF_INPUTS)

    def _keep_quantized(self, old: Any, new: ParallelLinear, bias: nn.Parameter | None) -> None:
        """Let a layer compute with its part of a quantized weight, if that is what it has."""
        if is_quantized_layer(old):
            vars(new)["quantized"] = part_of_layer(old, new.weight, bias)  # no submodule of it

    def summed(self, base: nn.Module, name: str) -> None:
        """Let a whole module be used on parts, such as the norm of the rank's queries."""
        module = base.get_submodule(name)
        self._summed += module.parameters()
        for each in module.modules():
            self.note(each, OF_INPUTS | OF_OUTPUTS)

    def experts(self, base: nn.Module, name: str) -> None:
        """Let experts whose weights are split read whole tokens and give their sum."""
        group = self._group  # the hooks stay, and must not keep the whole weights by way of self

        def copied(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            floats = (isinstance(v, Tensor) and v.is_floating_point() for v in inputs)
            return tuple(
                copy_to_group(value, group) if real else value
                for value, real in zip(inputs, floats, strict=True)
            )

        def total(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return reduce_from_group(output, group)

        module = base.get_submodule(name)
        self.hook(module.register_forward_pre_hook(copied))
        self.hook(module.register_forward_hook(total))
        self.note(module, OF_GRADIENTS)
        for each in [each for each in module.modules() if each is not module]:
            self.note(each, OF_INPUTS | OF_OUTPUTS)

    def nothing(self, base: nn.Module, name: str) -> None:
        """Leave a layer: the vocabulary is split for all models."""

    def _set_part(self, base: nn.Module, name: str, whole: Any, partition: Partition) -> None:
        owner, _, attribute = name.rpartition(".")
        self.set(base.get_submodule(owner), attribute, self.parameter(whole, partition, name))


_STYLES: dict[str, Callable[[_Split, nn.Module, str], None]] = {
    "colwise": _Split.column,
    "colwise_qkv": functools.partial(_Split.column, blocks=3),
    "packed_colwise": functools.partial(_Split.column, blocks=2),
    "colwise_gather_output": functools.partial(_Split.column, gathers=True),
    "rowwise": _Split.row,
    "rowwise_split_input": functools.partial(_Split.row, splits=True),
    "replicated_with_grad_allreduce": _Split.summed,
    EXPERTS: _Split.experts,
    "embedding_rowwise": _Split.nothing,
}
"""What each of transformers' styles does; ``colwise_qkv`` is ours."""

_LINEAR = {style for style in _STYLES if "colwise" in style or style.startswith("rowwise")}


def _compute_loss_over_group(model: Any, head: VocabParallelHead) -> None:
    """Let a model compute its loss from logits that are spread over the ranks.

    With labels the logits of the whole vocabulary are gathered when they are read; otherwise at
    once. A model with a loss of its own computes it from whole logits itself.

    Args:
        model: A transformers language model, whose ``forward`` is replaced by one with the same
            parameters.
        head: Its output projection.
    """
    shifts, counts, own = shifts_labels(model), counts_items(model), has_own_loss(model)
    if not own and not shifts and not type(model).__name__.endswith("ForMaskedLM"):
        raise refusal(model, "its loss over the vocabulary is not that of a causal or masked model")
    whole, function = model.forward, model.loss_function
    signature = inspect.signature(whole)

    @functools.wraps(whole)
    def forward(*args: Any, **kwargs: Any) -> Any:
        changed = model.loss_function is not function
        if own or changed or kwargs.get("fused_lm_head"):
            with _whole_head(model, head):
                return whole(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        labels = bound.arguments.pop("labels", None)
        others = bound.arguments.setdefault("kwargs", {})
        items, shifted = (others.pop(k, None) for k in ("num_items_in_batch", "shift_labels"))
        ignored = others.pop("ignore_index", IGNORED)
        by_name = others.pop("return_dict", None)
        others["return_dict"] = True
        output = whole(*bound.args, **bound.kwargs)
        by_name = model.config.return_dict if by_name is None else by_name
        entries = dict(output)
        logits = entries.pop("logits")
        has_loss = labels is not None or shifted is not None
        if has_loss:
            if shifted is None:
                shifted = next_tokens(labels) if shifts else labels
            entries["loss"] = head.loss(logits, shifted, items if counts else None, ignored)
            if entries.get("aux_loss") is not None:
                entries["loss"] = entries["loss"] + model.router_aux_loss_coef * output.aux_loss
        if has_loss and by_name:
            output = type(output)(**entries, logits=logits)
            return with_late_logits(output, functools.partial(head.gather, logits))
        output = type(output)(**entries, logits=head.gather(logits))
        return output if by_name else output.to_tuple()

    model.forward = forward


@contextmanager
def _whole_head(model: Any, head: VocabParallelHead) -> Iterator[None]:
    """Show the head of the whole vocabulary to a ``forward`` with a loss of its own, or TRL's."""
    model.get_output_embeddings, head.gives_whole = head.whole, True
    try:
        yield
    finally:
        del model.get_output_embeddings
        head.gives_whole = False


@contextmanager
def _together(model: Any, group: Any) -> Iterator[None]:
    """Raise on all ranks if one of them fails inside, where there is no collective."""
    error = None
    try:
        yield
    except Exception as failure:
        error = failure
    failed = any(gather(error is not None, group))
    if error is not None:
        raise error
    if failed:
        raise refusal(model, "another rank has failed, whose error says why")


def _found(base: nn.Module, name: str) -> Any:
    """Return a module, or a bare parameter, by its name."""
    owner, _, attribute = name.rpartition(".")
    return getattr(base.get_submodule(owner), attribute)


def _linear(layer: Any, name: str, factor: str) -> list[str]:
    """Return a linear layer's name; with LoRA its base's, and that of the factor cut like it."""
    if not is_lora(layer):
        return [name]
    return [f"{name}.base_layer", *(f"{name}.{factor}.{key}" for key in getattr(layer, factor))]


class _Trial:
    """A small batch's logits and loss, and the gradients of the weights that stay whole.

    Args:
        model: The model, still whole.
        plan: Its plan.
    """

    def __init__(self, model: Any, plan: TensorPlan) -> None:
        base, cut = model.base_model, set()
        vocabulary = (model.get_input_embeddings(), model.get_output_embeddings())
        layers = [_found(base, name) for name, style in plan.layers(base) if style in _LINEAR]
        for layer in (*layers, *vocabulary):
            own = layer.parameters() if isinstance(layer, nn.Module) else (layer,)
            cut |= {id(value) for value in own}
        self._model = model
        self._kept = [
            name
            for name, value in model.named_parameters()
            if value.requires_grad and id(value) not in cut
        ]
        self._expected = self._run("the model")

    def _run(self, what: str) -> dict[str, Tensor]:
        model: Any = self._model
        batch: dict[str, Any] = example_batch(model, ("input_ids", "attention_mask"))
        if "use_cache" in inspect.signature(model.forward).parameters:
            batch["use_cache"] = False
        # In 16 bits rounding would hide what a plan leaves out; to fp32 and back changes no bit.
        half = {
            tensor: tensor.dtype
            for tensor in (*model.parameters(), *model.buffers())
            if tensor.dtype in (torch.bfloat16, torch.float16)
        }
        try:
            for tensor in half:
                tensor.data = tensor.data.float()
            with undisturbed(model), in_fp32(model), torch.enable_grad():
                model.eval()
                found = model(**batch)  # of a head for questions the logits of both ends
                logits = torch.cat([v.flatten() for v in found.values() if torch.is_tensor(v)])
                if model.get_output_embeddings() is None:
                    weights = torch.linspace(-1, 1, logits.numel(), device=logits.device)
                    loss = (logits.float() * weights).sum()
                else:
                    labels = batch["input_ids"].clone()
                    labels[:, ::3] = -100
                    loss = model(**batch, labels=labels).loss
                kept = [model.get_parameter(name) for name in self._kept]
                given = torch.autograd.grad(loss, kept, allow_unused=True) if kept else ()
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
            message = str(error).partition("\n")[0]
            raise refusal(
                model, f"{what} gave no logits and loss for a small batch ({message})"
            ) from error
        finally:
            for tensor, dtype in half.items():
                tensor.data = tensor.data.to(dtype)
        told = {"the logits": logits.detach(), "the loss": loss.detach()}
        for name, gradient in zip(self._kept, given, strict=True):
            if gradient is not None:
                told[f"the gradient of {name}"] = gradient
        return told

    def check(self, group: Any) -> None:
        """Compare with what the split model gives.

        Raises:
            ModelError: It is something else.
        """
        found = self._run("the split model")
        # A gradient that is zero but for rounding is measured by the others.
        sizes = [float(value.abs().max()) for value in self._expected.values()]
        least = 1e-3 * max(sizes)
        own = [
            (_difference(found[name], self._expected[name], max(size, least)), name)
            for name, size in zip(self._expected, sizes, strict=True)
        ]
        worst, name = max(gather(max(own), group))
        if not worst <= _TOLERANCE:
            raise refusal(
                self._model,
                f"{name} of the split model differs by {worst:.1e} of the largest element, so the "
                "plan of its class leaves something out",
            )


def _difference(found: Tensor, expected: Tensor, size: float) -> float:
    """Return the largest difference, relative to a size."""
    difference = float((found.double() - expected.double()).abs().max()) / max(size, _TINY)
    return float("inf") if math.isnan(difference) else difference
