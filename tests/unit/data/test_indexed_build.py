# SPDX-License-Identifier: Apache-2.0
"""``wavemare data``: text to Megatron's files, in many processes, through a kill."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from wavemare.cli import app
from wavemare.data import all_documents, resolve
from wavemare.data.documents import Document
from wavemare.data.indexed_build import build_indexed
from wavemare.data.megatron import open_indexed, read_indexed
from wavemare.data.tokens import tokenize
from wavemare.errors import DataError


def files(prefix):
    return Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()


def build(documents, tokenizer, prefix, **options):
    build_indexed(documents, tokenizer, prefix, **{"identity": "texts", **options})


@pytest.mark.parametrize("workers", [1, 2])
def test_tokens_are_those_of_tokenize(tmp_path, documents, gpt_tokenizer, workers):
    special = Document("forged", "the end<|endoftext|>of a text\nthat goes on\n" * 3)
    documents = [*documents, special, Document("blank", " \n")]
    calls = []
    options = {"workers": workers, "progress": lambda *at: calls.append(at)}
    build(documents, gpt_tokenizer, tmp_path / "c", batch_characters=500, **options)
    expected = tokenize(documents[:-1], gpt_tokenizer, tmp_path / "cache")
    found = read_indexed(tmp_path / "c")
    assert np.array_equal(found.tokens, expected.tokens)
    assert np.array_equal(found.offsets, expected.offsets)
    assert found.tokens.dtype == np.uint16
    assert calls[0] == (0, len(documents))
    assert calls[-1] == (len(documents), len(documents))
    assert len(calls) > 5
    assert sorted(path.name for path in tmp_path.glob("*c.*")) == ["c.bin", "c.idx"]


def test_without_end_tokens(tmp_path, documents, gpt_tokenizer):
    build(documents, gpt_tokenizer, tmp_path / "with")
    build(documents, gpt_tokenizer, tmp_path / "without", append_eod=False)
    first = read_indexed(tmp_path / "with").document(0).tolist()
    assert first[-1] == gpt_tokenizer.eos_token_id
    assert read_indexed(tmp_path / "without").document(0).tolist() == first[:-1]


def stop(done, total):
    if done >= 20:
        raise InterruptedError


KILLED = """
import os, signal, sys
from wavemare.data import all_documents, build_indexed, load_tokenizer, resolve

def note(done, total):
    if done >= 20:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    documents, identity = all_documents(resolve(sys.argv[1]))
    build_indexed(documents, load_tokenizer(sys.argv[2]), sys.argv[3], identity=identity,
                  workers=2, batch_characters=1, progress=note)
"""


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_an_unfinished_build_goes_on_to_the_same_bytes(tmp_path, texts, gpt_tokenizer, killed):
    gpt_tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number:03}.txt").write_text(text)
    documents, identity = all_documents(resolve(str(tmp_path / "texts")))
    target = tmp_path / "c"
    if killed:
        (tmp_path / "killed.py").write_text(KILLED)
        words = [tmp_path / "killed.py", tmp_path / "texts", tmp_path / "tokenizer", target]
        # Returns when the pool's processes have closed its output, too.
        ended = subprocess.run([sys.executable, *words], capture_output=True, check=False)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    else:
        options = {"identity": identity, "batch_characters": 1, "progress": stop}
        with pytest.raises(InterruptedError):
            build_indexed(documents, gpt_tokenizer, target, **options)
    assert not list(tmp_path.glob("c.*"))
    for name in ("bin", "lengths", "bounds"):  # as if more had reached the disk than was noted
        with (tmp_path / f".c.{name}.partial").open("ab") as file:
            file.write(b"more of it")
    with pytest.raises(DataError, match=r"unfinished build of other text.*--overwrite"):
        build_indexed(documents, gpt_tokenizer, target, identity="other")
    calls = []
    progress = lambda done, _: calls.append(done)  # noqa: E731
    build_indexed(documents, gpt_tokenizer, target, identity=identity, progress=progress)
    assert 0 < calls[0] < 20
    build_indexed(documents, gpt_tokenizer, tmp_path / "whole", identity=identity)
    assert files(target) == files(tmp_path / "whole")
    assert not list(tmp_path.glob(".*"))


def test_a_build_stopped_between_its_two_files_ends_with_both(
    tmp_path, documents, gpt_tokenizer, monkeypatch
):
    build(documents, gpt_tokenizer, tmp_path / "whole")
    replace = os.replace

    def stop(source, target):
        if Path(target).suffix == ".idx":
            raise InterruptedError
        replace(source, target)

    monkeypatch.setattr("os.replace", stop)
    with pytest.raises(InterruptedError):
        build(documents, gpt_tokenizer, tmp_path / "c")
    monkeypatch.undo()
    assert (tmp_path / "c.bin").exists()
    assert not (tmp_path / "c.idx").exists()
    build(documents, gpt_tokenizer, tmp_path / "c")
    assert files(tmp_path / "c") == files(tmp_path / "whole")
    assert not list(tmp_path.glob(".c*"))


def test_an_unfinished_build_without_its_files_is_refused(tmp_path, documents, gpt_tokenizer):
    with pytest.raises(InterruptedError):
        build(documents, gpt_tokenizer, tmp_path / "c", batch_characters=1, progress=stop)
    (tmp_path / ".c.lengths.partial").write_bytes(b"")
    with pytest.raises(DataError, match="0 bytes where 64 were written before"):
        build(documents, gpt_tokenizer, tmp_path / "c")
    build(documents, gpt_tokenizer, tmp_path / "c", overwrite=True)
    assert read_indexed(tmp_path / "c").num_documents == len(documents)


def test_refusals(tmp_path, documents, gpt_tokenizer):
    build(documents, gpt_tokenizer, tmp_path / "c")
    before = files(tmp_path / "c")
    with pytest.raises(DataError, match=r"c\.bin exists.*--overwrite"):
        build(documents[:2], gpt_tokenizer, tmp_path / "c")
    assert files(tmp_path / "c") == before
    with pytest.raises(DataError, match="holds no text besides blanks"):
        build([Document("", "  ")], gpt_tokenizer, tmp_path / "empty")
    assert not list(tmp_path.glob("*empty*"))


def run(*arguments):
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands(tmp_path, gpt_tokenizer):
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
