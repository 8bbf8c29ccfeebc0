# SPDX-License-Identifier: Apache-2.0
"""The one place where a row becomes tokens, and where it is said which of them are trained."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from wavemare.data.tokenizer import begin_text, start_tokens
from wavemare.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

IGNORED = -100
CHAT_COLUMNS = ("tools", "system", "chat_template_kwargs")
"""Columns that a row with a chat may have beside it."""

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SHOWN = 200
"""Characters of a row that an error shows."""
_PROBE = ("user", "assistant", "user")
Turns = list[dict[str, Any]]


class Row(NamedTuple):
    """A formatted row: token ids, and labels that are -100 where nothing is trained."""

    ids: list[int]
    labels: list[int]


class Formatted(NamedTuple):
    """A formatted row, and what a template has done to it.

    Attributes:
        row: Its tokens.
        unended: How many of its answers end without a token that is trained.
        unsaid: What the template does not write: roles of turns, ``tools``, ``tool_calls``.
    """

    row: Row
    unended: int
    unsaid: list[str]


class _Chat(NamedTuple):
    """A chat, and what its template is given beside it."""

    turns: Turns
    arguments: dict[str, Any]


class RowFormat:
    """How rows become tokens.

    Trained are the assistant's turns of ``messages``, the ``completion`` of a ``prompt`` (both
    texts, or both lists of messages), or all of a ``text``.

    * A template with ``{% generation %}`` says itself what is trained. With any other one it is
      what the template adds for a turn of the assistant behind the prompt that asks for it.
    * The token that ends a turn is trained. If it stands behind the marks, it is trained, too, with
      the blanks before it. Where a template ends a turn by the mark of the next role, it is that
      mark; behind the last turn it is added unless the template has marks.
    * A text begins with one start token, and no end token comes between prompt and completion.

    Args:
        tokenizer: With an end token, and with a chat template where rows are chats.
        template_arguments: What the template is given with each chat. A row's
            ``chat_template_kwargs`` go before.

    Raises:
        DataError: An argument is one of ``apply_chat_template`` itself.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._arguments = _template_arguments("--chat_template_kwargs", template_arguments)
        added = tokenizer.added_tokens_decoder
        self._added = {*added, *tokenizer.all_special_ids}
        self._ends = {i for i, token in added.items() if token.special}
        self._ends |= {*tokenizer.all_special_ids}
        self._start = start_tokens(tokenizer)
        self._added_texts = tuple(filter(None, tokenizer.convert_ids_to_tokens([*self._added])))

    def encode(self, row: Mapping[str, Any]) -> Formatted:
        """Format and tokenize a row.

        Raises:
            DataError: It has another form, or it is a chat and the tokenizer lacks a template.
        """
        unended, unsaid = 0, list[str]()
        if _is_chat(row):
            ids, trained = self._encode_chat(row)
            unended, unsaid = self._train_ends(ids, trained), self._unsaid(row)
        else:
            ids, trained = self._encode_texts(row)
        # Nothing predicts the first token.
        labels = [ids[i] if i and trained[i] else IGNORED for i in range(len(ids))]
        return Formatted(Row(ids, labels), unended, unsaid)

    def question(self, row: Mapping[str, Any]) -> str:
        """Return what the assistant is asked by a row: all before its last answer."""
        if not _is_chat(row):
            return str(row.get("prompt") or row.get("text", row.get("completion"))[:40])
        with _template_errors(row):
            chat = self._chat(row, "messages" if "messages" in row else "prompt")
            turns = chat.turns
            while len(turns) > 1 and turns[-1]["role"] == "assistant":
                turns = turns[:-1]
            return self._render(_Chat(turns, chat.arguments), asks=True)

    # --- texts ------------------------------------------------------------------------------------

    def _encode_texts(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        for name in ("prompt", "completion", "text"):
            if name in row and not isinstance(row[name], str):
                raise row_error(row, f"the {name} of this row is no text", "Give texts")
        end = self._tokenizer.eos_token_id
        if "text" in row:
            before, after = [], self._begin(row["text"])
        else:
            before = self._begin(row["prompt"])
            whole = self._begin(row["prompt"] + row["completion"])
            after = whole[len(before) :]
            if whole[: len(before)] != before:  # tokens would go over the end of the prompt
                after = self._ids(row["completion"])
        after += [end] if after[-1:] != [end] else []
        return before + after, [False] * len(before) + [True] * len(after)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _begin(self, text: str) -> list[int]:
        return begin_text(text, self._tokenizer, self._start)

    # --- chats ------------------------------------------------------------------------------------

    def _encode_chat(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        with _template_errors(row):
            if "messages" in row:
                chat = self._chat(row, "messages")
                ids, trained = self._tokens(chat)
                if self._turn_end is not None and self._ends_open(chat, ids, trained):
                    ids, trained = [*ids, self._turn_end], [*trained, True]
                return ids, trained
            prompt, answer = self._chat(row, "prompt"), _turns(row, "completion")
            asked = self._ids(self._render(prompt, asks=True))
            ids = self._ids(self._render(_Chat(prompt.turns + answer, prompt.arguments)))
            pairs = zip(asked, ids, strict=False)
            alike = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(asked), len(ids)))
            return ids, [i >= alike for i in range(len(ids))]

    def _chat(self, row: Mapping[str, Any], column: str) -> _Chat:
        turns = _turns(row, column)
        if row.get("system"):
            first = {"role": "system", "content": row["system"]}
            if not turns or turns[0].get("role") != "system":
                turns = [first, *turns]
            elif turns[0] != first:
                reason = "the row has a system column, and its messages begin with another one"
                raise row_error(row, reason, "Leave one of them out")
        own = _template_arguments("--data", _parsed(row, "chat_template_kwargs"))
        tools = _parsed(row, "tools") or None
        return _Chat(turns, {**self._arguments, **own, "tools": tools})

    def _template(self, arguments: Mapping[str, Any]) -> str:
        """Return the template for such a chat.

        Raises:
            DataError: The tokenizer has none.
        """
        try:
            found: str = self._tokenizer.get_chat_template(tools=arguments.get("tools"))
        except ValueError:
            reason = "the rows are chats, and the tokenizer has no chat template"
            raise DataError("--chat_template", None, reason, "Name a file with one") from None
        return found

    def _render(self, chat: _Chat, *, asks: bool = False) -> str:
        self._template(chat.arguments)
        text: str = self._tokenizer.apply_chat_template(
            chat.turns, tokenize=False, add_generation_prompt=asks, **chat.arguments
        )
        return text

    def _tokens(self, chat: _Chat) -> tuple[list[int], list[bool]]:
        """Return a chat's tokens, and which of them the template makes the assistant say."""
        if _MARKS.search(self._template(chat.arguments)):
            encoded: Any = self._tokenizer.apply_chat_template(
                chat.turns,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **chat.arguments,
            )
            return encoded["input_ids"], [bool(each) for each in encoded["assistant_masks"]]
        text = self._render(chat)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = [*self._spans(chat, text)]
        trained = [
            any(first < stop and last > start for start, stop in spans)
            for first, last in encoded["offset_mapping"]
        ]
        return encoded["input_ids"], trained

    def _spans(self, chat: _Chat, text: str) -> Iterator[tuple[int, int]]:
        """Yield the part of the text that a template without marks adds for each answer."""
        turns, arguments = chat
        for place, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            after = self._render(_Chat(turns[: place + 1], arguments))
            if place:
                before = self._render(_Chat(turns[:place], arguments), asks=True)
            else:
                before = self._before_first(after, arguments)
            if not (after.startswith(before) and text.startswith(after)):
                raise ValueError("it changes earlier turns; mark {% generation %} in it")
            # Blanks behind the token that ends a turn join it to the next one.
            body = after.rstrip()
            yield len(before), len(body if body.endswith(self._added_texts) else after)

    def _before_first(self, text: str, arguments: Mapping[str, Any]) -> str:
        """Return what stands before the answer of a chat that begins with the assistant."""
        asked: Turns = [{"role": "user", "content": "sea"}]
        chat = _Chat(asked, dict(arguments))
        prompt = self._render(chat, asks=True).removeprefix(self._render(chat))
        before, found, _ = text.partition(prompt) if prompt else ("", "", "")
        if prompt and not found:
            raise ValueError("it begins with the assistant in another way; mark {% generation %}")
        return before + found

    def _unsaid(self, row: Mapping[str, Any]) -> list[str]:
        """Return what the template does not write of what it is given.

        Raises:
            DataError: It writes a value as Python shows it, or JSON within JSON.
        """
        with _template_errors(row):
            if "messages" in row:
                chat = self._chat(row, "messages")
            else:
                chat = self._chat(row, "prompt")
                chat = _Chat(chat.turns + _turns(row, "completion"), chat.arguments)
            text = self._render(chat)
            _check_written(chat, text)
            return [*self._left_out(chat, text)]

    def _left_out(self, chat: _Chat, text: str) -> Iterator[str]:
        """Yield the roles of turns, and the keys, without which the template writes the same text.

        What an assistant says is not looked for: templates leave out thoughts of earlier turns.
        """

        def is_silent(turns: Turns, arguments: dict[str, Any]) -> bool:
            try:
                return self._render(_Chat(turns, arguments)) == text
            except Exception:  # of any kind: the template looks at it
                return False

        turns, arguments = chat
        flat = " ".join(text.split())
        for place, turn in enumerate(turns):
            content, calls = turn.get("content"), turn.get("tool_calls")
            changed = []
            if turn["role"] in ("system", "user") and isinstance(content, str):
                if " ".join(content.split()) not in flat:
                    changed.append((turn["role"], {**turn, "content": f"{content} sea"}))
            if calls:
                rest = {key: value for key, value in turn.items() if key != "tool_calls"}
                changed.append(("tool_calls", rest))
            for name, other in changed:
                if is_silent([*turns[:place], other, *turns[place + 1 :]], arguments):
                    yield str(name)
        if arguments.get("tools") and is_silent(turns, {**arguments, "tools": None}):
            yield "tools"

    # --- the ends of turns ------------------------------------------------------------------------

    def _train_ends(self, ids: list[int], trained: list[bool]) -> int:
        """Train the token that ends each answer; return how many answers have none."""
        unended = 0
        for start, stop in _runs(trained):
            last = stop - 1
            while last > start and self._is_blank(ids[last]):
                last -= 1
            if ids[last] in self._ends or ids[last] == self._turn_end:
                continue
            following = stop
            while following < len(ids) and self._is_blank(ids[following]):
                following += 1
            if following < len(ids) and ids[following] in self._added:
                trained[stop : following + 1] = [True] * (following + 1 - stop)
            else:
                unended += 1
        return unended

    def _is_blank(self, token: int) -> bool:
        return token not in self._added and not str(self._tokenizer.decode([token])).strip()

    def _ends_open(self, chat: _Chat, ids: list[int], trained: list[bool]) -> bool:
        """Whether a template without marks writes nothing behind the last answer, as it could."""
        if trained[-1:] != [True] or _MARKS.search(self._template(chat.arguments)):
            return False
        return ids[-1] not in self._ends | {self._turn_end}

    @cached_property
    def _turn_end(self) -> int | None:
        """The token by which the template ends an answer in the middle of a chat, if it has one."""
        turns: Turns = [{"role": role, "content": "sea"} for role in _PROBE]
        try:
            ids, trained = self._tokens(_Chat(turns, {**self._arguments, "tools": None}))
        except Exception:  # of any kind, which the template decides
            return None
        _, stop = next(_runs(trained), (0, 0))
        while 0 < stop and self._is_blank(ids[stop - 1]):
            stop -= 1
        rest = [*ids[stop - 1 : stop], *(i for i in ids[stop:] if not self._is_blank(i))]
        return next((token for token in rest[:2] if token in self._added), None)


