"""vLLM's `--load-format kvhoist`: checkpoints in the format safetensors, read by :mod:`kvhoist.safetensors`.

vLLM calls :func:`register` by the entry point `vllm.general_plugins`. `--model-loader-extra-config` takes `threads`,
`piece_bytes`, `window_bytes` and `page_cache`, beside vLLM's own keys.
"""

from __future__ import annotations

import copy
import logging
from typing import Any, Generator

logger = logging.getLogger(__name__)

_SETTINGS = ("threads", "piece_bytes", "window_bytes", "page_cache", "mode", "service", "keep")


def register() -> None:
    """Makes the load format known to vLLM, in each of its processes."""
    try:
        from vllm.model_executor import model_loader

        if "kvhoist" not in getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {}):
            model_loader.register_model_loader("kvhoist")(_loader_class())
    except (ImportError, AttributeError) as error:
        # A plugin that raises would end an engine that may never ask for it.
        logger.warning("--load-format kvhoist: found a vLLM without what it is built on (%s), expected 0.28 or later", error)


def _loader_class() -> type:
    import torch
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class KvhoistModelLoader(DefaultModelLoader):
        """vLLM's own loader, whose tensors come from kvhoist."""

        def __init__(self, load_config: Any) -> None:
            extra = dict(load_config.model_loader_extra_config or {})
            self._kvhoist = {key: extra.pop(key) for key in _SETTINGS if key in extra}
            # What vLLM does for safetensors files, with their names from an index and all of its filters.
            config = copy.copy(load_config)
            config.load_format, config.model_loader_extra_config = "safetensors", extra
            super().__init__(config)

        def _get_weights_iterator(self, source: Any) -> Generator[tuple[str, torch.Tensor], None, None]:
            from ..safetensors import iterate

            _folder, files, *_ = self._prepare_weights(
                source.model_or_path,
                source.subfolder,
                source.revision,
                source.fall_back_to_pt,
                source.allow_patterns_overrides,
            )
            experts = getattr(self, "local_expert_ids", None)
            device = torch.get_default_device() if not torch.cuda.is_available() else torch.device("cuda")
            if device.type == "cuda" and device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
            logger.info("kvhoist reads %d files of the checkpoint", len(files))
            wanted = _wanted(experts) if experts is not None else None
            for name, tensor in iterate(sorted(files), device, wanted=wanted, **self._kvhoist):
                yield source.prefix + name, tensor

    return KvhoistModelLoader


def _wanted(experts: set[int]) -> Any:
    """Which tensors this process needs, as vLLM says it for experts of other processes."""
    from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

    return lambda name: not should_skip_weight(name, experts)
