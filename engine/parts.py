# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of a model, where that is not the whole, and what its methods say then.

After ``initialize`` a model may have layers, or parts of layers, of one rank. Whoever saves, copies
or calls it as before would get one rank's part without a word. So `mark` puts methods in place of
the model's own that say what works instead.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

from deepspeed.pipe import PipelineModule
from torch import nn

from wavemare.engine.config.shape import ZERO_WEIGHTS
from wavemare.engine.experts import is_divided
from wavemare.errors import ModelError

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin

_SAVE = "Call wavemare.save_pretrained(engine, folder) on all ranks (save_model of a Trainer)"
_WAYS = {
    "save_pretrained": _SAVE,
    "push_to_hub": f"{_SAVE}, and upload the folder",
    "state_dict": "Call wavemare.models.whole_state_dict(engine) on all ranks; for this rank's "
    "part alone, ask within wavemare.engine.parts.own_part()",
    "load_state_dict": "Load the whole model's weights before initialize, or call the engine's "
    "load_checkpoint; this rank's part has the names of state_dict within "
    "wavemare.engine.parts.own_part()",
    "__deepcopy__": "Copy the model before initialize, or load what save_pretrained writes",
    "forward": "Call train_batch and eval_batch of the engine",
    "generate": "Load what save_pretrained writes, and generate with that",
    **dict.fromkeys(
        ("resize_token_embeddings", "set_input_embeddings", "set_output_embeddings"),
        "Change the model before initialize, or load what save_pretrained writes",
    ),
    **dict.fromkeys(
        ("add_adapter", "load_adapter", "add_weighted_adapter"),
        "Add it before initialize: as the only adapter with stages or split layers, with ZeRO also "
        "beside others; or load what save_pretrained writes",
    ),
    **dict.fromkeys(
        ("merge_and_unload", "unload"),
        "Call wavemare.save_pretrained(engine, folder, merge=True) on all ranks; load that folder",
    ),
    **dict.fromkeys(
        (
            "register_backward_hook",
            "register_forward_hook",
            "register_forward_pre_hook",
            "register_full_backward_hook",
            "register_full_backward_pre_hook",
        ),
        "It would never run: register it on a module that stages call, as a block or its layers",
    ),
}
"""By the name of a method, the way that works where a rank holds a part."""
_OF_EMBEDDINGS = tuple(name for name in _WAYS if name.endswith("_embeddings"))
_OF_ADAPTERS = tuple(name for name in _WAYS if name.endswith(("_adapter", "unload")))
HOOKS = frozenset(name for name in _WAYS if name.endswith("_hook"))
"""Methods of modules that register hooks."""
_LIBRARIES = {"accelerate", "deepspeed", "peft", "torch", "transformers", "trl", "wavemare"}
_own_part: ContextVar[bool] = ContextVar("own_part", default=False)


@contextmanager
def own_part() -> Iterator[None]:
    """Let ``state_dict`` and ``save_pretrained`` work on this rank's part, as checkpoints do."""
    token = _own_part.set(True)
    try:
        yield
    finally:
        _own_part.reset(token)


@dataclass(frozen=True)
class Part:
    """Why a rank does not hold the whole model.

    Args:
        reason: Part of a sentence.
        remedy: The one way that works; empty where each method has its own.
        is_cut: Whether layers are missing, so that the model cannot be called.
        is_copy: Whether the rank holds a whole model of its own, until replicas are synchronized.
        is_spread: Whether ZeRO 3 alone divides the model, so that DeepSpeed's tools know it.
    """

    reason: str
    remedy: str = ""
    is_cut: bool = False
    is_copy: bool = False
    is_spread: bool = False

    @property
    def can_be_copied(self) -> bool:
        """Whether a copy of the model is as good as the model."""
        return self.is_copy or self is SPLIT

    def error(self, method: str, model: Any) -> ModelError:
        """Return the error of a method that would give the rank's part."""
        name = f"{type(model).__name__}.{method}"
        return ModelError(name, "a part", self.reason, self.remedy or _WAYS[method])


SPLIT = Part(
    "ranks share its layer, and it takes or gives this rank's part",
    "Register it on a module around it, as the block or the model, which takes and gives the whole",
)
"""Of a module inside a model whose layers are split over the ranks."""


