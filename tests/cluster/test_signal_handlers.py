"""Signal handlers that call a client while its own thread does."""

from __future__ import annotations

import subprocess

from refitd.testing import Daemon, eventually
from tests.support import programs
from tests.support.trainer import ANSWER_S, Trainer

HANDLER = """
import signal, sys, time, torch, refitd, itertools
directory = sys.argv[1]
client = refitd.connect(directory, name="handler")
weights = {"w": torch.zeros(64, 64)}
source = client.register_source("h", weights, slots=2)
live = {"w": torch.zeros(64, 64)}
target = client.register_target("h", live, replica="a")
numbers = itertools.count(1)
done, refused = 0, 0
def handler(signum, frame):
    global done, refused
    try:
        client.status()
        target.poll()
        source.publish(next(numbers) + 100000)
        done += 1
    except refitd.RefusedError:
        refused += 1
    finally:
        if goes_on():
            signal.setitimer(signal.ITIMER_REAL, 0.002)  # once each: handlers interrupt each other, too
until = time.monotonic() + float(sys.argv[2])
def goes_on():
    now = time.monotonic()
    return now < until or done <= 10 and now < until + 60  # a busy machine does less in its time
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.002)
while goes_on():
    try:
        client.status()
        target.poll()
        try:
            target.wait(1 << 40, timeout=0.01)
        except refitd.DeadlineExceeded:
            pass
        source.publish(next(numbers) + 100000)
    except refitd.RefusedError:
        pass
signal.setitimer(signal.ITIMER_REAL, 0)
print(done, refused, flush=True)
client.close()
"""


def test_client_calls_in_a_signal_handler_end(daemon: Daemon) -> None:
    ran = programs.run(programs.python(daemon, HANDLER, "3"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    done, _ = map(int, ran.stdout.splitlines()[-1].split())
    assert done > 10


INTERRUPTED = """
from tests.support.names import policy
import os, signal, sys, torch, refitd
client = refitd.connect(sys.argv[1], name="interrupted")
weights = {"w": torch.zeros(64, 64)}
source = client.register_source(policy(), weights)
said = []
def handler(signum, frame):
    for call in (target.poll, lambda: target.wait(1, timeout=5), client.status):
        try:
            call()
            said.append("done")
        except refitd.RefitdError as exc:
            said.append(type(exc).__name__ + ": " + str(exc))
signal.signal(signal.SIGUSR1, handler)
def hook(tensor):
    os.kill(os.getpid(), signal.SIGUSR1)
live = {"w": torch.zeros(64, 64)}
derived = {"d": refitd.Derived(torch.zeros(1), sources=("w",), refresh=hook)}
target = client.register_target(policy(), live, replica="a", derived=derived)
source.publish(1)
import threading
swap = threading.Thread(target=lambda: client.swap(policy(), timeout=60))
swap.start()
assert target.wait(1, timeout=60) == 1
swap.join()
print(said, flush=True)
"""


def test_a_handler_that_would_wait_for_the_commit_it_interrupts_is_refused(daemon: Daemon) -> None:
    ran = programs.run(programs.python(daemon, INTERRUPTED))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("RefusedError") == 2 and "'done']" in ran.stdout, ran.stdout


TERMINATED = """
from tests.support.names import policy
import signal, sys, torch, refitd
client = refitd.connect(sys.argv[1], name="terminated")
target = client.register_target(policy(), {"w": torch.zeros(64, 64)}, replica="a")
def handler(signum, frame):
    client.close()
    client.close()
    sys.exit(7)
signal.signal(signal.SIGTERM, handler)
print("ready", flush=True)
while True:
    try:
        target.wait(99, timeout=0.001)  # interrupted anywhere
    except refitd.DeadlineExceeded:
        pass
"""


def test_a_handler_closes_what_its_thread_waits_on(daemon: Daemon, trainer: Trainer) -> None:
    command = programs.python(daemon, TERMINATED)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=programs.ROOT)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        _, said = process.communicate(timeout=ANSWER_S)
        assert (process.returncode, said) == (7, "")
    finally:
        process.kill()
    eventually(lambda: not trainer.targets(), "it has left")