def _runs(trained: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield where each run of trained tokens begins and stops."""
    for each, places in groupby([*range(len(trained))], key=lambda i: trained[i]):
        if each:
            run = [*places]
            yield run[0], run[-1] + 1


def row_error(row: Mapping[str, Any], reason: str, remedy: str) -> DataError:
    """Return the error of a row, which it names by its beginning."""
    text = json.dumps(row, ensure_ascii=False, default=str)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
    return DataError("--data", shown, reason, remedy)


def _is_chat(row: Mapping[str, Any]) -> bool:
    """Whether a row has messages; in a file of texts a prompt may hold them as JSON."""
    prompt = row.get("prompt")
    if isinstance(prompt, str) and prompt.lstrip().startswith("["):
        try:
            prompt = json.loads(prompt)
        except ValueError:
            return "messages" in row
        return "messages" in row or bool(prompt and all(_is_turn(turn) for turn in prompt))
    return "messages" in row or isinstance(prompt, list)


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value


def _functions(values: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the functions of calls, which may stand in an object of their own."""
    for value in values if isinstance(values, list) else ():
        function = value.get("function", value) if isinstance(value, dict) else None
        if isinstance(function, dict):
            yield function


def _check_written(chat: _Chat, text: str) -> None:
    """Check that a template writes values as texts or as JSON.

    Raises:
        ValueError: It writes one as Python shows it, or JSON within JSON.
    """
    for turn in chat.turns:
        content = turn.get("content")
        if isinstance(content, list | dict) and content and str(content) in text:
            raise ValueError("it writes an object as Python shows it: give each content as a text")
        for function in _functions(turn.get("tool_calls")):
            arguments = function.get("arguments")
            if isinstance(arguments, str) and json.dumps(arguments, ensure_ascii=False) in text:
                raise ValueError("it writes JSON: give the arguments of a call as an object")


def _parsed(row: Mapping[str, Any], column: str) -> Any:
    """Return what a column holds, which may also be written as JSON."""
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value)
    except ValueError as error:
        reason = f"the column {column} of this row is no JSON ({error})"
        raise row_error(row, reason, "Give a list or an object") from None


