# SPDX-License-Identifier: Apache-2.0
"""``wavemare data``: text to Megatron's files, in many processes, through a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from filelock import FileLock
from typer.testing import CliRunner

from wavemare.cli import app
from wavemare.data import indexed_build
from wavemare.data.documents import Document
from wavemare.data.indexed_build import build_indexed
from wavemare.data.megatron import open_indexed, read_indexed
from wavemare.data.tokens import tokenize
from wavemare.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def files(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()


def build(
    documents: list[Document], tokenizer: PreTrainedTokenizerFast, prefix: Path, **options: object
) -> None:
    build_indexed(documents, tokenizer, prefix, **{"identity": "texts", **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [1, 2])
def test_tokens_are_those_of_tokenize(
    tmp_path: Path,
    documents: list[Document],
    gpt_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
) -> None:
    monkeypatch.setattr(indexed_build, "_BATCH_CHARACTERS", 500)
    special = Document("forged", "the end<|endoftext|>of a text\nthat goes on\n" * 3)
    documents = [*documents, special, Document("blank", " \n")]
    calls: list[tuple[int, int]] = []
    build(
        documents,
        gpt_tokenizer,
        tmp_path / "c",
        workers=workers,
        progress=lambda *at: calls.append(at),
    )
    expected = tokenize(documents[:-1], gpt_tokenizer, tmp_path / "cache")
    found = read_indexed(tmp_path / "c")
    assert np.array_equal(found.tokens, expected.tokens)
    assert np.array_equal(found.offsets, expected.offsets)
    assert found.tokens.dtype == np.uint16
    assert calls[0] == (0, len(documents))
    assert calls[-1] == (len(documents), len(documents))
    assert sorted(path.name for path in tmp_path.glob("*c.*")) == ["c.bin", "c.idx"]


def test_without_end_tokens(
    tmp_path: Path, documents: list[Document], gpt_tokenizer: PreTrainedTokenizerFast
) -> None:
    build(documents, gpt_tokenizer, tmp_path / "with")
    build(documents, gpt_tokenizer, tmp_path / "without", append_eod=False)
    first = read_indexed(tmp_path / "with").document(0).tolist()
    assert first[-1] == gpt_tokenizer.eos_token_id
    assert read_indexed(tmp_path / "without").document(0).tolist() == first[:-1]


def test_memory_does_not_grow_with_the_corpus(
    tmp_path: Path, gpt_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more documents are read than the processes' batches hold, and none twice."""
    monkeypatch.setattr(indexed_build, "_BATCH_CHARACTERS", 300)
    read: list[int] = []
    written: list[int] = []

    class Counted(list[Document]):
        def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
            read.append(index)
            return Document("", "some words " * 10)

        def __len__(self) -> int:
            return 500

    ahead: list[int] = []

    def note(done: int, total: int) -> None:
        written.append(done)
        ahead.append(len(read) - done)

    build(Counted(), gpt_tokenizer, tmp_path / "c", workers=2, progress=note)
    per_batch = 3  # documents of 110 characters that reach 300
    assert read == list(range(500))
    assert max(ahead) <= (2 * 2 + 1) * per_batch
    assert written[-1] == 500


KILLED = """
import os, signal, sys
from pathlib import Path
from wavemare.data import all_documents, build_indexed, indexed_build, load_tokenizer, resolve

def note(done, total):
    if done >= int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    indexed_build._BATCH_CHARACTERS, indexed_build._SAVED_BATCHES = 400, 3
    documents, identity = all_documents(resolve(sys.argv[1]))
    build_indexed(documents, load_tokenizer(sys.argv[2]), sys.argv[3], identity=identity,
                  workers=2, progress=note)
"""


