# SPDX-License-Identifier: Apache-2.0
"""Bytes that are copied from file to file, and compared by their checksums."""

import itertools
import random
import time

import pytest

from wavemare.errors import CheckpointError
from wavemare.models.source import Span
from wavemare.models.spans import Copied, chunks, equal, within

SIZE = 2_000_000  # bytes: several times the buffer


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return path


def pieces(path, cuts):
    return [Span(path, a, b - a) for a, b in itertools.pairwise(cuts)]


def copy(spans, path, copied):
    path.write_bytes(b"".join(bytes(part) for part in chunks(spans, copied)))
    return Span(path, 0, path.stat().st_size)


def test_parts_in_another_order_are_compared_without_the_source(source, tmp_path):
    """As query, key and value are mixed: two weights, of which runs stand in turns."""
    one = pieces(source, [0, 300_000, 600_000, 900_000])
    other = pieces(source, [900_000, 900_001, 1_900_000, SIZE])
    mixed = [span for pair in zip(one, other, strict=True) for span in pair]
    copied = Copied()
    whole = copy(mixed, tmp_path / "copy", copied)
    content = source.read_bytes()
    assert whole.file.read_bytes() == b"".join(content[s.start : s.start + s.length] for s in mixed)
    source.unlink()
    starts = list(itertools.accumulate((span.length for span in mixed), initial=0))
    first = [s for a in (0, 2, 4) for s in within([whole], starts[a], mixed[a].length)]
    second = [s for a in (1, 3, 5) for s in within([whole], starts[a], mixed[a].length)]
    assert equal([Span(source, 0, 900_000)], first, copied)
    assert equal(other, second, copied)
    assert not equal(one, first[::-1], copied)
    assert not equal(one, second, copied)
    for place in (starts[2], starts[3] - 1):  # the ends of a run of the first
        damaged = bytearray(whole.file.read_bytes())
        damaged[place] ^= 1
        whole.file.write_bytes(damaged)
        assert not equal(one, first, copied)
        assert equal(other, second, copied)
        damaged[place] ^= 1
        whole.file.write_bytes(damaged)


def test_a_part_stays_while_the_next_is_read(source):
    """A disk that is slower than the reader gets the same bytes."""
    found = []
    for part in chunks([Span(source, 0, SIZE)]):
        time.sleep(0.05)
        found.append(bytes(part))
    assert len(found) > 2
    assert b"".join(found) == source.read_bytes()


@pytest.mark.parametrize("cuts", [[0, SIZE - 1], [1, SIZE], [0, 10, SIZE]])
def test_what_was_not_copied_so_is_read(source, tmp_path, cuts):
    copied = Copied()
    whole = copy(pieces(source, [0, SIZE]), tmp_path / "copy", Copied())
    copy([Span(source, cuts[0], cuts[-1] - cuts[0])], tmp_path / "part", copied)
    asked = pieces(source, [0, SIZE]) if len(cuts) == 2 else pieces(source, cuts)
    assert equal(asked, [whole], copied)
    first = [Span(source, 0, 5)], within([whole], 0, 5)
    assert equal(*first, copied)
    source.unlink()
    for pair in ((asked, [whole]), first):
        with pytest.raises(CheckpointError):
            equal(*pair, copied)
