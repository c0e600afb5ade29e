"""Between a state and the formats of others: DCP directories, safetensors files, torch.save."""
