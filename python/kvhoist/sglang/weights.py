"""SGLang's `--load-format instanttensor`, read by :mod:`kvhoist.safetensors` where the launch asks for it.

SGLang calls :func:`register` by the entry point `sglang.srt.plugins` (0.5.23), in each of its processes. It accepts no
new load format, but hands the keys of `--model-loader-extra-config` to this one unread: with `{"loader": "kvhoist"}`
kvhoist reads the checkpoint, with `threads`, `piece_bytes`, `window_bytes` and `page_cache`. Without it nothing changes.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Iterator

logger = logging.getLogger(__name__)

_TARGET = "sglang.srt.model_loader.weight_utils.instanttensor_weights_iterator"
_SETTINGS = ("threads", "piece_bytes", "window_bytes", "page_cache", "mode", "service", "keep")


def register() -> None:
    """Makes the loader known to SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET, _weights, HookType.AROUND)


def _weights(
    original: Callable[..., Iterator[Any]],
    hf_weights_files: list[str],
    extra_config: Any = None,
    *more: Any,
    **named: Any,
) -> Iterator[Any]:
    """The tensors of these files, by SGLang's own loader unless kvhoist is asked for."""
    settings = dict(extra_config or {})
    loader = settings.pop("loader", None)
    if loader is None:
        return original(hf_weights_files, extra_config, *more, **named)
    from ..errors import ArgumentError

    if loader != "kvhoist":
        raise ArgumentError(f"model_loader_extra_config: found the loader {loader!r}, expected 'kvhoist', or none")
    unknown = sorted(settings.keys() - set(_SETTINGS))
    if unknown:
        raise ArgumentError(f"model_loader_extra_config: found {unknown[0]!r}, expected {', '.join(_SETTINGS)}")
    import torch

    from ..safetensors import iterate

    # Each rank reads what it loads: a group to share with is not used.
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    logger.info("kvhoist reads %d files of the checkpoint", len(hf_weights_files))
    return iterate(sorted(hf_weights_files), device, **settings)
