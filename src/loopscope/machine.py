"""What does this machine offer? Its cores, and memory that is kept instead of being returned and fetched again."""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGE = 1 << 30


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keep_memory() -> None:
    """Lets glibc keep what was freed: otherwise every large tensor costs new pages, a tenth of a small model's time."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        return
    mallopt(_MMAP_THRESHOLD, _LARGE)
    mallopt(_TRIM_THRESHOLD, _LARGE)


def out_of_memory(error: BaseException) -> bool:
    """Whether this is how PyTorch says so, of a GPU or of the CPU; it need not be imported to be asked."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
