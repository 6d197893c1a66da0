"""`python -m dafjax`: what the library has to say of the machine that it is on."""

import argparse
import sys

from dafjax._doctor import doctor
from dafjax._tune import tune


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dafjax", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="print versions, devices, the library found, and what it uses"
    )
    of_tune = commands.add_parser(
        "tune",
        help="print how long reductions take here, and which strategies they use",
    )
    of_tune.add_argument(
        "--redo", action="store_true", help="measure anew what was measured before"
    )
    options = parser.parse_args()
    return doctor() if options.command == "doctor" else tune(redo=options.redo)


if __name__ == "__main__":
    sys.exit(main())
