"""Transformers models as DeepSpeed pipelines, and their weights back out."""

from wavemare.models.convert import to_pipeline
from wavemare.models.export import pipeline_state_dict, save_pretrained
from wavemare.models.families import SUPPORTED
from wavemare.models.module import TransformerPipeline

__all__ = [
    "SUPPORTED",
    "TransformerPipeline",
    "pipeline_state_dict",
    "save_pretrained",
    "to_pipeline",
]
