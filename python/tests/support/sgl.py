"""SGLang's real HiCache modules, from an unpacked wheel, without a server, a model or its kernels.

`KVHOIST_SGLANG` names the folder of one unpacked version; the version is in the folder's name (`sglang-0.5.23`).
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import engines
from engines import sglang
from engines.stand_ins import add_blank

ROOT = os.environ.get("KVHOIST_SGLANG", "")

#: Where device pools are: ``cuda`` runs the linker's tests on a GPU.
DEVICE = os.environ.get("KVHOIST_SGLANG_DEVICE", "cpu")


def missing() -> str | None:
    """Why these tests cannot run here, if they cannot."""
    return engines.missing("KVHOIST_SGLANG", "sglang")


def version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", Path(ROOT).name)[:3])


_modules: SimpleNamespace | None = None


def boot() -> SimpleNamespace:
    """Imports the modules, once."""
    global _modules
    if _modules is not None:
        return _modules
    sglang.boot(ROOT)
    only("sglang.srt.observability.metrics_collector", "StorageMetrics")
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import hicache_storage, memory_pool
    from sglang.srt.mem_cache.pool_host import mha, mla
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    sglang.patch_pools(mha, mla)
    _without_compilers_and_devices(cache_controller)
    _modules = SimpleNamespace(
        controller=cache_controller, storage=hicache_storage, memory_pool=memory_pool, mha=mha, mla=mla,
        factory=StorageBackendFactory,
    )  # fmt: skip
    return _modules


def _without_compilers_and_devices(cache_controller) -> None:
    """What SGLang would compile when it first hashes, and the streams of a device that is not there."""

    class Nothing:
        def __getattr__(self, _name):
            return lambda *_args, **_kwargs: None

    nothing = lambda *_args, **_kwargs: Nothing()  # noqa: E731
    if hasattr(cache_controller, "device_module"):
        cache_controller.device_module = SimpleNamespace(
            __name__="none", Event=nothing, Stream=nothing, current_stream=nothing
        )
    try:
        from sglang.srt.mem_cache import utils
        from sglang.srt.mem_cache.cpp_utils import native_hash  # noqa: F401
    except ImportError:
        return
    utils.get_native_hash = lambda tokens, prior, page_size: page_keys(list(tokens), page_size, prior or b"")


def only(module: str, name: str, **names) -> None:
    """Puts one class of a module, from its real source, in place of the module, which imports the whole server.

    `names` are those that the class takes from its module.
    """
    import ast
    import dataclasses
    import typing

    path = Path(ROOT, *module.split(".")).with_suffix(".py")
    (found,) = (node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) == name)
    stand_in = add_blank(
        module, dataclasses=dataclasses, dataclass=dataclasses.dataclass, field=dataclasses.field, List=typing.List,
        **names,
    )  # fmt: skip
    body = [ast.ImportFrom("__future__", [ast.alias("annotations")], 0), found]
    source = ast.fix_missing_locations(ast.Module(body, []))
    exec(compile(source, str(path), "exec", dont_inherit=True), stand_in.__dict__)


class Geometry(SimpleNamespace):
    """A model's shape on one rank."""

    #: The first of its layers in the model.
    first = 0


#: Small ones of each kind, with the proportions of the real ones.
MHA = Geometry(kind="mha", layers=4, heads=2, head_dim=64, page_tokens=16)
MLA = Geometry(kind="mla", layers=3, lora=512, rope=64, page_tokens=16)
#: Pages in pieces of 64 KiB and more, as those of the real ones.
MHA_LONG = Geometry(kind="mha", layers=4, heads=4, head_dim=128, page_tokens=16)
MLA_LONG = Geometry(kind="mla", layers=4, lora=512, rope=64, page_tokens=16)
#: Pages whose sizes are no multiples of 4 KiB.
MLA_ODD = Geometry(kind="mla", layers=3, lora=96, rope=13, page_tokens=1)

#: 64-token bf16 pages of the models in docs and benches.
LLAMA_8B = Geometry(kind="mha", layers=32, heads=8, head_dim=128, page_tokens=64)
LLAMA_70B_TP8 = Geometry(kind="mha", layers=80, heads=1, head_dim=128, page_tokens=64)
DEEPSEEK_V3 = Geometry(kind="mla", layers=61, lora=512, rope=64, page_tokens=64)


