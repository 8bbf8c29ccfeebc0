# SPDX-License-Identifier: Apache-2.0

import datasets
import numpy as np
import pytest
from datasets import Dataset
from huggingface_hub import constants

from wavemare.data.tokenizer import train_tokenizer
from wavemare.data.tokens import TokenStore


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path_factory):
    """Fail at once where a test would use the network, and cache in a folder of its own."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="session")
def make_store():
    def make(documents, vocab_size=None):
        offsets = np.cumsum([0, *map(len, documents)]).astype(np.int64)
        tokens = np.array([t for document in documents for t in document], dtype=np.int32)
        return TokenStore(tokens, offsets, vocab_size=vocab_size, name="made")

    return make


@pytest.fixture(scope="session")
def texts():
    words = ["sea", "wave", "mare", "tide", "pipe", "stage", "clock"]
    return [" ".join(words[(i * j) % 7] for j in range(1, 30)) + "\n" for i in range(1, 40)]


@pytest.fixture(scope="session")
def documents(texts):
    return Dataset.from_dict({"text": texts})


@pytest.fixture(scope="session")
def gpt_tokenizer(texts):
    return train_tokenizer(texts, 280, kind="gpt")


@pytest.fixture(scope="session")
def bert_tokenizer(texts):
    return train_tokenizer(texts, 290, kind="bert")
