"""SGLang's copy operations between device and host pools (`sgl_kernel.kvcacheio`), written with torch.

Those of `--hicache-io-backend direct` copy. Any other raises, so that no test takes a copy for done that was not made.
"""

from __future__ import annotations

_REFUSED = """
    get_device_accessible_ptr transfer_kv_all_layer transfer_kv_all_layer_lf_pf transfer_kv_all_layer_lf_ph
    transfer_kv_all_layer_mla transfer_kv_all_layer_mla_lf_pf transfer_kv_per_layer transfer_kv_per_layer_mla
    transfer_kv_per_layer_mla_pf_lf transfer_kv_per_layer_pf_lf transfer_kv_per_layer_ph_lf
""".split()


def _pages(src_indices, dst_indices, page_size: int):
    """First token of each page, in both pools."""
    return zip(src_indices[::page_size].tolist(), dst_indices[::page_size].tolist())


def transfer_kv_direct(*, src_layers, dst_layers, src_indices, dst_indices, page_size):
    """Pages between pools that both have a tensor a layer."""
    for src, dst in _pages(src_indices, dst_indices, page_size):
        for src_layer, dst_layer in zip(src_layers, dst_layers):
            dst_layer[dst : dst + page_size].copy_(src_layer[src : src + page_size])


def transfer_kv_all_layer_direct_lf_pf(*, src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """Pages from a tensor a layer (all of K, then all of V) to tensors of [page, layer, token, ...]."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for src, dst in _pages(src_indices, dst_indices, page_size):
        for part, pages in enumerate(dst_ptrs):
            for layer in range(layers):
                pages[dst // page_size, layer].copy_(src_ptrs[part * layers + layer][src : src + page_size])


def transfer_kv_per_layer_direct_pf_lf(*, src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    """Pages of one layer, the other way."""
    for src, dst in _pages(src_indices, dst_indices, page_size):
        for pages, layer in zip(src_ptrs, dst_ptrs):
            layer[dst : dst + page_size].copy_(pages[src // page_size, layer_id])


def _refuse(name: str):
    def refused(*_args, **_named):
        raise NotImplementedError(
            f"found a call of {name}, expected io_backend 'direct' with layout layer_first or page_first_direct"
        )

    return refused


OPERATIONS = {
    "transfer_kv_direct": transfer_kv_direct,
    "transfer_kv_all_layer_direct_lf_pf": transfer_kv_all_layer_direct_lf_pf,
    "transfer_kv_per_layer_direct_pf_lf": transfer_kv_per_layer_direct_pf_lf,
    **{name: _refuse(name) for name in _REFUSED},
}
