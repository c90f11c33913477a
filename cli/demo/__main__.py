"""python -m refitd_cli.demo [--json]: what refitctl demo runs."""

from __future__ import annotations

import argparse
import sys

from refitd_cli.demo.run import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="refitd_cli.demo")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    sys.exit(main(parser.parse_args().json))
