"""Entry point of `python -m refitd.coordinator`, which a standalone daemon starts beside itself."""

import argparse
import sys

import refitd.config
from refitd.coordinator.main import run
from refitd.errors import RefitdError

parser = argparse.ArgumentParser(prog="refitd.coordinator")
parser.add_argument("--config")
parser.add_argument("--with-parent", action="store_true")
arguments = parser.parse_args()
try:
    sys.exit(run(refitd.config.load(arguments.config), with_parent=arguments.with_parent))
except RefitdError as error:
    sys.exit(f"refitd coordinator: {error}")
