"""Convert states to and from other formats: DCP directories, safetensors files, torch.save."""