def test_a_killed_build_goes_on_to_the_same_bytes(
    tmp_path: Path,
    texts: list[str],
    gpt_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from wavemare.data import all_documents, resolve

    gpt_tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number:03}.txt").write_text(text)
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    arguments = [str(tmp_path / "texts"), str(tmp_path / "tokenizer"), str(tmp_path / "c")]
    killed = subprocess.run(  # returns when the pool's processes have closed its output, too
        [sys.executable, str(program), *arguments, "20"],
        timeout=120,
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not list(tmp_path.glob("c.*"))

    monkeypatch.setattr(indexed_build, "_BATCH_CHARACTERS", 700)
    documents, identity = all_documents(resolve(str(tmp_path / "texts")))
    left = json.loads((tmp_path / ".c.position.partial").read_text())
    assert 0 < left["documents_read"] < 20
    for name in ("bin", "lengths", "bounds"):  # as if more had reached the disk than was noted
        with (tmp_path / f".c.{name}.partial").open("ab") as file:
            file.write(b"more of it")
    with pytest.raises(DataError, match=r"unfinished build of other text.*--overwrite"):
        build_indexed(documents, gpt_tokenizer, tmp_path / "c", identity="other")
    calls: list[int] = []
    build_indexed(
        documents,
        gpt_tokenizer,
        tmp_path / "c",
        identity=identity,
        progress=lambda done, _: calls.append(done),
    )
    assert calls[0] == left["documents_read"]
    build_indexed(documents, gpt_tokenizer, tmp_path / "whole", identity=identity)
    assert files(tmp_path / "c") == files(tmp_path / "whole")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("before", range(1, 12))
def test_a_build_that_is_killed_while_it_ends(
    tmp_path: Path,
    documents: list[Document],
    gpt_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    before: int,
) -> None:
    """Before each change of a name from the last saving on, with an older target there."""
    build(documents, gpt_tokenizer, tmp_path / "whole")
    build(documents[:1], gpt_tokenizer, tmp_path / "c", identity="older")

    class Killed(BaseException):
        pass

    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == before:
            raise Killed

    replace, unlink = os.replace, Path.unlink

    def counted_replace(source: object, target: object) -> None:
        step()
        replace(source, target)  # type: ignore[arg-type]

    def counted_unlink(path: Path, missing_ok: bool = False) -> None:
        step()
        unlink(path, missing_ok)

    # A kill does not give a lock back.
    monkeypatch.setattr(indexed_build, "claimed", lambda prefix: nullcontext())
    monkeypatch.setattr("os.replace", counted_replace)
    monkeypatch.setattr(Path, "unlink", counted_unlink)
    try:
        build(documents, gpt_tokenizer, tmp_path / "c", overwrite=True)
    except Killed:
        monkeypatch.undo()
        # Killed before anything was noted, the older target is still whole.
        began = (tmp_path / ".c.position.partial").exists()
        build(documents, gpt_tokenizer, tmp_path / "c", overwrite=not began)
    else:
        monkeypatch.undo()
        assert before > steps >= 9
    assert files(tmp_path / "c") == files(tmp_path / "whole")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".c")]


def test_a_position_without_its_files_is_refused(
    tmp_path: Path, documents: list[Document], gpt_tokenizer: PreTrainedTokenizerFast
) -> None:
    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done:
            raise Stop

    with pytest.raises(Stop):
        build(documents, gpt_tokenizer, tmp_path / "c", progress=stop)
    notes = tmp_path / ".c.position.partial"
    left = json.loads(notes.read_text())
    left["written"] = {"tokens": 10, "sequences": 2, "documents": 2}
    notes.write_text(json.dumps(left))
    (tmp_path / ".c.lengths.partial").write_bytes(b"")
    with pytest.raises(DataError, match="0 bytes where 8 were written before"):
        build(documents, gpt_tokenizer, tmp_path / "c")
    build(documents, gpt_tokenizer, tmp_path / "c", overwrite=True)
    assert read_indexed(tmp_path / "c").num_documents == len(documents)


def test_refusals(
    tmp_path: Path, documents: list[Document], gpt_tokenizer: PreTrainedTokenizerFast
) -> None:
    build(documents, gpt_tokenizer, tmp_path / "c")
    before = files(tmp_path / "c")
    with pytest.raises(DataError, match=r"c\.bin exists.*--overwrite"):
        build(documents[:2], gpt_tokenizer, tmp_path / "c")
    assert files(tmp_path / "c") == before
    with pytest.raises(DataError, match="holds no text besides blanks"):
        build([Document("", "  ")], gpt_tokenizer, tmp_path / "empty")
    assert not list(tmp_path.glob("*empty*"))
    lock = FileLock(tmp_path / ".d.lock.partial")
    with lock, pytest.raises(DataError, match="another process builds it"):
        build(documents, gpt_tokenizer, tmp_path / "d")


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands(tmp_path: Path, gpt_tokenizer: PreTrainedTokenizerFast) -> None:
    gpt_tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [{"body": "sea wave"}, {"body": "  "}, {"body": "tide pipe stage"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    options = ("--tokenizer", tmp_path / "tokenizer", "--text-column", "body", "--workers", 1)
    shown = run("build", tmp_path / "rows.jsonl", "--output", tmp_path / "a", *options)
    assert "a: 2 documents," in shown
    assert "3 of 3 documents" in shown
    run("merge", tmp_path / "a", tmp_path / "a", "--output", tmp_path / "b")
    data = open_indexed(tmp_path / "b")
    assert len(data.bounds) == 5
    facts = json.loads(run("inspect", tmp_path / "b", "--json"))
    assert facts["documents"] == facts["sequences"] == 4
    assert facts["type"] == "uint16"
    assert facts["tokens"] == len(data.tokens) == data.lengths.sum()
    assert facts["longest"] == data.lengths.max()
    text = run("inspect", tmp_path / "b", "--tokenizer", tmp_path / "tokenizer", "--documents", 2)
    assert "'sea wave<|endoftext|>'" in text
    assert "'tide pipe stage<|endoftext|>'" in text
