"""The order of the chunks of vLLM's requests, for chains in the store."""

from __future__ import annotations

from typing import Any, Collection, Mapping


class Prefix:
    """The order of one request's keys, as far as known; kept in the request's context."""

    def __init__(self) -> None:
        #: Positions of keys where vLLM gives none (before 0.33): the order of its touches.
        self.touched: dict[bytes, int] = {}
        #: The last chunk of each group that was stored or loaded: (position, key).
        self.ends: dict[bytes, tuple[int, bytes]] = {}
        #: It was scheduled, and has blocks.
        self.has_run = False
        #: Some of its blocks may be from before a reset: nothing of it is stored.
        self.is_outdated = False

    @classmethod
    def of(cls, context: Any) -> "Prefix":
        """That of a request."""
        known = context.get_state(cls)
        if known is None:
            known = cls()
            context.set_state(known)
        return known

    def touch(self, keys: Collection[bytes], context: Any) -> None:
        """Notes the order of keys, where vLLM gives no positions."""
        if not hasattr(context, "get_offload_key_position"):
            for key in keys:
                self.touched.setdefault(key, len(self.touched))

    def by_group(self, keys: Collection[bytes], extras: Collection, context: Any) -> dict[bytes, list[tuple]]:
        """(position, key, extra) of each KV cache group in prefix order; positions are None where unknown."""
        position = getattr(context, "get_offload_key_position", None) or self.touched.get
        groups: dict[bytes, list[tuple]] = {}
        for key, extra in zip(keys, extras):
            groups.setdefault(key[-4:], []).append((position(key), key, extra))
        for group, chunks in groups.items():
            if any(place is None for place, _, _ in chunks):
                groups[group] = [(None, key, extra) for _, key, extra in chunks]
            else:
                chunks.sort(key=lambda chunk: chunk[0])
        return groups

    def loaded(self, groups: dict[bytes, list[tuple]]) -> None:
        """Notes chunks that are being loaded."""
        for group, chunks in groups.items():
            if chunks[-1][0] is not None:
                self.ends[group] = chunks[-1][:2]

    def chains(self, groups: dict[bytes, list[tuple]], context: Any) -> list[tuple[bytes | None, list, list]]:
        """Chunks that are being stored as chains: (parent of the first, keys in prefix order, extras)."""
        chains: list[tuple[bytes | None, list, list]] = []
        for group, chunks in groups.items():
            parent = None
            if chunks[0][0] is not None:
                parent = self._before(context, group, chunks[0][0])
                self.ends[group] = chunks[-1][:2]
            if chunks[0][0] is None and len(chunks) > 1:
                # Their order is unknown: no chain is better than a wrong one.
                chains += [(None, [key], [extra]) for _, key, extra in chunks]
            else:
                chains.append((parent, [key for _, key, _ in chunks], [extra for _, _, extra in chunks]))
        return chains

    def _before(self, context: Any, group: bytes, position: int) -> bytes | None:
        """The chunk that the one at `position` follows."""
        end = self.ends.get(group)
        if end is not None and end[0] < position:
            return end[1]
        places = positions(context)
        before = ((place, key) for key, place in places.items() if key[-4:] == group and place < position)
        return max(before, default=(0, None))[1]


def positions(context: Any) -> Mapping[bytes, int]:
    """Positions of all keys of a request."""
    known = getattr(context, "_offload_key_positions", None)
    return Prefix.of(context).touched if known is None else known
