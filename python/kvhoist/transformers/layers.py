"""Blocks of a prompt on their way to the device, layer after layer, while the model computes. Needs torch."""

from __future__ import annotations

import logging
import weakref
from typing import Any, Sequence

import numpy
import torch

from ..cache import Cache
from ..errors import Error, UnavailableError

logger = logging.getLogger(__name__)


class Arriving:
    """Blocks of one group on their way into memory of the device of their own. Those that are `held` in host memory
    come layer by layer; others come whole, from the drives too.

    The memory is held until the load has ended, whoever forgets this object.
    """

    def __init__(
        self, cache: Cache, register: Any, group: Any, keys: Sequence[bytes], block_tokens: int, device: torch.device,
        held: Any,
    ) -> None:  # fmt: skip
        """Begins the load. Raises UnavailableError where there is no room."""
        self._group, self._block_tokens, self._count, self._device = group, block_tokens, len(keys), device
        self._held = held
        #: Whether a block is missing of a layer that was waited for here; what a stream waits for shows at the end.
        self.failed = False
        sizes = [layer.token_bytes * block_tokens for layer in group.layers]
        self.nbytes = len(keys) * sum(sizes)
        try:
            try:
                self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError as error:
                raise UnavailableError(f"found no {self.nbytes} bytes of device memory: {error}") from None
            if device.type == "cuda":
                # What used this memory before is in this stream; the cache copies in others.
                torch.cuda.current_stream(device).synchronize()
            region = register(self._memory.data_ptr(), self.nbytes)
            #: Where each layer's blocks begin.
            self._starts = [len(keys) * sum(sizes[:n]) for n in range(len(sizes))]
            starts, strides = numpy.array(self._starts, dtype=numpy.int64), numpy.array(sizes, dtype=numpy.int64)
            addresses = self._memory.data_ptr() + starts + numpy.arange(len(keys))[:, None] * strides
            try:
                self._load = cache.load_layers(keys, addresses, sizes, list(range(len(sizes))))
            except BaseException:
                region.unregister()
                raise
        except BaseException:
            if held is not None:
                held.release()
            raise
        self._finish = weakref.finalize(self, _end, self._load, region, held, self._memory)

    def layer(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, `[heads, blocks, tokens, dim]`; what the current stream does next waits for it."""
        if self._held is None or self._device.type != "cuda":
            # A stream that waits for drives blocks calls of CUDA for long: this thread does.
            self._wait(at)
        else:
            self._let_stream_wait(at)
        if self._device.type == "cuda":
            # Who reads in another stream than the memory's own may not have ended when it is freed, and allocated anew.
            self._memory.record_stream(torch.cuda.current_stream(self._device))
        shape, size = self._group.layers[at], self._block_tokens
        begin = self._starts[at]
        blocks = self._memory[begin : begin + self._count * shape.token_bytes * size].view(self._count, -1)
        _, keys, values = next(iter(type(self._group)((shape,), self._group.reach).views(blocks, size)))
        return keys, values

    def _wait(self, at: int) -> None:
        leading, _ = self._load.layer(at)
        self.failed |= leading < self._count

    def _let_stream_wait(self, at: int) -> None:
        try:
            self._load.wait(at, torch.cuda.current_stream(self._device).cuda_stream)
        except Error as error:
            logger.warning("kvhoist: a stream cannot wait for a layer, so its thread does: %s", error)
            self._wait(at)

    def end(self) -> dict[int, Any]:
        """Waits for the load and lets its memory go: of each block that is not there, False or an error."""
        return self._finish() or {}


def _end(load: Any, region: Any, held: Any, _memory: torch.Tensor) -> dict[int, Any]:
    try:
        return {at: result for at, result in enumerate(load.blocks()) if result is not True}
    finally:
        region.unregister()
        if held is not None:
            held.release()
