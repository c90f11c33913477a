"""Note which functions of refitd each test calls, in the test's process and in those it starts.

`tests.mutants.relevant` puts this folder on PYTHONPATH, and names this module as a plugin of pytest. Each process
appends lines "test, file, function" to $MUTANTS_MAP/PID.calls. Calls before the first test belong to no
test and are not noted.
"""

import contextlib
import os
import sys
import threading

TESTS = 10  # of a file

_FOLDER = os.environ.get("MUTANTS_MAP", "")
_seen: set[object] = set()
_test = [os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]]  # "tests/unit/test_x.py::test_y (call)"


def _called(frame, event, argument):  # type: ignore[no-untyped-def]
    code = frame.f_code
    if code in _seen or not _test[0]:
        return
    _seen.add(code)
    path = code.co_filename
    if "/refitd/" in path and "/site-packages/" not in path:
        file = path.rsplit("/refitd/", 1)[1]
        line = f"{_test[0]}\t{file}\t{code.co_qualname}\n".encode()
        with contextlib.suppress(OSError), open(f"{_FOLDER}/{os.getpid()}.calls", "ab", buffering=0) as out:
            out.write(line)


def pytest_collection_modifyitems(items):  # type: ignore[no-untyped-def]
    """Keep TESTS of each file, evenly spaced: all of them take half an hour."""
    files: dict[str, list[object]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    items[:] = [item for tests in files.values() for item in tests[:: -(-len(tests) // TESTS)]]


def pytest_runtest_logstart(nodeid, location):  # type: ignore[no-untyped-def]
    """Begin a test: its calls are noted from here on."""
    _test[0] = nodeid
    _seen.clear()
    sys.settrace(_called)  # a test may have removed it


def pytest_runtest_logreport(report):  # type: ignore[no-untyped-def]
    """Note a passed test with its seconds; other tests judge no mutant."""
    if report.when == "call" and report.passed:
        with open(f"{_FOLDER}/passed", "a") as out:
            out.write(f"{report.nodeid}\t{report.duration:.3f}\n")


if _FOLDER:
    threading.settrace(_called)
    sys.settrace(_called)
