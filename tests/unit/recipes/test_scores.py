# SPDX-License-Identifier: Apache-2.0
"""Accuracy and F1 against counting."""

import pytest
import torch

from wavemare.recipes.bert.finetune import scores


def test_a_constant_answer_scores_as_the_majority_baseline_does():
    confusion = torch.tensor([[6, 0, 0], [3, 0, 0], [1, 0, 0]])
    result = scores(confusion)
    assert result["accuracy"] == pytest.approx(0.6)
    assert result["macro_f1"] == pytest.approx((2 * 6 / (6 + 10)) / 3)


def test_random_answers_are_counted_alike():
    generator = torch.Generator().manual_seed(0)
    labels, answers = (torch.randint(0, 5, (200,), generator=generator) for _ in range(2))
    confusion = torch.zeros(5, 5, dtype=torch.long)
    for label, answer in zip(labels, answers, strict=True):
        confusion[label, answer] += 1
    f1 = []
    for kind in range(5):
        hits = int(((labels == kind) & (answers == kind)).sum())
        precision = hits / max(int((answers == kind).sum()), 1)
        recall = hits / max(int((labels == kind).sum()), 1)
        f1.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    result = scores(confusion)
    assert result["accuracy"] == pytest.approx(float((labels == answers).float().mean()))
    assert result["macro_f1"] == pytest.approx(sum(f1) / 5)
