"""How a process ends."""

import subprocess
import sys

import pytest


def ended(program: str, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


def test_an_end_flushes_output_calls_exit_functions_and_gives_the_status():
    found = ended(
        "import atexit, sys; from refitd.service import end\n"
        "atexit.register(print, 'last words'); print('first', end=' '); end(3)"
    )
    assert (found.returncode, found.stdout, found.stderr) == (3, "first last words\n", "")


def test_an_end_whose_output_goes_nowhere_is_one_all_the_same():
    program = "import os, sys; from refitd.service import end\nprint('lost'); os.close(1); sys.stderr = None; end(0)"
    assert ended(program).returncode == 0


@pytest.mark.slow
def test_a_worker_has_torch_and_the_meta_device_once_it_is_asked_for():
    program = (
        "import sys; from refitd.worker.devices import torch_with_one_thread as load\n"
        "load(); load(); name = 'torch._meta_registrations'\n"
        "import gc, torch\n"
        "assert name not in sys.modules and gc.isenabled() and torch.get_num_threads() == 1\n"
        "assert torch.ones(2, 3).sum() == 6\n"
        "import torch._meta_registrations as found\n"
        "assert sys.modules[name] is found and len(vars(found)) > 100\n"
        "assert (torch.empty(2, 3, device='meta') @ torch.empty(3, 4, device='meta')).shape == (2, 4)\n"
    )
    found = ended(program)
    assert not found.returncode, found.stderr
