"""Checkpoints for other frameworks: DCP, Hugging Face's Trainer, Lightning; one module each."""
