"""vLLM's `--load-format kvhoist`: checkpoints in the format safetensors, read by :mod:`kvhoist.safetensors`.

vLLM calls :func:`register` by the entry point `vllm.general_plugins`. `--model-loader-extra-config` takes `threads`,
`piece_bytes`, `window_bytes`, `page_cache`, `mode`, `service` and `keep`, beside vLLM's own keys.
"""

from __future__ import annotations

import copy
import logging
import time
from typing import Any, Callable, Generator

from .._values import config_error

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

            if getattr(self.load_config, "safetensors_load_strategy", None) == "torchao":
                raise config_error(
                    "load_format", "kvhoist, for a checkpoint that torchao has serialized",
                    "'auto': its tensors are made of several of the files' by vLLM's own loader",
                )  # fmt: skip
            folder, files, *more = self._prepare_weights(
                source.model_or_path,
                source.subfolder,
                source.revision,
                source.fall_back_to_pt,
                source.allow_patterns_overrides,
            )
            files = self._without_language_model(folder, files, *more)
            device = torch.get_default_device() if not torch.cuda.is_available() else torch.device("cuda")
            if device.type == "cuda" and device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
            logger.info("kvhoist reads %d files of the checkpoint", len(files))
            wanted = _wanted(getattr(self, "local_expert_ids", None), getattr(source, "is_unused_weight", None))
            if self.counter_before_loading_weights == 0.0:
                self.counter_before_loading_weights = time.perf_counter()
            for name, tensor in iterate(sorted(files), device, wanted=wanted, **self._kvhoist):
                yield source.prefix + name, tensor

        def _without_language_model(self, folder: str, files: list[str], *more: Any) -> list[str]:
            """The files without those of a language model only, with `--mm-encoder-only` (0.33)."""
            prefixes = getattr(self, "_encoder_only_lm_prefixes", None)
            if prefixes is None:
                return files
            from vllm.model_executor.model_loader.weight_utils import filter_mm_encoder_only_safetensors_files

            mapper = self._encoder_only_weights_mapper
            left = filter_mm_encoder_only_safetensors_files(files, folder, more[-1], prefixes, weights_mapper=mapper)
            if not left:
                raise config_error("mm_encoder_only", f"{len(files)} files of {', '.join(prefixes)} only", "an encoder's")
            return left

    return KvhoistModelLoader


def _wanted(experts: set[int] | None, unused: Callable[[str], bool] | None) -> Callable[[str], bool] | None:
    """Which tensors this process needs, as vLLM says it for experts of other processes and for what the model does not
    load; None for all."""
    if experts is None:
        return None if unused is None else lambda name: not unused(name)
    from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

    return lambda name: not should_skip_weight(name, experts) and (unused is None or not unused(name))
