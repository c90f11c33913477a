"""Entry point of `python -m refitd.worker`."""

import sys

from refitd.worker.main import main

sys.exit(main())
