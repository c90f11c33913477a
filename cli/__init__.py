"""The commands: `refitd` runs the daemon and the coordinator, `refitctl` is for operators."""

import os
import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler and (
    os.path.basename(sys.argv[0]) in ("refitd", "refitctl") or sys.argv[0] == "-m"
):  # Ctrl-C may come at any time: until `ends` handles it, it ends the process without output
    _before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from refitd_cli import ends

    if not ends.begin():
        signal.signal(signal.SIGINT, _before)
else:
    from refitd_cli import ends

    ends.begin()
