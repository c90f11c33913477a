"""Entry point of `python -m refitd.coordinator`: a standalone daemon starts it and writes its Config to stdin."""

import sys

import msgspec

from refitd.config import Config
from refitd.coordinator.main import run
from refitd.errors import RefitdError
from refitd.logs import as_error
from refitd.service import end
from refitd.text import printable

try:
    status = run(msgspec.json.decode(sys.stdin.buffer.read(), type=Config), with_parent=True)
except (RefitdError, OSError) as error:
    print(printable(str(error)), flush=True)  # for the daemon's status
    sys.exit(as_error(printable(f"refitd coordinator: {error}")))
end(status)
