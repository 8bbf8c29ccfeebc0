# SPDX-License-Identifier: Apache-2.0
"""Whether this machine may have an accelerator, without an import of torch."""

from __future__ import annotations

import glob
import os
import sys
from importlib import metadata

# CUDA, CUDA in WSL, ROCm, Intel, Habana, Ascend and Cambricon.
_DEVICE_FILES = (
    "/dev/nvidia[0-9]*",
    "/dev/dxg",
    "/dev/kfd",
    "/dev/dri/renderD*",
    "/dev/accel*",
    "/dev/davinci[0-9]*",
    "/dev/cambricon_dev*",
)


def accelerator_visible() -> bool:
    """Whether this machine may have an accelerator; torch is not imported."""
    try:
        if metadata.version("torch").endswith("+cpu"):
            return False
    except metadata.PackageNotFoundError:
        return False
    if os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}:
        return False
    return sys.platform == "darwin" or any(glob.glob(pattern) for pattern in _DEVICE_FILES)
