# SPDX-License-Identifier: Apache-2.0
"""``import wavemare.hf.patch`` before ``transformers.Trainer``: scripts then get ours by that name.

``Seq2SeqTrainer`` and others that derive from it, imported afterwards, derive from ours.
"""

import sys

import transformers
import transformers.trainer

from wavemare.errors import LaunchError
from wavemare.hf.trainer import Trainer

__all__ = ["Trainer"]

_stock = Trainer.__bases__[0]
_kind: type
for _name, _given in vars(sys.modules["__main__"]).items():
    if isinstance(_given, type) and issubclass(_given, _stock) and not issubclass(_given, Trainer):
        raise LaunchError(
            "wavemare.hf.patch",
            _name,
            "the script has it from before, and would train with transformers' own Trainer",
            "Put import wavemare.hf.patch before the first import of transformers",
        )
for _kind in _stock.__subclasses__():
    if _kind.__module__.startswith("trl."):
        raise LaunchError(
            "wavemare.hf.patch",
            f"{_kind.__module__}.{_kind.__name__}",
            "it has been imported before, and derives from transformers' own Trainer",
            "Put import wavemare.hf.patch before the first import of trl",
        )

vars(transformers.trainer)["Trainer"] = Trainer
vars(transformers)["Trainer"] = Trainer

# Whoever asks for it from now on gets one that derives from ours.
sys.modules.pop("transformers.trainer_seq2seq", None)
for _name in ("Seq2SeqTrainer", "trainer_seq2seq"):
    vars(transformers).pop(_name, None)
