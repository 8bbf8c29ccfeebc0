# SPDX-License-Identifier: Apache-2.0
"""The pipeline of a PEFT model, with the calls of peft that its layers can follow one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from wavemare.errors import ModelError
from wavemare.models.adapters import tuned_layers
from wavemare.models.module import TransformerPipeline

_BEFORE = "Call it on the PeftModel before initialize"
_AFTER = "Load the folder that wavemare.save_pretrained(engine, folder) writes, and call it there"
_WAYS = {
    "add_adapter": "Train one adapter; start again with the other one",
    "add_weighted_adapter": _AFTER,
    "delete_adapter": _AFTER,
    "get_base_model": "Use engine.module, which has the layers of this rank",
    "get_model_status": _BEFORE,
    "get_layer_status": _BEFORE,
    "get_nb_trainable_parameters": _BEFORE,
    "load_adapter": "Load it into the PeftModel before initialize",
    "merge_and_unload": "Call wavemare.save_pretrained(engine, folder, merge=True) on all ranks, "
    "and load the folder; or merge_adapter()",
    "print_trainable_parameters": _BEFORE,
    "unload": _AFTER,
}
"""By the name of a call that stages cannot follow, the way that works."""


class AdaptedPipeline(TransformerPipeline):
    """A pipeline of a ``PeftModel``; all ranks have to make the calls of peft alike.

    Args:
        args: As of a `TransformerPipeline`.
        adapters: The adapter's configuration by its name.
        options: As of a `TransformerPipeline`.

    Attributes:
        peft_config: The adapter's configuration by its name.
    """

    def __init__(self, *args: Any, adapters: Mapping[str, Any], **options: Any) -> None:
        super().__init__(*args, **options)
        self.peft_config = dict(adapters)

    @property
    def active_adapters(self) -> list[str]:
        """The names of the adapters that are trained."""
        return list(self.peft_config)

    @property
    def active_adapter(self) -> str:
        """The name of the adapter."""
        return self.active_adapters[0]

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Let passes go without the adapter, as peft's method of that name."""
        self.disable_adapter_layers()
        try:
            yield
        finally:
            self.enable_adapter_layers()

    def disable_adapter_layers(self) -> None:
        """Let passes go without the adapter from now on."""
        for layer in tuned_layers(self):
            layer.enable_adapters(False)

    def enable_adapter_layers(self) -> None:
        """Let passes go with the adapter again."""
        for layer in tuned_layers(self):
            layer.enable_adapters(True)

    def set_adapter(self, adapter_name: str | Sequence[str], **options: Any) -> None:
        """Make an adapter the active one, as peft's method of that name.

        Raises:
            ModelError: The pipeline does not have it.
        """
        names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
        self._check(names, "set_adapter")
        for layer in tuned_layers(self):
            if layer.merged:
                layer.unmerge()
            layer.set_adapter(adapter_name, **options)

    def merge_adapter(
        self, adapter_names: Sequence[str] | None = None, safe_merge: bool = False
    ) -> None:
        """Add the adapter to the weights that this rank holds, as peft's method of that name.

        Raises:
            ModelError: The pipeline does not have one of these adapters.
        """
        names = None if adapter_names is None else list(adapter_names)
        self._check(names or [], "merge_adapter")
        for layer in tuned_layers(self):
            layer.merge(safe_merge=safe_merge, adapter_names=names)

    def unmerge_adapter(self) -> None:
        """Undo `merge_adapter`."""
        for layer in tuned_layers(self):
            if layer.merged:
                layer.unmerge()

    def _check(self, names: list[str], call: str) -> None:
        unknown = sorted(set(names) - self.peft_config.keys())
        if unknown:
            reason = f"the pipeline has the adapter {self.active_adapter!r} alone"
            remedy = "Name that one, or give initialize the PeftModel that has the other one"
            raise ModelError(f"engine.module.{call}", unknown, reason, remedy)


def _refused(name: str, remedy: str) -> Callable[..., NoReturn]:
    def refuse(self: AdaptedPipeline, *_: Any, **__: Any) -> NoReturn:
        reason = f"each of {self.num_stages} stages has its own layers of the PeftModel alone"
        raise ModelError(f"engine.module.{name}", "a pipeline", reason, remedy)

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Refuse peft's ``{name}``, which stages cannot follow."
    return refuse


for _name, _remedy in _WAYS.items():
    setattr(AdaptedPipeline, _name, _refused(_name, _remedy))
