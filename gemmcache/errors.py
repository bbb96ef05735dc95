"""Every error that gemmcache raises on purpose.

Each subclasses the builtin that a caller would catch for the same trouble elsewhere, carries the exit
code that the command line ends with, and says in `remedy` what to do about it.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_OK = 0
EXIT_FINDINGS = 1
EXIT_USAGE = 2
EXIT_INTEGRITY = 3
EXIT_INCOMPATIBLE = 4
EXIT_TOOL = 5
EXIT_INTERRUPT = 130


class GemmcacheError(Exception):
    """Base of all errors of this package.

    `message` says what is wrong and where; `remedy` says what to do (may be empty).
    """

    exit_code: ClassVar[int] = EXIT_TOOL

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (compile and tuning workers); the keyword would be lost.
        return (_rebuild, (type(self), self.message, self.remedy))


def _rebuild(cls: type[GemmcacheError], message: str, remedy: str) -> GemmcacheError:
    return cls(message, remedy=remedy)


class UsageError(GemmcacheError, ValueError):
    """The caller asked for something malformed: a bad option, file, shape or name."""

    exit_code = EXIT_USAGE


class UnsupportedError(UsageError):
    """Well formed, but nothing here can do it."""


class IntegrityError(GemmcacheError, ValueError):
    """Stored bytes are not what they claim to be: damaged, truncated, forged or non-canonical."""

    exit_code = EXIT_INTEGRITY


class IncompatibleError(GemmcacheError, RuntimeError):
    """The bundle or record can't be used in this environment."""

    exit_code = EXIT_INCOMPATIBLE


class StaleError(IncompatibleError):
    """Usable, but made for another environment, and the caller asked to refuse that."""


class MissError(GemmcacheError, LookupError):
    """The bundle has no answer for a problem, and the caller asked not to fall back."""

    exit_code = EXIT_FINDINGS


class MissingRecordError(GemmcacheError, LookupError):
    """A build was told to use tuning records only, and some are missing."""

    exit_code = EXIT_FINDINGS


class MissingPackageError(GemmcacheError, ImportError):
    """A pip package that this operation needs is not installed, or of the wrong flavour."""


class ToolError(GemmcacheError, RuntimeError):
    """An outside tool (compiler, linker, GPU, driver) failed."""


class CompileError(ToolError):
    """A kernel did not compile."""


class DeviceError(ToolError):
    """No usable CUDA device, or the device failed."""


class MeasurementError(ToolError):
    """A measurement could not be taken, or can't be trusted."""


class StorageError(GemmcacheError, OSError):
    """The file system refused a read or a write."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        # OSError.__init__ would reinterpret two positional arguments; one is passed through as it is.
        super().__init__(message, remedy=remedy)
