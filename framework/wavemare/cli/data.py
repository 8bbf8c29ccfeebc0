# SPDX-License-Identifier: Apache-2.0
"""``wavemare data``: make, merge and look at Megatron's indexed data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Build, merge and inspect Megatron's indexed data.")


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
