# SPDX-License-Identifier: Apache-2.0
"""Where Megatron-LM's users come from: its checkpoints, arguments, steps and process grid.

Read `models.py` first, then `keys.py`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Opened", "load_hf", "open_checkpoint", "save_megatron"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from wavemare.megatron import models

    return getattr(models, name)
