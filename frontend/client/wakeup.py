"""Wakeup: a descriptor that one thread polls and any other makes readable."""

from __future__ import annotations

import os


class Wakeup:
    """`fd` is readable from `set` to `clear`. It is closed when nobody has this any more, so a poll that is
    under way never sees the number in another use.
    """

    fd = -1

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        """Make it readable."""
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make it unreadable; it must be readable."""
        os.eventfd_read(self.fd)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