def part_of(engine: EngineMixin) -> Part | None:
    """Return what a rank of an engine holds; None if it has the whole model."""
    module: Any = engine.module
    stages = module.num_stages if isinstance(module, PipelineModule) else 1
    parameters = list(module.parameters())
    theirs = any(getattr(m, "ep_size", 1) > 1 for m in module.modules() if engine.has_moe_layers)
    rows = (
        (stages > 1, Part(f"each of {stages} stages has its own layers alone", is_cut=True)),
        (theirs, _of_deepspeed("expert_parallel", "divided its experts")),
        (engine.autotp_size() > 1, _of_deepspeed("tensor_parallel", "split its layers")),
        (any(map(is_divided, parameters)), Part("its experts are divided over the ranks")),
        (
            any(hasattr(parameter, "tensor_partition") for parameter in parameters),
            Part("its layers are split over the ranks"),
        ),
        (
            engine.zero_optimization_stage() == ZERO_WEIGHTS,
            Part("ZeRO 3 has spread its weights over the ranks", is_spread=True),
        ),
        (
            engine.num_replicas > 1,
            Part("the replicas differ until engine.synchronize() is called", is_copy=True),
        ),
    )
    return next((part for holds, part in rows if holds), None)


def _of_deepspeed(section: str, done: str) -> Part:
    return Part(
        f"DeepSpeed's {section} has {done} over the ranks, in a form of its own",
        f"Call save_checkpoint; for a folder, train with wavemare.{section} in place of it",
    )


@dataclass(frozen=True)
class Mark:
    """What `mark` has noted of a model.

    Args:
        part: What the rank holds of it.
        engine: Returns the engine that holds it, or None if that is gone.
        layout: The module's `layout_of`.
        ways: Names of the methods that are refused; None for all that a part has not.
    """

    part: Part
    engine: Callable[[], Any]
    layout: object
    ways: Collection[str] | None = None

    def holds_whole(self) -> bool:
        """Whether the rank has the whole model's weights at this moment."""
        engine = self.engine() if self.part.is_copy else None
        return engine is not None and engine.are_replicas_equal


_marks: weakref.WeakKeyDictionary[nn.Module, Mark] = weakref.WeakKeyDictionary()


def split_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are parts of layers which ranks split, by ours or others' marks.

    Pipelines mark all of their parameters as ``model_parallel``, for DeepSpeed's clipping.
    """
    marks = ["tensor_model_parallel", "tensor_partition"]
    if not isinstance(module, PipelineModule):
        marks.append("model_parallel")
    return [p for p in module.parameters() if any(getattr(p, mark, False) for mark in marks)]


def layout_of(module: Any) -> object:
    """Return what two pipelines share if each rank has the same layers of both; None without."""
    parts, homes = getattr(module, "parts", None), getattr(module, "homes", ())
    return None if parts is None else ([int(part) for part in parts], list(homes))


def mark(
    models: Iterable[nn.Module],
    engine: EngineMixin,
    part: Part,
    *,
    ways: Collection[str] | None = None,
) -> None:
    """Let models say what works where they would give one rank's part.

    Args:
        models: The caller's model, the models in it, and the engine's module.
        engine: Holds them.
        part: What `part_of` has said.
        ways: See `Mark`.
    """
    noted = Mark(part, weakref.ref(engine), layout_of(engine.module), ways)
    restore(dict.fromkeys(models, noted))


def restore(marks: Mapping[nn.Module, Mark]) -> None:
    """Mark models again, of which `lift` has returned this."""
    for model, mark in marks.items():
        _marks[model] = mark
        for name in _ways_of(model, mark.part) if mark.ways is None else mark.ways:
            vars(model)[name] = _Method(model, name)


def _ways_of(model: nn.Module, part: Part) -> set[str]:
    """Return the names of the methods that would give a part of a model."""
    left = set() if part.is_cut else {"forward", "generate", *HOOKS}
    left |= {name for name in _OF_ADAPTERS if not hasattr(model, name)}
    own = {"forward", *HOOKS, *_OF_ADAPTERS}  # which say more
    left |= own if isinstance(model, PipelineModule) else set()
    left |= {"__deepcopy__"} if part.is_copy else set()
    if not part.is_cut and all(map(is_divided, split_weights(model))):
        left.update(_OF_EMBEDDINGS)  # each rank holds the whole embedding
        if not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            left.update(_OF_ADAPTERS)  # and each layer that may get an adapter
    if hasattr(model, "generate") and any(map(is_divided, model.parameters())):
        left.discard("generate")  # the ranks must call it equally often
    return _WAYS.keys() - left


def mark_of(model: Any) -> Mark | None:
    """Return what `mark` has noted of a model; None if nothing."""
    return _marks.get(model) if isinstance(model, nn.Module) else None


def lift(model: Any) -> dict[nn.Module, Mark]:
    """Give a model, and the models in it, their methods back; return what was marked."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = {module: _marks.pop(module) for module in modules if module in _marks}
    for module in found:
        for method in [v for v in vars(module).values() if isinstance(v, _Method)]:
            method.remove()
    return found


