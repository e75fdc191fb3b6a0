"""The host memory of SGLang's pools. Needs torch's tensors and not SGLang."""

from __future__ import annotations

from typing import Any


def pool_memory(pool: Any) -> list[tuple[int, int]]:
    """(address, bytes) of every piece of host memory that a pool's pages lie in."""
    tensors: list[Any] = []
    hybrid = getattr(pool, "get_hybrid_pool_buffer", None)
    if callable(hybrid):
        tensors += _tensors(hybrid())
    tensors += _tensors(getattr(pool, "kv_buffer", None))
    pieces = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        pieces[storage.data_ptr()] = max(storage.nbytes(), pieces.get(storage.data_ptr(), 0))
    return [(address, nbytes) for address, nbytes in pieces.items() if nbytes > 0]


#: Lines of /proc/self/smaps: transparent huge pages of private and of shared memory, and those of hugetlbfs.
_HUGE = frozenset({"AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:", "Private_Hugetlb:", "Shared_Hugetlb:"})


def huge_page_share(pieces: list[tuple[int, int]]) -> float | None:
    """The share of some memory that lies in huge pages, or `None` if the system does not say.

    Whole mappings are counted, so the share may include memory beside the pieces.
    """
    total = sum(nbytes for _, nbytes in pieces)
    inside, huge = False, 0
    try:
        with open("/proc/self/smaps") as smaps:
            for line in smaps:
                first, _, rest = line.partition(" ")
                if first in _HUGE and inside:
                    huge += int(rest.split()[0]) << 10
                elif not first.endswith(":"):
                    start, end = (int(number, 16) for number in first.split("-"))
                    inside = any(start < address + nbytes and address < end for address, nbytes in pieces)
    except (OSError, ValueError, IndexError):
        return None
    return min(1.0, huge / total) if total else None


def percent(share: float | None) -> str:
    """A share in words."""
    return "an unknown part" if share is None else f"{share:.0%}"


def _tensors(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if hasattr(value, "untyped_storage") else []


def flat_bytes(tensor: Any) -> Any:
    """The memory of a contiguous tensor of any dtype, as a buffer object."""
    import torch

    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"found a tensor on {tensor.device}, contiguous: {tensor.is_contiguous()}; expected host memory, contiguous"
        )
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