def _turns(row: Mapping[str, Any], column: str) -> Turns:
    turns = _parsed(row, column)
    if not isinstance(turns, list) or not all(map(_is_turn, turns)):
        reason = f"the column {column} of this row is no list of objects with a role"
        remedy = 'Give [{"role": "user", "content": "..."}, ...]'
        raise row_error(row, reason, remedy)
    return [{key: value for key, value in turn.items() if value is not None} for turn in turns]


def parse_arguments(text: str | None) -> Any:
    """Read the JSON of ``--chat_template_kwargs``; None if it is not given.

    Raises:
        DataError: It is no JSON.
    """
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        reason, remedy = f"it is no JSON ({error})", "Write it as in '{\"enable_thinking\": false}'"
        raise DataError("--chat_template_kwargs", text, reason, remedy) from None


def _template_arguments(key: str, given: Any) -> dict[str, Any]:
    """Check what is given to a template besides the chat.

    Raises:
        DataError: It is no object, or names an argument of ``apply_chat_template`` itself.
    """
    from transformers import PreTrainedTokenizerBase

    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise DataError(key, given, "chat_template_kwargs are no object", "Give an object")
    signature = inspect.signature(PreTrainedTokenizerBase.apply_chat_template)
    reserved = {*signature.parameters} - {"kwargs", "documents"}
    for name in given:
        if name in reserved:
            reason = f"{name!r} is no argument of a template, but of the tokenizer"
            raise DataError(key, dict(given), reason, "Leave it out of chat_template_kwargs")
    return {name: value for name, value in given.items() if value is not None}


@contextmanager
def _template_errors(row: Mapping[str, Any]) -> Iterator[None]:
    """Raise a `DataError` that names the row for whatever a template says about it."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = f"the chat template does not take this row ({error})"
        remedy = "Give messages with role and content, or another --chat_template"
        raise row_error(row, reason, remedy) from error
