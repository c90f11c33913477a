"""python -m refitd_cli.demo [--mxfp8] [--json]: what refitctl demo runs."""

from __future__ import annotations

import argparse
import sys

from refitd_cli.demo.run import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="refitd_cli.demo")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--mxfp8", action="store_true", help="one engine holds its projections in MXFP8")
    arguments = parser.parse_args()
    sys.exit(main(arguments.json, mxfp8=arguments.mxfp8))
