# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's layout strings of a pipeline, such as ``Et*3|(tt|)*29,m|L``.

``E`` is the embedding, ``t`` a transformer block, ``m`` a layer that predicts several tokens, ``L``
the output head and its loss; ``|`` parts two stages, ``X*N`` and ``(...)*N`` repeat, and commas
mean nothing (Megatron-LM's documentation of ``--pipeline-model-parallel-layout``).
"""

from __future__ import annotations

import re

from wavemare.errors import PlanError
from wavemare.parallel.layout.chains import NamedChain

__all__ = ["layout_stages", "unrolled"]

_KEY = "stages"
_TOKENS = re.compile(r"[EtmL|()]|\*\d+")
_MOST_LETTERS = 100_000
_MOST_DIGITS = 10


def unrolled(layout: str) -> list[str]:
    """Return the letters of each stage.

    Raises:
        PlanError: The string has another character, or a parenthesis or repetition without its
            partner.
    """
    text = re.sub(r"[\s,]", "", layout)
    tokens = _TOKENS.findall(text)
    if "".join(tokens) != text:
        strange = re.sub(_TOKENS, "", text)[:1]
        raise _refuse(layout, f"{strange!r} stands for nothing", "Use E, t, m, L, |, ( ) and *N")
    # What is open: the text so far, and where its last item, which *N repeats, begins.
    levels: list[tuple[str, str]] = [("", "")]
    for token in tokens:
        done, last = levels[-1]
        if token == "(":
            levels.append(("", ""))
        elif token == ")":
            inner = "".join(levels.pop())
            if not levels:
                raise _refuse(layout, "a ')' closes nothing", "Remove it")
            outer, before = levels[-1]
            levels[-1] = (outer + before, inner)
        elif token.startswith("*"):
            if not last:
                raise _refuse(layout, f"{token} repeats nothing", "Put a letter before it")
            # The number may have thousands of digits.
            if len(token) > _MOST_DIGITS or len(done) + len(last) * int(token[1:]) > _MOST_LETTERS:
                reason = f"the repetition gives more than {_MOST_LETTERS} letters"
                raise _refuse(layout, reason, "Repeat less")
            levels[-1] = (done + last * int(token[1:]), "")
        else:
            levels[-1] = (done + last, token)
    if len(levels) > 1:
        raise _refuse(layout, "a '(' is not closed", "Close it")
    return "".join(levels[0]).split("|")


def layout_stages(layout: str, chain: NamedChain) -> list[list[int]]:
    """Return the layers of each stage of a layout string.

    ``E`` stands for all layers before the blocks, ``L`` for all after them.

    Raises:
        PlanError: The string is none, a stage is empty, or it does not describe this model.
    """
    stages = unrolled(layout)
    letters, blocks = "".join(stages), len(chain.blocks)
    if not all(stages):
        reason = f"stage {stages.index('')} is empty"
        raise _refuse(layout, reason, "Give each stage a layer")
    if "m" in letters:
        reason = "the model has no layer that predicts several tokens"
        raise _refuse(layout, reason, "Leave out m")
    if letters != "E" + "t" * blocks + "L":
        counts = {letter: letters.count(letter) for letter in "EtL"}
        reason = f"it has {counts} and the model E, {blocks} times t, and L, in this order"
        raise _refuse(layout, reason, f"Write {blocks} times t")
    first, last = chain.blocks[0], chain.blocks[-1]
    layers = iter(chain.blocks)
    groups = {"E": range(first), "L": range(last + 1, len(chain.layers))}
    return [
        [
            layer
            for letter in stage
            for layer in ([next(layers)] if letter == "t" else groups[letter])
        ]
        for stage in stages
    ]


def _refuse(layout: str, reason: str, remedy: str) -> PlanError:
    return PlanError(_KEY, layout, reason, remedy)
