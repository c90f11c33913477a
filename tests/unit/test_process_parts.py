"""Parts of a process: its end, decoding beside its loop, turns of threads."""

import os
import signal
import subprocess
import sys
import threading
from types import FrameType

import pytest

from refitd.client.calls import Turn, check_process
from refitd.errors import DeadlineExceeded, RefusedError
from refitd.protocol.base import OrderedDecoder


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


# --- Messages decoded in a thread beside a loop stay in order; later messages wait for earlier ones. ----


def test_messages_wait_behind_one_that_is_read_aside_and_come_in_order() -> None:
    told, go_on = threading.Semaphore(0), threading.Event()
    messages = OrderedDecoder[str]("test", told.release)
    assert not messages.holds("before")  # the caller handles this message immediately

    def slow() -> str:
        assert go_on.wait(10)
        return "plan"

    def broken() -> str:
        raise ValueError("no message")

    messages.read(slow)
    assert messages.holds("stage")
    messages.read(broken)
    assert messages.holds("drop")
    assert list(messages.collect()) == []

    go_on.set()
    for _ in range(2):
        assert told.acquire(timeout=10)
    plan, stage, error, drop = messages.collect()
    assert (plan, stage, drop) == ("plan", "stage", "drop") and isinstance(error, ValueError)
    assert not messages.holds("after")


# --- Turns: other threads wait for a turn; a second request of the thread that has it is refused. -------


WAIT_S = 20.0


def test_a_thread_that_has_its_turn_is_refused_and_keeps_it() -> None:
    turn = Turn("work is under way")
    for _ in range(2):
        with turn.taken(WAIT_S), pytest.raises(RefusedError, match="work is under way"), turn.taken(WAIT_S):
            pass


def test_a_signal_handler_is_refused_what_it_interrupts() -> None:
    turn = Turn("work is under way")
    found: list[str] = []

    def handler(_: int, __: FrameType | None) -> None:
        try:
            with turn.taken(WAIT_S):
                found.append("taken")
        except RefusedError:
            found.append("refused")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with turn.taken(WAIT_S):
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == ["refused", "taken"]


def test_other_threads_wait_until_their_time_is_over() -> None:
    turn, entered, leave = Turn("work is under way"), threading.Event(), threading.Event()

    def work() -> None:
        with turn.taken(WAIT_S):
            entered.set()
            leave.wait(WAIT_S)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(WAIT_S)
    with pytest.raises(DeadlineExceeded, match="on another thread"), turn.taken(0.01):
        pass
    leave.set()
    with turn.taken(WAIT_S):
        pass
    thread.join(WAIT_S)


def test_a_client_belongs_to_the_process_that_made_it() -> None:
    check_process(os.getpid())
    with pytest.raises(RefusedError, match="connect again after fork"):
        check_process(os.getppid())
