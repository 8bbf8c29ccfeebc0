# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: byte-level BPE trained on the corpus and cached, or one from a folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from filelock import FileLock

from wavemare.data.text import iterate_texts
from wavemare.errors import ConfigError, DataError, did_you_mean, os_errors
from wavemare.files import discard_folder, remove_leftovers, temporary_sibling

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast


TokenizerKind = Literal["gpt", "bert"]

_FORMAT_VERSION = "1"  # part of every cache key: raise it when training changes
MOST_TRAINED = 1 << 30
"""Bytes of text that a tokenizer is trained on, about."""
PIECE_CHARACTERS = 1 << 18
_LINE_END = re.compile(r"(?<=[^\W_])\n")
_PIECE = 1 << 20  # characters
_NUM_BYTES = 256
_END_OF_TEXT = "<|endoftext|>"
_GPT_ROLES = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), _END_OF_TEXT)
_BERT_ROLES = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
_ROLES = {"gpt": _GPT_ROLES, "bert": _BERT_ROLES}


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, *, kind: TokenizerKind
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; the same texts always give the same tokenizer.

    Args:
        texts: The texts to learn from.
        vocab_size: Number of tokens, special tokens included. A small corpus may yield fewer.
        kind: ``gpt`` has one special token, ``<|endoftext|>``, in all roles; ``bert`` has [PAD],
            [UNK], [CLS], [SEP] and [MASK], and encodes as ``[CLS] a [SEP]`` or
            ``[CLS] a [SEP] b [SEP]``.

    Raises:
        ConfigError: There is no such kind, or the vocabulary cannot hold all bytes and the special
            tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if kind not in _ROLES:
        raise ConfigError("kind", kind, "there is no such kind", did_you_mean(kind, _ROLES))
    roles = _ROLES[kind]
    special_tokens = list(dict.fromkeys(roles.values()))
    smallest = _NUM_BYTES + len(special_tokens)
    if vocab_size < smallest:
        reason = f"a byte-level vocabulary needs {_NUM_BYTES} bytes and {len(special_tokens)} more"
        raise ConfigError("vocab_size", vocab_size, reason, f"Give at least {smallest}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    inputs = ["input_ids", "attention_mask"]
    if kind == "bert":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
        )
        inputs.insert(1, "token_type_ids")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=inputs,
        clean_up_tokenization_spaces=False,
        **roles,
    )


def load_tokenizer(folder: str | Path, option: str = "--tokenizer") -> PreTrainedTokenizerFast:
    """Load a tokenizer that was saved with ``save_pretrained``.

    Args:
        folder: Where.
        option: That names the folder, for messages.

    Raises:
        DataError: The folder is missing, holds no tokenizer, or its tokenizer is not a fast one.
    """
    path = Path(os.path.expanduser(folder))
    remedy = "Name a folder written by save_pretrained, with its tokenizer.json"
    if not path.is_dir():
        raise DataError(option, str(folder), "no such folder exists", remedy)

    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise a bare Exception for bad files
        detail = str(error).splitlines()[0].rstrip(".: ") if str(error) else type(error).__name__
        reason = f"the folder holds no tokenizer that can be loaded: {detail}"
        raise DataError(option, str(folder), reason, remedy) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise DataError(option, str(folder), "its tokenizer has no fast version", remedy)
    return tokenizer


def set_chat_template(tokenizer: PreTrainedTokenizerFast, file: str) -> None:
    """Give a tokenizer the chat template of a file.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        tokenizer.chat_template = Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = f"it cannot be read ({error})"
        raise ConfigError("--chat_template", file, reason, "Name a file") from None


def start_tokens(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the tokens that the tokenizer puts before a text, such as one start token."""
    text = "sea"
    inner = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer(text)["input_ids"]
    places = range(len(whole) - len(inner) + 1)
    at = next((i for i in places if whole[i : i + len(inner)] == inner), 0)
    return list(whole[:at])


