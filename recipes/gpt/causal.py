"""Learning to continue text: what GPT pretraining and finetuning share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wavemare.recipes.job import Job

__all__ = ["CausalText"]


class CausalText:
    """A corpus on its way from documents to packed samples, and the model's use of it.

    Args:
        job: The run.
        data: The ``--data`` option.

    Raises:
        DataError: There is no such text, found before anything slow begins.
    """

    def __init__(self, job: Job, data: str | None) -> None:
        from wavemare.data import resolve

        self.job = job
        self.source = resolve(data)
        self.tokenizer: Any = None

    def train_tokenizer(self, vocab_size: int) -> None:
        """Train a byte-level BPE on the training documents, or take the cached one."""
        from wavemare.data import cached_tokenizer

        self.corpus = self.source.load()
        self.tokenizer = cached_tokenizer(self.corpus, vocab_size, "gpt", self.job.cache)

    def load_tokenizer(self, folder: str) -> None:
        """Take the tokenizer of a Hugging Face folder."""
        from wavemare.data import load_tokenizer

        self.corpus = self.source.load()
        self.tokenizer = load_tokenizer(folder)

    def pack(self, sequence_length: int, positions: int, *, vocabulary: int) -> None:
        """Tokenise both parts of the corpus and lay them end to end.

        Args:
            sequence_length: Tokens per sample.
            positions: Longest sequence that the model takes.
            vocabulary: Number of token ids that the model knows.

        Raises:
            DataError: A sequence is longer than the model, or a token id beyond it.
        """
        from wavemare.data import PackedDataset, check_fits, tokenize

        self.train_tokens = tokenize(self.corpus.train, self.tokenizer, self.job.cache)
        self.held_out_tokens = tokenize(self.corpus.held_out, self.tokenizer, self.job.cache)
        for tokens in (self.train_tokens, self.held_out_tokens):
            check_fits(tokens, sequence_length, positions, vocabulary)
        self.train = PackedDataset(self.train_tokens, sequence_length)
        self.held_out = PackedDataset(self.held_out_tokens, sequence_length)

    def describe(self) -> dict[str, object]:
        """Return the panel's rows about the corpus."""
        return {
            "name": self.corpus.name,
            "documents": f"{len(self.corpus.train)} to train, {len(self.corpus.held_out)} held out",
            "tokens": f"{self.train_tokens.num_tokens:,} to train, "
            f"{self.held_out_tokens.num_tokens:,} held out",
            "vocabulary": len(self.tokenizer),
        }

    def evaluate(self, num_samples: int | None) -> Mapping[str, float]:
        """Measure the mean loss on held-out samples, in nats per token."""
        return {"held_out_loss": self.job.held_out_loss(self.held_out, num_samples)}

    def learn(self) -> None:
        """Train the job's model on the corpus."""
        self.job.fit(self.job.loader(self.train), self.evaluate)

    def report(self, prompt: str) -> None:
        """Compare the held-out loss with the corpus's n-gram entropies; export, reload, write."""
        from wavemare.data import bigram_cross_entropy, unigram_cross_entropy

        job = self.job
        results = dict(self.evaluate(None))
        job.run.log(job.arguments.max_steps, **results)
        job.export(self.tokenizer)
        baselines = {
            "unigram": unigram_cross_entropy(self.train_tokens, self.held_out_tokens),
            "bigram": bigram_cross_entropy(self.train_tokens, self.held_out_tokens),
        }
        if job.rank == 0:
            job.note(f"\n{self.sample(prompt)}\n")
        entropies = {f"{name} cross-entropy": value for name, value in baselines.items()}
        job.finish({**results, **entropies}, baselines=baselines)

    def sample(self, prompt: str, tokens: int = 48) -> str:
        """Return the prompt and how the exported model goes on from it."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model: Any = AutoModelForCausalLM.from_pretrained(self.job.exported)
        tokenizer = AutoTokenizer.from_pretrained(self.job.exported)
        torch.manual_seed(self.job.arguments.seed)
        inputs = tokenizer(prompt, return_tensors="pt")
        room = model.config.max_position_embeddings - inputs["input_ids"].shape[1]
        output = model.generate(
            **inputs,
            max_new_tokens=min(tokens, room),
            do_sample=True,
            top_k=40,
            temperature=0.8,
            pad_token_id=tokenizer.eos_token_id,
        )
        return str(tokenizer.decode(output[0]))
