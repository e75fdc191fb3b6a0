"""Where the linker's pages are kept: a cache of the rank's own for each component, or a space of the node's service."""

from __future__ import annotations

import logging
from typing import Any, Mapping

from .._store_settings import StoreSettings
from .._stores import Place, close_all, open_store
from ..cache import Cache
from ..service.space import ServiceSpace
from .device_pools import memory_of, pieces_of
from .identity import Identity
from .linker_pages import Pages
from .linker_settings import LinkerSettings
from .refusals import refuse_unknown_shares

logger = logging.getLogger(__name__)

#: Changed whenever stored pages would be read differently.
FORMAT = "sglang-linker-v1"


def open_pages(
    settings: LinkerSettings, identity: Identity, server_args: Any, group: Any, entries: Mapping[str, list],
    device: int | None,
) -> dict[str, Pages]:  # fmt: skip
    """Opens each component's store, and registers its device memory.

    In a service ranks with the same pages share them: those of a model whose pools are replicated (MLA), and replicas.
    """
    config = settings.store.for_ranks(identity.parts_of_total(server_args, settings.in_service))
    if settings.in_service:
        identity = identity.shared()
    refuse_unknown_shares(config.pool_shares, entries)
    opened: dict[str, Pages] = {}
    try:
        for name, of_component in entries.items():
            pieces, share = pieces_of(of_component, group.num_layers), _share(config, name, list(entries))
            cut = [[piece.pool, piece.nbytes, piece.layer] for piece in pieces]
            what = {"format": FORMAT, "pool": name, "page": group.page_size, "cut": cut, **identity.digested(True)}
            buffers = [buffer for entry in of_component for buffer in entry.get_hybrid_pool_buffer()]
            what["dtypes"] = [str(buffer.dtype) for buffer in buffers]
            nbytes = sum(piece.nbytes for piece in pieces)
            place = Place(identity.model_name, f"{identity.rank_name()}-{name}", what, identity.number())
            store = _open(settings, config.part(share), place, nbytes, device)
            opened[name] = pages = Pages(name, pieces, store, settings.offer)
            for address, size in memory_of(of_component):
                store.register_device(address, size)
            tiers = store.stats()["tiers"]
            logger.info(
                "kvhoist: linker, component %s: pages of %d bytes in %d pieces of %d layers; %d slots in host "
                "memory, %d on disk, %d resident; offered: %s",
                name, nbytes, len(pieces), len(pages.layers), tiers["host"]["slots"], tiers["disk"]["slots"],
                tiers["disk"]["resident"], settings.offer,
            )  # fmt: skip
    except BaseException:
        close_all(pages.cache for pages in opened.values())
        raise
    return opened


def _open(
    settings: LinkerSettings, part: StoreSettings, place: Place, nbytes: int, device: int | None
) -> Cache | ServiceSpace:
    if not settings.in_service:
        return open_store(
            part, place, nbytes, bypass_host=False, device="simulated" if device is None else "cuda",
            device_ordinal=device or 0, device_blocks=1, copy_blocks_max=settings.copy_blocks_max,
        )  # fmt: skip
    kind = "simulated" if device is None else "cuda"
    return ServiceSpace(part, place.namespace(), nbytes, kind, device or 0)


def _share(config: StoreSettings, name: str, names: list[str]) -> float:
    """A component's share of the capacity and of host memory: that of the settings, or an equal part of the rest."""
    given = config.pool_shares
    return given[name] if name in given else (1.0 - sum(given.values())) / (len(names) - len(given))
