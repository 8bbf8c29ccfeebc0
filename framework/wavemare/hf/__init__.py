# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face Trainer with our engines: ``from wavemare.hf import Trainer``.

Read `trainer.py` first.
"""

from wavemare.hf.checkpoints import newest_checkpoint
from wavemare.hf.recording import RecordingCallback
from wavemare.hf.trainer import Trainer

__all__ = ["RecordingCallback", "Trainer", "newest_checkpoint"]
