"""``python -m tracereel``, and the file that a launcher such as torchrun starts in the place of a script."""

import os
import sys

if __name__ == "__main__":
    if not __package__ and not sys.flags.safe_path:
        # Python searches the folder of a file that it runs first, and this one would hide the script's own modules.
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from tracereel.main import main

    main(prog_name="trace")
