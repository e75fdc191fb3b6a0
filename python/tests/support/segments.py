"""Device memory of a program's own, played by host memory, with blocks in many segments."""

from __future__ import annotations

import array
import ctypes

SEGMENT = 1024
EACH = 4


class Pool:
    """Memory that plays a device's, cut into segments."""

    def __init__(self, segments: int) -> None:
        self.memory = bytearray(segments * SEGMENT)
        self._keep = (ctypes.c_char * len(self.memory)).from_buffer(self.memory)
        self.address = ctypes.addressof(self._keep)

    def addresses(self, segments) -> array.array:
        return array.array("q", [self.address + n * SEGMENT for n in segments])
