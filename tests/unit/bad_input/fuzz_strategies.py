# SPDX-License-Identifier: Apache-2.0
"""Mappings like a valid one, the values that are put into them, and what may come of it."""

import copy

from hypothesis import settings
from hypothesis import strategies as st

FUZZ = settings.get_profile("fuzz")

# Values that some reader knows, beside arbitrary ones.
WORDS = ["auto", "off", "time", "rest", "1f1b", "pipemare", "sync", "true"]
NUMBERS = [0, -1, 1, 2, 3, 10**30, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")]
SCALARS = st.sampled_from([*WORDS, *NUMBERS, True, False, None, "", "1"])
VALUES = st.recursive(
    SCALARS | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def refusal(act, kind, *arguments):
    """Return the error of a kind that a call ends with, or None; any other is a finding."""
    try:
        act(*arguments)
    except kind as error:
        found = error
    else:
        return None
    assert len(str(found)) < 2000
    assert kind is ValueError or (found.key and found.remedy)
    return found


@st.composite
def changed(draw, valid):
    """Draw a valid mapping with values replaced, removed, added and misspelt at any depth."""
    values = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        section = values
        while isinstance(section, dict | list) and section:
            keys = range(len(section)) if isinstance(section, list) else sorted(section, key=str)
            key = draw(st.sampled_from(keys))
            if isinstance(section[key], dict | list) and draw(st.booleans()):
                section = section[key]
                continue
            change = draw(st.sampled_from(["replace", "remove", "add", "misspell"]))
            if change == "replace":
                section[key] = draw(VALUES)
            elif change == "remove":
                del section[key]
            elif isinstance(section, list):
                section.append(draw(VALUES))
            elif change == "add":
                section[draw(st.text(max_size=6) | st.integers())] = draw(VALUES)
            else:
                section[str(key)[:-1]] = section.pop(key)
            break
    return values


@st.composite
def damaged(draw, content):
    """A file after flips of bits, cuts, insertions and zeroed ranges."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(len(content) - 1, 0)))
        kind = draw(st.sampled_from(["flip", "byte", "cut", "insert", "delete", "zero"]))
        before, after = content[:place], content[place:]
        if kind == "flip":
            flipped = bytes([after[0] ^ (1 << draw(st.integers(0, 7)))]) if after else b""
            content = before + flipped + after[1:]
        elif kind == "byte":
            content = before + draw(st.binary(min_size=1, max_size=1)) + after[1:]
        elif kind == "cut":
            content = before
        elif kind == "insert":
            content = before + draw(st.binary(min_size=1, max_size=8)) + after
        else:
            length = draw(st.integers(1, 64))
            content = before + bytes(length if kind == "zero" else 0) + after[length:]
    return content
