"""``gpuops ckpt``: one file per subcommand, and what several of them need."""
