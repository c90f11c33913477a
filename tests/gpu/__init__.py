"""The checks of scripts/gpu-check. They start without the small packages of refitd; `stand_ins` has replacements."""

import sys
from pathlib import Path

# last: an installed package is preferred
sys.path.append(str(Path(__file__).with_name("stand_ins")))
