"""A time limit for code that may hang: first an exception, then the end of the process."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gemmcache.errors import EXIT_TOOL, UsageError

#: Code that swallowed the exception gets it again after this many seconds.
_AGAIN_SECONDS = 5.0
#: From the limit to the end of the process.
GRACE_SECONDS = 30.0


class PeerTimeout(BaseException):
    """The limit passed. Not an `Exception`: tuners that try one config after another catch those and go on."""


@contextmanager
def time_limit(seconds: float, on_hang: Callable[[], None] | None = None, grace: float | None = None) -> Iterator[None]:
    """Raises `PeerTimeout` in the block after `seconds`. In the main thread only; limits do not nest.

    Python code ends with the exception. A block that is in foreign code for `grace` (30) seconds more ends the process
    with exit code 5, after `on_hang` was called in another thread; one that does not even let go of the
    interpreter's lock ends it without that.
    """
    if not seconds > 0:
        raise UsageError(f"a time limit of {seconds} seconds is not positive")
    armed = True
    wait = GRACE_SECONDS if grace is None else grace

    def expire(signum: int, frame: object) -> None:
        if armed:
            raise PeerTimeout(f"not done after {seconds:g} s")

    def end() -> None:
        try:
            if on_hang is not None:
                on_hang()
        finally:
            os._exit(EXIT_TOOL)

    timer = threading.Timer(seconds + wait, end)
    timer.daemon = True
    before = signal.signal(signal.SIGALRM, expire)
    try:
        timer.start()
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(seconds + 2 * wait, exit=True, file=sys.__stderr__)
        signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_SECONDS)
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()
