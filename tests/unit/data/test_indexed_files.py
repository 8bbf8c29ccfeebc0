# SPDX-License-Identifier: Apache-2.0
"""``.bin`` and ``.idx``: bytes made by hand, an independent writer, and Megatron-core's files."""

import resource
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.refusals import refuses
from wavemare.data.indexed import IndexedWriter, merge_indexed, open_indexed, read_indexed
from wavemare.errors import DataError

CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "u2": 8}


def write(prefix, documents, dtype="u2"):
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()


def files(prefix):
    return Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()


def slow_files(documents, dtype):
    """Return the bytes of both files, made value by value from the description of the format."""
    sequences = [sequence for document in documents for sequence in document]
    size = np.dtype(dtype).itemsize
    index = b"MMIDIDX\0\0" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype])
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents) + 1)
    for sequence in sequences:
        index += struct.pack("<i", len(sequence))
    position = 0
    for sequence in sequences:
        index += struct.pack("<q", position)
        position += len(sequence) * size
    bound = 0
    index += struct.pack("<q", 0)
    for document in documents:
        bound += len(document)
        index += struct.pack("<q", bound)
    tokens = [token for sequence in sequences for token in sequence]
    return index, np.array(tokens, dtype=f"<{dtype}").tobytes()


DOCUMENTS = st.lists(
    st.lists(st.lists(st.integers(0, 120), max_size=5), max_size=3), min_size=1, max_size=6
)


@settings(max_examples=50)
@given(documents=DOCUMENTS, dtype=st.sampled_from(sorted(CODES)))
@example(documents=[[[1, 2], [3]], [[500]]], dtype="u2")
def test_files_of_any_data(tmp_path_factory, documents, dtype):
    prefix = tmp_path_factory.mktemp("written") / "a.b"
    write(prefix, documents, dtype)
    assert files(prefix) == slow_files(documents, dtype)
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["a.b.bin", "a.b.idx"]
    data = open_indexed(prefix)
    sequences = [sequence for document in documents for sequence in document]
    store = data.store(sequences=True)
    assert [store.document(i).tolist() for i in range(store.num_documents)] == sequences
    flat = [[token for sequence in document for token in sequence] for document in documents]
    if not any(flat):
        with refuses(DataError, "--data", str(prefix)):
            read_indexed(prefix)
        return
    store = read_indexed(prefix)
    assert [store.document(i).tolist() for i in range(store.num_documents)] == flat
    assert store.tokens.dtype == np.dtype(dtype)
    assert isinstance(store.tokens, np.memmap)
    assert store.vocab_size == max(token for document in flat for token in document) + 1
    assert read_indexed(prefix, vocab_size=600).vocab_size == 600


@pytest.mark.parametrize("extension", ["", ".bin", ".idx"])
def test_an_open_document_ends_with_the_file_which_may_be_named_as_well(tmp_path, extension):
    with IndexedWriter(f"{tmp_path}/a.b{extension}", "u2") as writer:
        writer.add_sequence([1, 2])
        writer.end_document()
        writer.add_sequence([3])
        writer.add_sequence([4])
    assert files(tmp_path / "a.b") == slow_files([[[1, 2]], [[3], [4]]], "u2")
    assert read_indexed(f"{tmp_path}/a.b{extension}").document(1).tolist() == [3, 4]
    write(tmp_path / "other", [[[9]]])
    for end in ("bin", "idx"):  # a data set of that very prefix
        (tmp_path / f"other.{end}").rename(f"{tmp_path}/a.b.bin.{end}")
    assert read_indexed(tmp_path / "a.b.bin").document(0).tolist() == [9]
    assert read_indexed(tmp_path / "a.b.idx").document(0).tolist() == [1, 2]


@settings(max_examples=15)
@given(parts=st.lists(DOCUMENTS, min_size=1, max_size=4))
def test_merging_is_writing_one_after_another(tmp_path_factory, parts):
    folder = tmp_path_factory.mktemp("merged")
    for number, part in enumerate(parts):
        write(folder / str(number), part)
    write(folder / "expected", [document for part in parts for document in part])
    sources = [folder / str(number) for number in range(len(parts))]
    merge_indexed(sources, folder / "merged")
    assert files(folder / "merged") == files(folder / "expected")


