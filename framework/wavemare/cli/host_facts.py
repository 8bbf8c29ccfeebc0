# SPDX-License-Identifier: Apache-2.0
"""What ``wavemare doctor`` asks a host for: versions, address, interfaces.

`wavemare.cli.host_checks` runs the text of this file on each host (``python -c``), where wavemare
may be missing: it imports the standard library alone and prints a line of JSON.
"""

from __future__ import annotations

import json
import platform
import socket
from importlib import metadata
from typing import Any

PACKAGES = ("torch", "deepspeed", "wavemare")
"""Packages whose versions must be the same on all hosts."""


def host_facts() -> dict[str, Any]:
    """Return versions (``missing`` if not installed), address (None if unknown), interfaces."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = None
    interfaces = [name for _, name in socket.if_nameindex()]
    return {"versions": versions, "address": address, "interfaces": interfaces}


if __name__ == "__main__":
    print(json.dumps(host_facts()))
