"""``gpuops check`` and ``gpuops facts``: parse, run `gpuops.gate.session`, print."""
