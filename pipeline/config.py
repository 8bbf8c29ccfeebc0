"""Configuration of the pipeline: the ``"wavemare": {"pipeline": ...}`` section."""

from __future__ import annotations

from pydantic import Field

from wavemare.section import Section

__all__ = ["PipelineConfig"]


class PipelineConfig(Section):
    """How a Hugging Face model becomes a pipeline.

    A ``PipelineModule`` that the caller built keeps its own stages and cuts.
    """

    stages: int = Field(default=1, ge=1)
    """Number of pipeline stages; 1 trains the model as a plain data-parallel job."""

    partition: str | list[int] = "parameters"
    """Where the stages are cut: ``parameters`` or ``time`` (balanced by parameter count or by
    measured time), ``uniform`` (equal layer counts), ``type:REGEX`` (balanced by the number of
    layers of a class), or the first layer of each stage as a list."""

    dynamic_shape: bool = False
    """Whether micro-batches differ in shape. Every message then carries its shape."""

    inputs: list[str] | None = None
    """Names of the batch entries that travel with the hidden states; the model's default if
    omitted."""
