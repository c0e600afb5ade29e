"""Checkpoints for call sites of others: DCP, Hugging Face's Trainer, Lightning; one module each."""
