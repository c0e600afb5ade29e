"""``python -m gpuops`` is the ``gpuops`` command."""

from gpuops.cli.main import main

if __name__ == "__main__":
    main()
