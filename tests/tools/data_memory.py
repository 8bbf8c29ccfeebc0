# SPDX-License-Identifier: Apache-2.0
"""Measure what memory a rank's data takes: made text, read for the first time and again.

::

    python tests/tools/data_memory.py rows --tokens 100000000 --folder /tmp/made

``rows`` are JSON lines of one document each, ``file`` is one text file, ``chats`` are prompts and
completions to fine-tune on. The text is made once in the folder, by another process. Prints a JSON
object: most bytes of resident memory, files that are mapped included, above those of the imports,
of the process that builds the cache, and of one that opens it, samples and resumes.
"""

import argparse
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

WORDS, LETTERS, PART = 50_000, 9, 20_000
TOKENS_PER_WORD = 2.0  # with the vocabulary below: about
VOCABULARY, LENGTH = 4096, 128
KINDS = {"rows": "rows.jsonl", "file": "text.txt", "chats": "chats.jsonl"}


def make(kind: str, tokens: int, folder: Path, words_per_row: int = 400) -> Path:
    """Write text of so many tokens, in which words are as frequent as in Zipf's law."""
    import numpy as np

    target = folder / KINDS[kind]
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    letters = draw.integers(97, 123, (WORDS, LETTERS), dtype=np.uint8)
    sizes = draw.integers(2, LETTERS + 1, WORDS)
    words = np.array([bytes(w[:size]).decode() for w, size in zip(letters, sizes, strict=True)])
    chances = 1.0 / np.arange(1, WORDS + 1)
    chances /= chances.sum()
    left = round(tokens / TOKENS_PER_WORD)
    with target.with_suffix(".part").open("w") as file:
        while left > 0:
            drawn = words[draw.choice(WORDS, min(left, PART * 10), p=chances)].tolist()
            left -= len(drawn)
            for start in range(0, len(drawn), words_per_row):
                text = " ".join(drawn[start : start + words_per_row])
                row: dict[str, str] = {"text": text}
                if kind == "chats":
                    row = {"prompt": text[: len(text) // 3], "completion": text[len(text) // 3 :]}
                file.write(text + "\n" if kind == "file" else json.dumps(row) + "\n")
    return target.with_suffix(".part").rename(target)


def memory(name: str) -> int:
    """Return a field of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise KeyError(name)


def run(kind: str, file: Path, cache: Path) -> dict[str, int]:
    """Read data, sample and resume as a rank does; return what memory that took."""
    import datasets

    from wavemare.data.chat import ChatSamples, prepare_chats
    from wavemare.data.encode import build_indexed  # noqa: F401
    from wavemare.data.loader import ResumableLoader, evaluation_batches
    from wavemare.data.sources import resolve
    from wavemare.data.tokenizer import load_tokenizer
    from wavemare.recipes.gpt.pretrain import PretrainArguments
    from wavemare.training.text import find_data, read_text

    datasets.config.HF_DATASETS_CACHE = cache / "datasets"
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    if kind == "chats":
        tokenizer = load_tokenizer(cache.parent / "tokenizer")
        train, held = prepare_chats(resolve(str(file)), tokenizer, 512, cache)
        options = {"max_length": 512, "fill": 0, "positions": True}
        samples = ChatSamples(train, packs=True, **options)
        validation = ChatSamples(held, packs=False, **options)
        tokens = int(train.lengths.sum() + held.lengths.sum())
    else:
        options = {"data": str(file), "cache": str(cache), "sequence_length": LENGTH}
        arguments = PretrainArguments(**options, vocab_size=VOCABULARY)
        text = read_text(find_data(arguments), arguments, special_tokens="gpt")
        samples, validation = text.causal_samples(LENGTH, num_samples=0, seed=0)
        tokens = sum(store.num_tokens for store in text.single())
        text.baselines(LENGTH, 8192)
    loader = ResumableLoader(samples, micro_batch_size=8, data_rank=0, data_world_size=1, seed=0)
    for _ in range(2000):
        next(loader)
    loader.load_state_dict({**loader.state_dict(), "consumed_samples": len(samples) - 4})
    next(loader)
    for _ in islice(evaluation_batches(validation, 8, limit=8192), 1000):
        pass
    return {"tokens": tokens, "bytes": memory("VmHWM") - before}


def measure(
    kind: str, tokens: int, folder: Path, names: tuple[str, ...] = ("build", "open")
) -> dict[str, dict[str, int]]:
    """Measure a first and later readings, each in a process of its own."""
    file = make(kind, tokens, folder)
    if kind == "chats" and not (folder / "tokenizer").exists():
        from wavemare.data.tokenizer import train_tokenizer

        with file.open() as lines:
            texts = ["".join(json.loads(line).values()) for line in islice(lines, 2000)]
        train_tokenizer(texts, VOCABULARY, kind="gpt").save_pretrained(folder / "tokenizer")
    found = {}
    for name in names:
        words = [sys.executable, __file__, kind, "--folder", str(folder), "--inner", str(file)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--inner", type=Path)
    given = parser.parse_args()
    if given.inner is not None:
        print(json.dumps(run(given.kind, given.inner, given.folder / "cache")))
    else:
        print(json.dumps(measure(given.kind, given.tokens, given.folder), indent=2))
