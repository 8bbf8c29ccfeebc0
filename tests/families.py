# SPDX-License-Identifier: Apache-2.0
"""What families of models can do: rows of the table in docs/models.md, all of which tests build."""

ROWS = [
    (
        "llama, smollm3, qwen2, qwen3, mistral, phi3, olmo2, olmo3, gpt_neox, gpt2, starcoder2, "
        "phi, glm4, glm4_moe",
        "yes",
        "yes",
    ),
    ("mixtral, qwen2_moe, qwen3_moe", "yes, with their auxiliary loss", "yes"),
    ("bert", "`BertForMaskedLM`, `BertForSequenceClassification`", "yes"),
    ("gemma, gemma3_text, granite", "if nothing acts outside the layers", "yes"),
    ("gemma2, cohere, olmoe, roberta, opt", "refused", "yes"),
    ("gpt_oss", "yes", "refused: no plan"),
    ("bloom, stablelm, modernbert", "refused", "refused: no plan"),
    ("qwen3_next", "refused", "refused: linear attention"),
]
"""Names, pipelines, tensor parallelism and waves."""

PIPELINE, SPLIT = (
    {name: row[column] for row in ROWS for name in row[0].split(", ")} for column in (1, 2)
)
"""By family, what the table says."""

SPLIT_DECODERS = [name for name, cell in SPLIT.items() if cell == "yes" and name != "bert"]
