# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.refusals import refuses
from wavemare.data.tokenizer import (
    build_once,
    cached_tokenizer,
    cut_at_lines,
    load_tokenizer,
    train_tokenizer,
)
from wavemare.errors import ConfigError, DataError

PROGRAM = """
from wavemare.data.tokenizer import train_tokenizer
texts = [f"{i} the wave {i * 7 % 13} pipe" * 3 for i in range(200)]
print(train_tokenizer(texts, 320, kind="bert").backend_tokenizer.to_str())
"""


def test_training_is_the_same_in_every_process(capsys):
    exec(PROGRAM, {})
    run = [sys.executable, "-c", PROGRAM]
    there = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    assert there == capsys.readouterr().out


def test_gpt_roles(gpt_tokenizer):
    t = gpt_tokenizer
    assert t.eos_token_id == t.bos_token_id == t.pad_token_id == t.unk_token_id == 0
    assert t.all_special_ids == [0]
    assert len(t) == 280
    assert set(t("a wave")) == {"input_ids", "attention_mask"}


def test_bert_roles_and_template(bert_tokenizer):
    t = bert_tokenizer
    assert t.convert_ids_to_tokens(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert sorted(t.all_special_ids) == [0, 1, 2, 3, 4]
    plain = [t(text, add_special_tokens=False)["input_ids"] for text in ("wave", "tide")]
    pair = t("wave", "tide")
    assert pair["input_ids"] == [2, *plain[0], 3, *plain[1], 3]
    assert pair["token_type_ids"] == [0] * (len(plain[0]) + 2) + [1] * (len(plain[1]) + 1)
    assert t("wave")["input_ids"] == [2, *plain[0], 3]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_every_text_survives(gpt_tokenizer, text):
    ids = gpt_tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert gpt_tokenizer.decode(ids) == text


@pytest.mark.parametrize(("kind", "smallest"), [("gpt", 257), ("bert", 261)])
def test_too_small_a_vocabulary(kind, smallest):
    with refuses(ConfigError, "vocab_size", smallest - 1):
        train_tokenizer(["text"], smallest - 1, kind=kind)
    assert len(train_tokenizer(["text"], smallest, kind=kind)) == smallest


def test_save_and_load(tmp_path, bert_tokenizer):
    bert_tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded("a wave", "tide") == bert_tokenizer("a wave", "tide")
    assert loaded.all_special_ids == bert_tokenizer.all_special_ids


def test_the_cache_is_keyed_by_texts_size_and_kind(tmp_path, documents):
    first = cached_tokenizer(documents, 270, "gpt", tmp_path)
    again = cached_tokenizer(documents, 270, "gpt", tmp_path)
    assert first.backend_tokenizer.to_str() == again.backend_tokenizer.to_str()
    assert len([p for p in tmp_path.iterdir() if p.is_dir()]) == 1
    cached_tokenizer(documents, 271, "gpt", tmp_path)
    cached_tokenizer(documents, 271, "bert", tmp_path)
    cached_tokenizer(documents.select([0, 1]), 270, "gpt", tmp_path)
    assert len([p for p in tmp_path.iterdir() if p.is_dir()]) == 4


def test_a_truncated_cache_entry_is_refused(tmp_path, documents):
    cached_tokenizer(documents, 270, "gpt", tmp_path)
    (file,) = tmp_path.glob("*/tokenizer.json")
    file.write_bytes(file.read_bytes()[:500])
    with refuses(DataError, "--tokenizer"):
        cached_tokenizer(documents, 270, "gpt", tmp_path)


def test_those_that_wait_for_a_failing_builder_raise_its_error_and_build_nothing(tmp_path):
    """A later call builds again."""
    asking, built = [], []

    def build(folder):
        built.append(folder)
        while len(asking) < 3:
            time.sleep(0.01)
        time.sleep(1.0)  # until the others are at the lock
        raise DataError("--data", "made", "a row is wrong", "Mend it")

    def ask(number):
        asking.append(number)
        with pytest.raises(DataError) as caught:
            build_once(tmp_path / "entry", build)
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        assert {*pool.map(ask, range(3))} == {"--data = 'made': a row is wrong. Mend it."}
    assert len(built) == 1
    build_once(tmp_path / "entry", built.append)
    assert len(built) == 2
    build_once(tmp_path / "entry", built.append)
    assert len(built) == 2


def test_a_long_text_trains_what_its_parts_train():
    lines = [f"sea {i % 7} wave, mare{i % 11}" for i in range(30_000)]
    whole, parts = (
        train_tokenizer(texts, 400, kind="gpt").get_vocab()
        for texts in (["\n".join(lines)], cut_at_lines("\n".join(lines)))
    )
    assert whole == parts