def called_by_library() -> bool:
    """Whether a library, such as DeepSpeed's profiler, has called the function that asks."""
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return caller.partition(".")[0] in _LIBRARIES


class PassedOver:
    """Modules of the caller's model that no stage calls, so that a change of them would do nothing.

    It keeps none of them alive.

    Args:
        modules: As they are after `mark`.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._found = weakref.WeakKeyDictionary({each: _identity(each) for each in modules})

    def check(self) -> None:
        """Compare the modules inside each of them, and its ``forward``, with those at first.

        Raises:
            ModelError: There are others.
        """
        for module, (forward, children) in list(self._found.items()):
            now = _identity(module)
            if now == (forward, children):
                continue
            what = "forward" if now[0] != forward else "the modules inside"
            reason = "it was changed after initialize, and stages call the layers that they had"
            remedy = (
                "Change the model before initialize; to go on with its weights, load what "
                "wavemare.save_pretrained writes"
            )
            raise ModelError(type(module).__name__, what, reason, remedy)


def _identity(module: nn.Module) -> tuple[int, tuple[int, ...]]:
    """Return what tells a module's own ``forward`` and the modules in it from others."""
    forward = vars(module).get("forward")
    if isinstance(forward, _Method):
        forward = forward.before
    return id(forward), tuple(map(id, module._modules.values()))


class _Method:
    """Stands for a method of a model of which this rank holds a part.

    Args:
        model: The model, marked.
        name: The method's name.

    Attributes:
        before: What the model itself had by that name, and not its class; or None.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model: Callable[[], Any] = weakref.ref(model)
        self._name = name
        self.before = vars(model).get(name)
        with suppress(AttributeError, ValueError):  # callers look for names of parameters
            self.__signature__ = inspect.signature(getattr(model, name))

    def remove(self) -> None:
        """Put the model's own method back."""
        own = vars(self._model())
        del own[self._name]
        if self.before is not None:
            own[self._name] = self.before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, name = self._model(), self._name
        mark = _marks[model]
        if name == "generate" and not mark.part.is_cut:
            return self._own(*args, **{**kwargs, "synced_gpus": True})
        if name == "load_state_dict":
            try:
                return self._own(*args, **kwargs)
            except RuntimeError as error:  # other names or shapes
                raise mark.part.error(name, model) from error
        if name in HOOKS and called_by_library():
            return self._own(*args, **kwargs)
        parts = _own_part.get() and name in ("state_dict", "save_pretrained")
        if parts or mark.holds_whole():
            return self._own(*args, **kwargs)
        if name == "save_pretrained" and not mark.part.is_cut:
            given = _flat(self.__signature__, args, kwargs)
            if given.get("state_dict") is not None:
                with own_part():
                    return self._own(*args, **kwargs)
            if "state_dict" in given and not given.get("is_main_process", True):
                return None  # whoever gathers gives None to the ranks that do not write
        raise mark.part.error(name, model)

    @property
    def _own(self) -> Any:
        model = self._model()
        return self.before or getattr(type(model), self._name).__get__(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model = self._model()
        if not _marks[model].part.can_be_copied:
            raise _marks[model].part.error("__deepcopy__", model)
        return MethodType(getattr(type(model), self._name), memo[id(model)])

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        model = self._model()
        raise _marks[model].part.error("__deepcopy__", model)


def _flat(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return arguments by their names, those of ``**kwargs`` too."""
    given = signature.bind(*args, **kwargs).arguments
    return {**given, **given.get("kwargs", {})}
