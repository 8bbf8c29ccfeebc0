"""BERT: masked-language pretraining, and sequence classification."""
