"""The error tree of refitd.

    RefitdError
     |- ConfigError            a configuration file or argument cannot be used
     |- PlanError              rosters cannot be turned into an exact plan (carries every violation)
     |- CheckpointError        a folder of weights on disk cannot be read or written
     |- ArenaError             an arena cannot be made, sealed, mapped or handed out
     |- TransportError         bytes did not arrive
     |   |- PeerLost           the process on the other end is gone
     |   `- DeadlineExceeded   a wait ended at its deadline
     |- ProtocolError          a message is malformed, unexpected or of another protocol version
     |- RefusedError           the request was understood and refused; it changed no state
     |- Orphaned               a process that this one serves for has ended
     |- CommitError            a version could not be made live
     |   `- IllegalTransition  a state machine was given an event its state does not allow
     `- RefitFailed            a swap ended without being live everywhere (carries which members and why)

A message names the subject, the found and the expected value, and the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from refitd.text import printable


class RefitdError(Exception):
    """Base of all errors that refitd raises. Ray can pickle them."""

    code = "error"

    def __reduce__(self) -> tuple[object, ...]:
        """Restore its attributes without calling `__init__`, whose arguments differ from `args` in some subclasses."""
        return type(self).__new__, (type(self), *self.args), self.__dict__


class ConfigError(RefitdError):
    """A configuration file or argument cannot be used."""

    code = "config"


class PlanError(RefitdError):
    """The rosters cannot be turned into an exact plan; `violations` has every reason, the message the first 20."""

    code = "plan"

    def __init__(self, violations: Sequence[str] | str) -> None:
        self.violations = (violations,) if isinstance(violations, str) else tuple(violations)
        shown = [printable(violation) for violation in self.violations[:20]]
        if len(self.violations) > len(shown):
            shown.append(f"... and {len(self.violations) - len(shown)} more")
        super().__init__("\n".join(shown))


class CheckpointError(RefitdError):
    """A folder of weights on disk cannot be read or written; no version was published or saved."""

    code = "checkpoint"


class ArenaError(RefitdError):
    """An arena cannot be made, sealed, mapped or handed out; `short` is the lacking memory in bytes (0: unknown)."""

    code = "arena"

    def __init__(self, message: str = "", short: int = 0) -> None:
        self.short = short
        super().__init__(message)


class TransportError(RefitdError):
    """Bytes did not arrive."""

    code = "transport"


class PeerLost(TransportError):
    """The process on the other end is gone."""

    code = "peer-lost"


class DeadlineExceeded(TransportError):
    """A wait ended at its deadline."""

    code = "deadline"


class ProtocolError(RefitdError):
    """A message is malformed, unexpected here, or of another protocol version."""

    code = "protocol"


class RefusedError(RefitdError):
    """The request was understood and refused; it changed no state."""

    code = "refused"


class Orphaned(RefitdError):
    """A process that this one serves for has ended: the client has closed its registrations and serves no version."""

    code = "orphaned"


class CommitError(RefitdError):
    """A version could not be made live."""

    code = "commit"


class IllegalTransition(CommitError):
    """A state machine got an event that its state does not allow; the state is unchanged."""

    code = "illegal-transition"


class RefitFailed(RefitdError):
    """A refit ended without being live everywhere; `causes` maps each member to its reason.

    The service raises the subclass `refitd.SwapFailed`, which also has the swap's report.
    """

    code = "refit-failed"

    def __init__(self, message: str, causes: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.causes = dict(causes or {})


def from_code(code: str, message: str) -> RefitdError:
    """Rebuild an error that another process reported as (code, message)."""
    for cls in _all_errors():
        if cls.code == code:
            return PlanError(message.split("\n")) if cls is PlanError else cls(message)
    return RefitdError(message)


def _all_errors() -> list[type[RefitdError]]:
    found: list[type[RefitdError]] = [RefitdError]
    for cls in found:
        found.extend(cls.__subclasses__())
    return found


@contextmanager
def needing_torch(what: str) -> Iterator[None]:
    """Have an import of torch that fails say `what` needs it, and which extra brings it.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        lacks = f"{what} needs torch, which is not installed here; `pip install 'refitd[torch]'` brings it"
        raise ModuleNotFoundError(lacks, name="torch") from exc
