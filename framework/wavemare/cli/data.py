# SPDX-License-Identifier: Apache-2.0
"""``wavemare data``: look at rows to fine-tune on; make, merge and look at Megatron's data."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True,
    help="Show rows to fine-tune on; build, merge and inspect Megatron's indexed data.",
)


@app.command()
def show(
    source: Annotated[
        str, typer.Argument(metavar="INPUT", help="Rows to fine-tune on, as for --data.")
    ],
    rows: Annotated[int, typer.Option(min=1, help="How many rows to show.")] = 1,
    tokenizer: Annotated[
        str, typer.Option(help="Hugging Face folder of the tokenizer.")
    ] = "runs/llama-pretrain/model",
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template",
            "--chat_template",
            help="File in place of the tokenizer's chat template.",
        ),
    ] = None,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            "--chat-template-kwargs",
            "--chat_template_kwargs",
            help="JSON that the template is given with each chat.",
        ),
    ] = None,
) -> None:
    """Print rows as they are trained: their text, and each token with what is trained marked.

    For example: wavemare data show chats.jsonl --rows 3 --tokenizer my-model/
    """
    from wavemare.data.chat import iterate_rows
    from wavemare.data.row_format import RowFormat, parse_arguments
    from wavemare.data.sources import resolve
    from wavemare.data.tokenizer import load_tokenizer, set_chat_template

    found = resolve(source)
    loaded = load_tokenizer(tokenizer)
    if chat_template is not None:
        set_chat_template(loaded, chat_template)
    formats = RowFormat(loaded, parse_arguments(chat_template_kwargs))
    for number, row in enumerate(islice(iterate_rows(found), rows)):
        _show_row(f"row {number} of {found.name}", formats.encode(row), loaded)


def _show_row(name: str, formatted: Any, tokenizer: Any) -> None:
    """Print a row: a summary, its text, and a line for each token. Colours are for terminals."""
    from rich.console import Console
    from rich.text import Text

    from wavemare.data.chat import LEFT_OUT, WITHOUT_END, mark_trained
    from wavemare.data.row_format import IGNORED

    console = Console(highlight=False, markup=False, soft_wrap=True)
    ids, labels = formatted.row
    trained = [label != IGNORED for label in labels]
    console.print(f"{name}: {len(ids):,} tokens, {sum(trained):,} of them trained, in »«")
    if not any(trained):
        console.print("Nothing is trained: a run leaves this row out.")
    if formatted.unended:
        console.print(f"Here {WITHOUT_END}")
    if formatted.unsaid:
        console.print(f"Here {LEFT_OUT} Not written: {', '.join(formatted.unsaid)}.")
    console.print(f"{mark_trained(formatted.row, tokenizer)}\n")
    for place, (token, is_trained) in enumerate(zip(ids, trained, strict=True)):
        text = tokenizer.decode([token])
        if "\ufffd" in text:  # a part of a character
            text = tokenizer.convert_ids_to_tokens(token)
        line = f"{place:6}  {'»' if is_trained else ' '}  {token:7}  {text!r}"
        console.print(Text(line, style="green" if is_trained else ""))
    console.print()


@app.command()
def build(
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="A file, folder, glob, saved dataset or dataset's name, as for --data.",
        ),
    ],
    output: Annotated[Path, typer.Option(help="The target, without .bin and .idx.")],
    tokenizer: Annotated[str, typer.Option(help="Hugging Face folder of the tokenizer.")],
    text_column: Annotated[str, typer.Option(help="Column of a table that holds text.")] = "text",
    workers: Annotated[
        int, typer.Option(min=1, help="Threads that encode.", show_default="one for each core")
    ] = os.cpu_count() or 1,
    append_eod: Annotated[
        bool,
        typer.Option(
            "--append-eod/--no-append-eod", help="Put the end-of-text token after each document."
        ),
    ] = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files of the target's name.")
    ] = False,
) -> None:
    """Encode text, document by document.

    For example: wavemare data build 'corpus/*.jsonl' --output data/corpus --tokenizer gpt2/
    """
    from wavemare.data.encode import build_indexed
    from wavemare.data.sources import resolve
    from wavemare.data.text import load_texts_to_build
    from wavemare.data.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    documents = load_texts_to_build(resolve(source), text_column=text_column)
    # The tokenizers library reads these when it encodes for the first time.
    os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(workers)}
    written = build_indexed(documents, loaded, output, append_eod=append_eod, overwrite=overwrite)
    typer.echo(f"{output}: {written.documents:,} documents, {written.tokens:,} tokens")


@app.command()
def merge(
    prefixes: Annotated[list[str], typer.Argument(metavar="PREFIX...", help="Data sets to merge.")],
    output: Annotated[Path, typer.Option(help="The target, without .bin and .idx.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files of the target's name.")
    ] = False,
) -> None:
    """Concatenate data sets; nothing is encoded again."""
    from wavemare.data.indexed import merge_indexed

    merge_indexed(prefixes, output, overwrite=overwrite)
    typer.echo(f"{output}: {len(prefixes)} data sets merged")


@app.command()
def inspect(
    prefix: Annotated[str, typer.Argument(help="The data, without .bin and .idx.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="Hugging Face folder of the tokenizer, to show text.")
    ] = None,
    documents: Annotated[int, typer.Option(min=0, help="How many documents to show.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a data set and show its contents."""
    from wavemare.data.indexed import open_indexed
    from wavemare.data.tokenizer import load_tokenizer

    decode = None if tokenizer is None else load_tokenizer(tokenizer).decode
    data = open_indexed(prefix)
    facts = _facts(data)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for name, value in facts.items():
        typer.echo(f"{name:<14} {value:,}" if isinstance(value, int) else f"{name:<14} {value}")
    store = data.store()
    for index in range(min(documents, store.num_documents)):
        ids = store.document(index)
        shown = repr(decode(ids[:64].tolist())) if decode else " ".join(map(str, ids[:16]))
        typer.echo(f"document {index} ({len(ids):,} tokens): {shown}")


def _facts(data: Any) -> dict[str, object]:
    import numpy as np

    from wavemare.data.tokens import largest_token

    lengths = data.lengths if len(data.lengths) else np.zeros(1, int)
    return {
        "type": data.tokens.dtype.name,
        "tokens": len(data.tokens),
        "documents": len(data.bounds) - 1,
        "sequences": len(data.lengths),
        "shortest": int(lengths.min()),
        "median": int(np.median(lengths)),
        "longest": int(lengths.max()),
        "largest token": largest_token(data.store())[0],
    }