def begin_text(
    text: str, tokenizer: PreTrainedTokenizerFast, start: list[int] | None = None
) -> list[int]:
    """Tokenize a text that goes on: one start token, not a second one, and no end token.

    Args:
        text: The text, which may have a start token itself.
        tokenizer: The tokenizer.
        start: Its `start_tokens`, if they are known.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = start_tokens(tokenizer) if start is None else start
    return ids if ids[: len(start)] == start else start + ids


def cached_tokenizer(
    documents: Dataset, vocab_size: int, kind: TokenizerKind, cache_dir: Path
) -> PreTrainedTokenizerFast:
    """Return the tokenizer of `tokenizer_folder`."""
    return load_tokenizer(tokenizer_folder(documents, vocab_size, kind, cache_dir))


def tokenizer_folder(
    documents: Dataset, vocab_size: int, kind: TokenizerKind, cache_dir: Path
) -> Path:
    """Return the folder of the tokenizer trained on these documents; it is trained once.

    Of more than about `MOST_TRAINED` bytes it learns from documents in equal distances.

    Args:
        documents: Texts to learn from, in the column ``text``.
        vocab_size: Number of tokens, special tokens included.
        kind: See `train_tokenizer`.
        cache_dir: Folder of the cache, shared by all processes of a host.

    Raises:
        ConfigError: The vocabulary is too small.
        DataError: The cache cannot be written, or its entry is damaged.
    """
    settings = ("tokenizer", _FORMAT_VERSION, kind, str(vocab_size))
    sample = _sample(documents)
    key = content_key((*settings, content_key(iterate_texts(sample))))
    folder = Path(cache_dir) / f"tokenizer-{key[:32]}"

    def build(target: Path) -> None:
        texts = (piece for text in iterate_texts(sample) for piece in cut_at_lines(text or ""))
        train_tokenizer(texts, vocab_size, kind=kind).save_pretrained(target)

    build_once(folder, build)
    return folder


def _sample(documents: Dataset) -> Dataset:
    """Return documents in equal distances, of about `MOST_TRAINED` bytes in all."""
    stored = documents.data
    total = stored.nbytes * len(documents) // max(stored.num_rows, 1)
    every = -(-total // MOST_TRAINED)
    return documents.select(range(0, len(documents), every)) if every > 1 else documents


def cut_at_lines(text: str, characters: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Cut a long text before line ends that follow a letter or a digit.

    There tokenizers split words that do not treat the beginning of a text in their own way: the
    words are those of the whole text.
    """
    start = 0
    while len(text) - start > characters:
        found = _LINE_END.search(text, start + characters)
        if found is None:
            break
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def content_key(parts: Iterable[str | None]) -> str:
    """Hash a sequence of texts; unequal sequences have unequal keys, however they are divided."""
    digest = hashlib.sha256()
    for part in parts:
        size = sum(map(len, utf8_pieces(part or "")))
        digest.update(size.to_bytes(8))
        for piece in utf8_pieces(part or ""):
            digest.update(piece)
    return digest.hexdigest()


def utf8_pieces(text: str) -> Iterator[bytes]:
    """Yield the bytes of a text, some at a time: a second copy of a long text costs memory."""
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE].encode("utf-8", "surrogatepass")


def build_once(
    folder: Path,
    build: Callable[[Path], object],
    is_whole: Callable[[Path], bool] = lambda folder: True,
) -> None:
    """Fill a cache folder unless it exists.

    Of several processes that ask for the same folder, one builds it and the others wait. The folder
    gets its name when it is complete. If the building fails, those that wait raise the same error;
    if the process is killed, another one builds.

    Args:
        folder: The cache entry.
        build: Fills the empty folder that it is given.
        is_whole: Whether an entry can be used; one that cannot is built again. By default each can.

    Raises:
        DataError: The cache cannot be written, or what ``build`` has raised elsewhere.
    """
    if folder.is_dir() and is_whole(folder):
        return
    what, remedy = "the cache cannot be written", "Free some space, or choose another cache folder"
    with os_errors(DataError, "--cache", str(folder.parent), what, remedy):
        folder.parent.mkdir(parents=True, exist_ok=True)
        asked, failed = time.time_ns(), folder.with_name(f"{folder.name}.failed")
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if folder.is_dir() and is_whole(folder):
                return
            if failed.exists() and failed.stat().st_mtime_ns > asked:  # while this process waited
                raise _read_failure(failed)
            failed.unlink(missing_ok=True)
            try:
                if folder.is_dir():
                    discard_folder(folder)
                _build(folder, build)
            except DataError as error:
                told = [error.key, str(error.value), error.reason, error.remedy]
                failed.write_text(json.dumps(told), encoding="utf-8")
                raise


def _read_failure(file: Path) -> DataError:
    return DataError(*json.loads(file.read_text(encoding="utf-8")))


def _build(folder: Path, build: Callable[[Path], object]) -> None:
    remove_leftovers(folder.parent)
    partial = temporary_sibling(folder)
    partial.mkdir()
    try:
        build(partial)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