def device_pool(geometry: Geometry, pages: int, dtype=None):
    """SGLang's device pool."""
    import torch

    modules = boot()
    dtype = dtype or torch.bfloat16
    tokens = pages * geometry.page_tokens
    if geometry.kind == "mha":
        return modules.memory_pool.MHATokenToKVPool(
            tokens, geometry.page_tokens, dtype, geometry.heads, geometry.head_dim, geometry.layers, DEVICE, False,
            start_layer=geometry.first, end_layer=geometry.first + geometry.layers,
        )  # fmt: skip
    return modules.memory_pool.MLATokenToKVPool(
        tokens, geometry.page_tokens, dtype, geometry.lora, geometry.rope, geometry.layers, DEVICE, False,
        start_layer=geometry.first, end_layer=geometry.first + geometry.layers,
    )  # fmt: skip


def host_pool(geometry: Geometry, device, layout: str, ratio: float = 2.0, **more):
    """SGLang's host pool for it."""
    modules = boot()
    mha = geometry.kind == "mha"
    cls = modules.mha.MHATokenToKVPoolHost if mha else modules.mla.MLATokenToKVPoolHost
    if version() < (0, 5, 23):
        return cls(device, ratio, 0, geometry.page_tokens, layout, pin_memory=False, **more)
    info = device._mha_buffer_info() if mha else device._mla_buffer_info()
    more.update({} if mha else {"target_layer_num": geometry.layers})
    return cls(
        info, ratio, 0, geometry.page_tokens, layout, pin_memory=False, device_capacity_tokens=device.size,
        start_layer=geometry.first, end_layer=geometry.first + geometry.layers, **more,
    )  # fmt: skip


def storage_config(geometry: Geometry, extra: dict, layout: str = "page_first", **fields):
    """SGLang's HiCacheStorageConfig for one rank."""
    modules = boot()
    values = dict(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=geometry.kind == "mla", enable_storage_metrics=True, is_page_first_layout=layout == "page_first",
        model_name="meta/tiny", extra_config=extra,
    )  # fmt: skip
    values.update(fields)
    return modules.storage.HiCacheStorageConfig(**values)


def extra_config(path, capacity="64MiB", host_bytes="8MiB", **more) -> dict:
    """What an operator writes on the command line."""
    return {
        "backend_name": "kvhoist", "module_path": "kvhoist.sglang", "class_name": "HiCacheKvhoist", "interface_v1": 1,
        "path": str(path), "capacity": capacity, "host_bytes": host_bytes, "direct_io": "prefer", **more,
    }  # fmt: skip


def backend(geometry: Geometry, pool, extra: dict, **fields):
    """Through SGLang's factory, attached to `pool` as its controller does it."""
    modules = boot()
    config = storage_config(geometry, extra, pool.layout, **fields)
    made = modules.factory.create_backend("dynamic", config, pool)
    made.register_mem_pool_host(pool)
    if hasattr(modules.storage.HiCacheStorage, "on_host_pools_registered"):
        made.on_host_pools_registered()
    return made


_group = None


def process_group():
    """A process group of one."""
    global _group
    import torch.distributed as dist

    if _group is None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        _group = dist.group.WORLD
    return _group


_override = None


def _one_rank() -> None:
    """States that this process is the only rank, which a server does when it starts."""
    global _override
    if _override is None:
        from sglang.srt.runtime_context import get_parallel

        sizes = ("tp_size", "pp_size", "attn_tp_size", "attn_dp_size", "attn_dcp_size", "attn_cp_size")
        ranks = ("tp_rank", "pp_rank", "attn_tp_rank", "attn_dp_rank", "attn_dcp_rank", "attn_cp_rank")
        parallel, values = get_parallel(), {**dict.fromkeys(sizes, 1), **dict.fromkeys(ranks, 0)}
        for name in list(values):
            try:
                with parallel.override(**{name: values[name]}):
                    pass
            except ValueError as error:
                if "unknown" not in str(error):
                    raise
                del values[name]  # This version has no such name.
        _override = parallel.override(**values)
        _override.__enter__()


def controller(
    device, host, page_tokens: int, extra: dict | None, storage: str = "dynamic", io_backend: str = "direct"
):
    """SGLang's HiCacheController, with the storage attached and its threads running."""
    modules = boot()
    _one_rank()
    allocator = SimpleNamespace(get_kvcache=lambda: device, device="cpu")
    group = process_group()
    return modules.controller.HiCacheController(
        allocator, host, page_tokens, group, threading.Event(), attn_tp_group=group, write_policy="write_through",
        io_backend=io_backend, storage_backend=storage, prefetch_threshold=page_tokens, model_name="meta/tiny",
        storage_backend_extra_config=extra,
    )  # fmt: skip


def page_keys(tokens: list[int], page_tokens: int, prior: bytes = b"") -> list[str]:
    """The keys that SGLang gives to the pages of these tokens."""
    keys = []
    for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
        digest = hashlib.sha256(prior)
        for token in tokens[start : start + page_tokens]:
            digest.update(token.to_bytes(4, "little"))
        prior = digest.digest()
        keys.append(prior.hex())
    return keys
