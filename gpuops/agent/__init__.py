"""The agent behind `gpuops run`: torch's elastic agent, which also records what happened."""
