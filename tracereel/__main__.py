"""``python -m tracereel``, and the file that a launcher such as torchrun starts instead of a script."""

import os
import sys

if __name__ == "__main__":
    if not __package__ and not sys.flags.safe_path:
        # Python puts the folder of the started file first on sys.path, where it would hide the script's own modules.
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from tracereel.main import main

    main(prog_name="trace")
