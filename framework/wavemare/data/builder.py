# SPDX-License-Identifier: Apache-2.0
"""Local files as a dataset in the cache of ``datasets``.

``datasets`` replaces ``open`` and ``Path`` in the module of a builder by its own, which take names
for URLs. So nothing is opened here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets

from wavemare.data.sources import Kind, Source
from wavemare.data.tables import read_tables


def read_table(source: Source, columns: Sequence[str], texts: Sequence[str]) -> Any:
    """Read columns of local files, or take what an earlier call has left in the cache.

    Args:
        source: Local files that are no saved dataset.
        columns: The columns; of a text file ``text``.
        texts: Those of them that hold text, whatever it looks like.

    Returns:
        A ``datasets.Dataset``.

    Raises:
        DatasetsError: Of ``datasets``, whose cause is the reader's error.
    """
    stats = [(file, file.stat()) for file in source.files]
    builder = _Tables(
        kind=source.kind.value,
        files=[(str(file.absolute()), stat.st_size, stat.st_mtime_ns) for file, stat in stats],
        columns=list(columns),
        texts=list(texts),
    )
    builder.download_and_prepare()
    return builder.as_dataset("train")


@dataclass
class _TablesConfig(datasets.BuilderConfig):
    """What is read; ``datasets`` makes the name of the cache's folder of these values."""

    kind: str = ""
    files: Sequence[tuple[str, int, int]] = ()
    columns: Sequence[str] = ()
    texts: Sequence[str] = ()


class _Tables(datasets.ArrowBasedBuilder):
    """Builds a dataset from local files."""

    BUILDER_CONFIG_CLASS = _TablesConfig
    VERSION = "1.0.0"

    def _info(self) -> Any:
        return datasets.DatasetInfo()

    def _split_generators(self, _: Any) -> list[Any]:
        files = [name for name, *_ in self.config.files]
        return [datasets.SplitGenerator("train", gen_kwargs={"files": files})]

    def _generate_shards(self, files: Sequence[str]) -> Iterator[str]:
        yield from files

    def _generate_tables(self, files: Sequence[str]) -> Iterator[tuple[Any, Any]]:
        config = self.config
        for number, name in enumerate(files):
            tables = read_tables(Kind(config.kind), name, config.columns, config.texts)
            for part, table in enumerate(tables):
                yield (number, part), table
