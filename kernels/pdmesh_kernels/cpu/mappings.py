"""What is said when memory that maps a file cannot be read any more: `src/mappings.h`."""

import ctypes
import logging
import mmap
import weakref

import numpy as np

from pdmesh_kernels.cpu.library import LibraryError, find

MAX_TEXT_BYTES = 1023

logger = logging.getLogger(__name__)


def name_mapping(memory: mmap.mmap, text: str) -> None:
    """Have `text` written as a line to standard error should the process end since this memory cannot be read: a signal ends
    it then (SIGBUS), and would say nothing. For as long as the memory is mapped; where the library is not there, nothing is."""
    try:
        functions = find().functions
    except LibraryError as exc:
        logger.debug("nothing is said of mappings: %s", exc)
        return
    name, forget = functions.pdm_name_mapping, functions.pdm_forget_mapping
    name.restype, name.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    forget.restype, forget.argtypes = None, [ctypes.c_int]
    line = text.encode(errors="surrogateescape")[: MAX_TEXT_BYTES - 1] + b"\n"
    number = name(np.frombuffer(memory, np.uint8).ctypes.data, len(memory), line)
    if number < 0:
        logger.debug("too many mappings to say this of one more: %s", text)
        return
    weakref.finalize(memory, forget, number)
