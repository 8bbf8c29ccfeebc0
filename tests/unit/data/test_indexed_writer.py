# SPDX-License-Identifier: Apache-2.0
"""The writer against bytes made by hand from the format, and against Megatron-core's own files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from wavemare.data.indexed_merge import merge_indexed
from wavemare.data.indexed_writer import IndexedWriter, claimed
from wavemare.data.megatron import open_indexed, read_indexed
from wavemare.errors import DataError

# Two documents, of sequences [1, 2], [3] and [500], as unsigned 16-bit numbers.
INDEX = (
    b"MMIDIDX\x00\x00"
    b"\x01\x00\x00\x00\x00\x00\x00\x00"
    b"\x08"
    b"\x03\x00\x00\x00\x00\x00\x00\x00"
    b"\x03\x00\x00\x00\x00\x00\x00\x00"
    b"\x02\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00"
    b"\x00\x00\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00"
    b"\x06\x00\x00\x00\x00\x00\x00\x00"
    b"\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00"
    b"\x03\x00\x00\x00\x00\x00\x00\x00"
)
TOKENS = b"\x01\x00\x02\x00\x03\x00\xf4\x01"

Documents = list[list[list[int]]]


def write(prefix: Path, documents: Documents, dtype: Any = "u2", modes: bool = False) -> None:
    with IndexedWriter(prefix, dtype, modes=modes) as writer:
        for document in documents:
            for number, sequence in enumerate(document):
                writer.add_sequence(sequence, number % 3)
            writer.end_document()


def files(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()


def test_golden_bytes(tmp_path: Path) -> None:
    write(tmp_path / "corpus", [[[1, 2], [3]], [[500]]])
    assert files(tmp_path / "corpus") == (INDEX, TOKENS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.bin", "corpus.idx"]


def test_golden_bytes_with_modes(tmp_path: Path) -> None:
    write(tmp_path / "corpus", [[[1, 2], [3]], [[500]]], modes=True)
    assert files(tmp_path / "corpus") == (INDEX + b"\x00\x01\x00", TOKENS)
    modes = open_indexed(tmp_path / "corpus").modes
    assert modes is not None
    assert modes.tolist() == [0, 1, 0]


DOCUMENTS = st.lists(
    st.lists(st.lists(st.integers(0, 120), max_size=5), max_size=3), min_size=1, max_size=6
)


@settings(max_examples=30)
@given(documents=DOCUMENTS, dtype=st.sampled_from(["u1", "i1", "i2", "i4", "i8", "u2"]))
def test_the_reader_returns_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, documents: Documents, dtype: str
) -> None:
    prefix = tmp_path_factory.mktemp("written") / "a.b"
    write(prefix, documents, dtype)
    data = open_indexed(prefix)
    sequences = [sequence for document in documents for sequence in document]
    store = data.store(sequences=True)
    assert [store.document(i).tolist() for i in range(store.num_documents)] == sequences
    assert np.diff(data.bounds).tolist() == [len(document) for document in documents]
    assert data.tokens.dtype == np.dtype(dtype)


@settings(max_examples=30)
@given(parts=st.lists(DOCUMENTS, min_size=1, max_size=4), modes=st.booleans())
def test_merging_is_writing_one_after_another(
    tmp_path_factory: pytest.TempPathFactory, parts: list[Documents], modes: bool
) -> None:
    folder = tmp_path_factory.mktemp("merged")
    for number, part in enumerate(parts):
        write(folder / str(number), part, modes=modes)
    write(folder / "expected", [document for part in parts for document in part], modes=modes)
    calls: list[tuple[int, int]] = []
    sources = [folder / str(number) for number in range(len(parts))]
    merge_indexed(sources, folder / "merged", progress=lambda *at: calls.append(at))
    assert files(folder / "merged") == files(folder / "expected")
    assert len(calls) == len(parts)
    assert calls[-1][0] == calls[-1][1]


def test_many_sequences_are_written_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [[[number] * (number % 4)] for number in range(50)]
    write(tmp_path / "whole", documents)
    monkeypatch.setattr("wavemare.data.indexed_writer._CHUNK", 7)
    write(tmp_path / "chunks", documents)
    merge_indexed([tmp_path / "whole"], tmp_path / "copy")
    assert files(tmp_path / "chunks") == files(tmp_path / "whole") == files(tmp_path / "copy")


def test_a_writer_that_raises_leaves_no_target(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match=r"70000 do not fit uint16.*wider type"),
        IndexedWriter(tmp_path / "corpus", "u2") as writer,
    ):
        writer.add_sequence([1, 70000])
    assert not list(tmp_path.glob("corpus.*"))


@pytest.mark.parametrize("tokens", [[1.5], [float("nan")], [True], ["1"]])
def test_tokens_are_whole_numbers(tmp_path: Path, tokens: Any) -> None:
    with (
        pytest.raises(DataError, match="tokens are whole numbers, not"),
        IndexedWriter(tmp_path / "corpus", "u2") as writer,
    ):
        writer.add_sequence(tokens)


def test_merging_writes_over_nothing_unasked(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / str(number), [[[number]]])
    before = files(tmp_path / "2")
    with pytest.raises(DataError, match=r"2\.bin exists.*--overwrite"):
        merge_indexed([tmp_path / "1"], tmp_path / "2")
    assert files(tmp_path / "2") == before
    notes = tmp_path / ".3.position.partial"
    notes.write_text("{}")
    with pytest.raises(DataError, match=r"an unfinished build is there.*--overwrite"):
        merge_indexed([tmp_path / "1"], tmp_path / "3")
    with (
        FileLock(tmp_path / ".4.lock.partial"),
        pytest.raises(DataError, match="another process builds it"),
    ):
        merge_indexed([tmp_path / "1"], tmp_path / "4")
    for target in ("2", "3"):
        merge_indexed([tmp_path / "1"], tmp_path / target, overwrite=True)
        assert files(tmp_path / target) == files(tmp_path / "1")
    left = {path.name for path in tmp_path.iterdir()} - {".4.lock.partial"}
    assert left == {f"{name}.{end}" for name in "123" for end in ("bin", "idx")}
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(DataError, match="the target is one of"):
        merge_indexed([tmp_path / "1"], tmp_path / "link" / "1", overwrite=True)


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[1]]])
    write(tmp_path / "b", [[[1]]], "i4")
    write(tmp_path / "c", [[[1]]], modes=True)
    with pytest.raises(DataError, match=r"type of tokens is int32 where that of .*a is uint16"):
        merge_indexed([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    with pytest.raises(DataError, match=r"kind is multimodal where that of .*a is plain"):
        merge_indexed([tmp_path / "a", tmp_path / "c"], tmp_path / "out")
    with pytest.raises(DataError, match="the target is one of"):
        merge_indexed([tmp_path / "a"], tmp_path / "a")
    with pytest.raises(DataError, match="nothing to merge"):
        merge_indexed([], tmp_path / "out")
    with pytest.raises(DataError, match=r"no such type.*uint16"):
        IndexedWriter(tmp_path / "out", "f4")
    assert files(tmp_path / "a") == (
        struct.pack("<9sQBQQiqqq", b"MMIDIDX\0\0", 1, 8, 1, 2, 1, 0, 0, 1),
        b"\1\0",
    )


@pytest.fixture
def megatron() -> Any:
    reason = "megatron-core is not installed (pip install megatron-core)"
    return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason=reason)


@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_megatron_core_writes_and_reads_the_same(
    tmp_path: Path, megatron: Any, dtype: str, modes: bool
) -> None:
    draw = np.random.default_rng(3)
    shapes = [[int(n) for n in draw.integers(0, 9, size=draw.integers(1, 4))] for _ in range(20)]
    documents = [[draw.integers(0, 60000, size=n).tolist() for n in shape] for shape in shapes]
    write(tmp_path / "ours", documents, dtype, modes)
    builder = megatron.IndexedDatasetBuilder(
        str(tmp_path / "theirs.bin"), dtype=getattr(np, dtype), multimodal=modes
    )
    for document in documents:
        for number, sequence in enumerate(document):
            builder.add_item(torch.tensor(sequence, dtype=torch.int64), number % 3)
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    read = megatron.IndexedDataset(str(tmp_path / "ours"), multimodal=modes)
    sequences = [sequence for document in documents for sequence in document]
    found = [read[i][0] if modes else read[i] for i in range(len(read))]
    assert [sequence.tolist() for sequence in found] == sequences
    store = read_indexed(tmp_path / "theirs")
    assert store.tokens.tolist() == [token for sequence in sequences for token in sequence]


def test_megatron_core_merges_alike(tmp_path: Path, megatron: Any) -> None:
    write(tmp_path / "a", [[[1, 2], []], [[3]]])
    write(tmp_path / "b", [[[4]], [[5, 6, 7], [8]]])
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for name in ("a", "b"):
        builder.add_index(str(tmp_path / name))
    builder.finalize(str(tmp_path / "theirs.idx"))
    merge_indexed([tmp_path / "a", tmp_path / "b"], tmp_path / "ours")
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")


@pytest.mark.parametrize("prefix", ["/proc/nosuch/x", "{folder}/file/x", ".", "/"])
def test_a_place_where_nothing_can_be_written(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError) as caught, claimed(Path(prefix.format(folder=tmp_path))):
        pass
    assert caught.value.key == "--output"
