"""``import wavemare.hf.patch`` before ``transformers.Trainer``: scripts then get ours by that name.

``Seq2SeqTrainer`` and others that derive from it, imported afterwards, derive from ours.
"""

from __future__ import annotations

import sys

import transformers
import transformers.trainer

from wavemare.errors import LaunchError
from wavemare.hf.trainer import Trainer

__all__ = ["Trainer"]

if "transformers.trainer_seq2seq" in sys.modules:
    raise LaunchError(
        "wavemare.hf.patch",
        None,
        "transformers.Seq2SeqTrainer was imported before, and derives from another Trainer",
        "Import wavemare.hf.patch first",
    )

transformers.trainer.Trainer = Trainer  # type: ignore[misc]
transformers.Trainer = Trainer  # type: ignore[misc]
