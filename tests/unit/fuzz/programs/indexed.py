# SPDX-License-Identifier: Apache-2.0
"""Fuzz the reader of Megatron's index with atheris, guided by coverage.

Arguments are libFuzzer's: ``python indexed.py -max_total_time=60``. A crash leaves its input in
``crash-*`` and ends the process with a code other than 0.
"""

import struct
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["wavemare.data.megatron"]):
    from wavemare.data.megatron import HEADER, MAGIC, open_indexed
    from wavemare.errors import DataError

FOLDER = tempfile.TemporaryDirectory(prefix="wavemare-fuzz-")
PREFIX = Path(FOLDER.name) / "corpus"
# Two documents of five 16-bit tokens; one of them with modes; no document; three sequences in one.
VALID = (
    HEADER.pack(MAGIC, 1, 8, 2, 3) + struct.pack("<2i2q3q", 5, 5, 0, 10, 0, 1, 2),
    HEADER.pack(MAGIC, 1, 8, 2, 3) + struct.pack("<2i2q3q2b", 5, 5, 0, 10, 0, 1, 2, 0, 1),
    HEADER.pack(MAGIC, 1, 4, 0, 1) + struct.pack("<q", 0),
    HEADER.pack(MAGIC, 1, 4, 3, 2) + struct.pack("<3i3q2q", 1, 0, 4, 0, 4, 4, 0, 3),
)
EXTREMES = (0, 1, 2, 0x7F, 0xFF, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def changed(provider: atheris.FuzzedDataProvider) -> bytes:
    """Return an index: bytes as they come, or a valid one with some fields changed and cut."""
    if provider.ConsumeProbability() < 0.2:
        return provider.ConsumeBytes(200)
    content = bytearray(provider.PickValueInList(list(VALID)))
    for _ in range(provider.ConsumeIntInRange(0, 4)):
        place = provider.ConsumeIntInRange(0, len(content) - 1)
        size = provider.PickValueInList([1, 4, 8])
        if provider.ConsumeBool():
            value = provider.PickValueInList(list(EXTREMES))
        else:
            value = provider.ConsumeIntInRange(0, 100)
        content[place : place + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    if provider.ConsumeBool():
        del content[provider.ConsumeIntInRange(0, len(content)) :]
    return bytes(content)


def examine(data: bytes) -> None:
    """Open what the bytes make of an index: `DataError`, or data that agrees with itself."""
    provider = atheris.FuzzedDataProvider(data)
    PREFIX.with_suffix(".idx").write_bytes(changed(provider))
    PREFIX.with_suffix(".bin").write_bytes(bytes(provider.PickValueInList([0, 10, 20, 24, 40])))
    try:
        opened = open_indexed(PREFIX)
    except DataError:
        return
    store = opened.store()
    lengths = [len(store.document(index)) for index in range(store.num_documents)]
    assert sum(lengths) == len(opened.tokens) == int(opened.lengths.sum(dtype="int64"))


if __name__ == "__main__":
    atheris.Setup([*sys.argv, "-max_len=300", "-rss_limit_mb=2048"], examine)
    atheris.Fuzz()