def test_a_writer_that_raises_leaves_no_target(tmp_path):
    with (
        refuses(DataError, str(tmp_path / "corpus"), "tokens"),
        IndexedWriter(tmp_path / "corpus", "u2") as writer,
    ):
        writer.add_sequence([1, 70000])
    assert not list(tmp_path.glob("corpus.*"))


@pytest.mark.parametrize("tokens", [10, 100_000])
def test_a_full_disk_leaves_nothing(tmp_path, tokens):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))  # a write beyond it raises OSError
    try:
        with (
            refuses(DataError, "--output", str(tmp_path / "x")),
            IndexedWriter(tmp_path / "x", np.int32) as writer,
        ):
            writer.add_sequence(np.arange(tokens))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tokens", [[1.5], [float("nan")], [True], ["1"]])
def test_tokens_are_whole_numbers(tmp_path, tokens):
    with (
        refuses(DataError, str(tmp_path / "corpus"), "tokens"),
        IndexedWriter(tmp_path / "corpus", "u2") as writer,
    ):
        writer.add_sequence(tokens)


def test_merging_writes_over_nothing_unasked(tmp_path):
    for number in (1, 2):
        write(tmp_path / str(number), [[[number]]])
    before = files(tmp_path / "2")
    with refuses(DataError, "--output", str(tmp_path / "2")):
        merge_indexed([tmp_path / "1"], tmp_path / "2")
    assert files(tmp_path / "2") == before
    merge_indexed([tmp_path / "1"], tmp_path / "2", overwrite=True)
    assert files(tmp_path / "2") == files(tmp_path / "1")
    assert {path.name for path in tmp_path.iterdir()} == {"1.bin", "1.idx", "2.bin", "2.idx"}
    (tmp_path / "link").symlink_to(tmp_path)
    with refuses(DataError, "--output", str(tmp_path / "link" / "1")):
        merge_indexed([tmp_path / "1"], tmp_path / "link" / "1", overwrite=True)


def test_what_cannot_be_merged(tmp_path):
    write(tmp_path / "a", [[[1]]])
    write(tmp_path / "b", [[[1]]], "i4")
    with refuses(DataError, "PREFIX", str(tmp_path / "b")):
        merge_indexed([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    with refuses(DataError, "PREFIX", []):
        merge_indexed([], tmp_path / "out")
    with refuses(DataError, "dtype", "float32"):
        IndexedWriter(tmp_path / "out", "f4")
    assert files(tmp_path / "a") == (
        struct.pack("<9sQBQQiqqq", b"MMIDIDX\0\0", 1, 8, 1, 2, 1, 0, 0, 1),
        b"\1\0",
    )


@pytest.fixture
def megatron():
    reason = "megatron-core is not installed (pip install megatron-core)"
    return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason=reason)


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_megatron_core_writes_and_reads_the_same(tmp_path, megatron, dtype):
    draw = np.random.default_rng(3)
    shapes = [[int(n) for n in draw.integers(0, 9, size=draw.integers(1, 4))] for _ in range(20)]
    documents = [[draw.integers(0, 60000, size=n).tolist() for n in shape] for shape in shapes]
    write(tmp_path / "ours", documents, dtype)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=getattr(np, dtype))
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    read = megatron.IndexedDataset(str(tmp_path / "ours"))
    sequences = [sequence for document in documents for sequence in document]
    assert [read[i].tolist() for i in range(len(read))] == sequences
    type(read.index).__getitem__.cache_clear()  # it holds the reader, with the file open
    store = read_indexed(tmp_path / "theirs")
    assert store.tokens.tolist() == [token for sequence in sequences for token in sequence]


@pytest.mark.parametrize("prefix", ["/proc/nosuch/x", "{folder}/file/x", ".", "/"])
def test_a_place_where_nothing_can_be_written(tmp_path, prefix):
    (tmp_path / "file").touch()
    with pytest.raises(DataError) as caught:
        IndexedWriter(prefix.format(folder=tmp_path), "u2")
    assert caught.value.key == "--output"
