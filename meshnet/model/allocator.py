"""Has the C library give memory back while a stage is loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""From malloc.h: free memory at the end of the heap goes back to the system if there is more of it;
and blocks of so many bytes and more come from the system, and go back to it."""
_LOADING_BYTES: Final = 2**16
_RUNNING_BYTES: Final = 2**25
"""What glibc comes to by itself; activations are not to be fetched anew at each step.

Set by hand, one threshold no longer moves the other: a chunk of a prompt in 8 bits took half as
long again while the heap's end went back after each product.
"""


@contextmanager
def returning_memory() -> Generator[None]:
    """Give freed blocks back at once, inside the block; where the C library is glibc.

    Loading frees as many tensors as it keeps: each is read, then rounded or put beside others. By
    itself glibc keeps what is freed for the thread that took it, which here never asks again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _LOADING_BYTES)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _RUNNING_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _RUNNING_BYTES)  # as glibc has it
