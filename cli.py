"""The command ``trace`` of this checkout: ``python cli.py info run.zarr``."""

from tracereel.main import main

if __name__ == "__main__":
    main()
