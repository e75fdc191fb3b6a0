"""What a model keeps of tokens, and whether a prompt can go on from that alone: found by trying. Needs torch and
transformers."""

from __future__ import annotations

from typing import Any, Iterable

import torch
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from .._values import config_error
from .buffers import fill_layer, fill_state
from .prompt_record import cache_argument
from .shapes import Group, LayerShape, StateGroup, StateShape

#: What a layer may keep: KV that can be cut at a token, recurrent states, or both.
_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)

#: Tokens of the prompts that are tried: of their first part, and of their second.
_FIRST, _SECOND = 16, 8

#: What the order of sums may move, in steps of the type: of what other tokens move, and of logits in all.
_OF_MOVED, _OF_ALL = 8, 4
#: Finer types are multiplied in coarser steps, as float32 is as TF32.
_STEP_MIN = 2**-9


def probe(model: Any, config: Any, block_tokens: int) -> tuple[list[Group | StateGroup], dict[int, torch.device]]:
    """What each layer keeps, and where. Raises ConfigError for a model that cannot go on from that alone."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            return _probe(model, config, block_tokens)
    finally:
        for module in training:
            module.training = True


def _probe(model: Any, config: Any, block_tokens: int) -> tuple[list[Group | StateGroup], dict[int, torch.device]]:
    tokens, device = torch.Generator().manual_seed(1), model.get_input_embeddings().weight.device
    parts = [
        torch.randint(config.vocab_size, (1, count), generator=tokens).to(device) for count in (_FIRST, _SECOND) * 2
    ]
    kept = DynamicCache(config=config)
    _logits(model, kept, parts[0])
    layers, states, devices = _shapes(kept)
    if not layers:
        raise config_error("model", type(model).__name__, "one with attention, whose layers keep keys and values")
    _refuse_more_than_kept(model, config, kept, layers, states, parts)
    groups: list[Group | StateGroup] = []
    for reach in dict.fromkeys(reach for reach, _ in layers):
        groups += Group(tuple(layer for its, layer in layers if its == reach), reach).parts(block_tokens)
    if states:
        groups.append(StateGroup(tuple(states)))
    return groups, devices


def _shapes(cache: Any) -> tuple[list[tuple[int | None, LayerShape]], list[StateShape], dict[int, torch.device]]:
    """Of what a cache keeps: layers with KV, and how far they see; states; where each layer is."""
    layers: list[tuple[int | None, LayerShape]] = []
    states: list[StateShape] = []
    devices = {}
    for index, layer in enumerate(cache.layers):
        if type(layer) not in _LAYERS:
            names = ", ".join(kind.__name__ for kind in _LAYERS)
            raise config_error(f"layer {index}", type(layer).__name__, f"one of {names}")
        if isinstance(layer, LinearAttentionLayer):
            for kind, kept in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                for n, state in kept.items():
                    if state is not None:
                        states.append(StateShape(index, n, kind, tuple(state.shape[1:]), state.dtype))
                        devices[index] = state.device
        if not getattr(layer, "is_initialized", False):
            continue  # It has states only, or uses another layer's KV.
        _, heads, _, key_dim = layer.keys.shape
        reach = layer.sliding_window - 1 if layer.is_sliding else None
        layers.append((reach, LayerShape(index, heads, key_dim, layer.values.shape[3], layer.keys.dtype)))
        devices[index] = layer.keys.device
    return layers, states, devices


def _refuse_more_than_kept(
    model: Any, config: Any, kept: Any, layers: list[tuple[int | None, LayerShape]], states: list[StateShape],
    parts: list[torch.Tensor],
) -> None:  # fmt: skip
    """Raises ConfigError where KV depends on later tokens, or what follows depends on more than a cache keeps of the
    first part."""
    first, second, other_first, other_second = parts
    name = type(model).__name__

    def whole(*parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The keys and values of a prompt's first part, those of its second, and the logits of its second."""
        cache = DynamicCache(config=config)
        logits = _logits(model, cache, torch.cat(parts, 1))[:, _FIRST:]
        return (*_keys_and_values(cache.layers[layer.index] for _, layer in layers), logits)

    kv, kv_behind, logits = whole(first, second)
    kv_before_others, _, _ = whole(first, other_second)
    _, kv_behind_others, logits_behind_others = whole(other_first, second)
    step = max(_STEP_MIN, *(torch.finfo(layer.dtype).eps for _, layer in layers))
    if not (kv_before_others - kv).norm() <= _OF_MOVED * step * (kv_behind_others - kv_behind).norm():
        found = f"{name}, whose keys and values change with the tokens behind theirs"
        raise config_error("model", found, "one where they depend on the tokens before them only")
    # Only now: what the model keeps beside its caches is that of other prompts.
    cache = DynamicCache(config=config)
    for _, layer in layers:
        source = kept.layers[layer.index]
        fill_layer(cache.layers[layer.index], source.keys, source.values, _FIRST)
    for state in states:
        fill_state(cache.layers[state.index], state, state.of(kept.layers[state.index]))
    away, all_away = ((other - logits).norm() for other in (_logits(model, cache, second), logits_behind_others))
    if not away <= step * max(_OF_MOVED * all_away, _OF_ALL * logits.norm()):
        expected = "one that answers the same when a prompt's tokens are given in two parts, and others' between them"
        raise config_error("model", name, f"{expected}; it goes on from other than its cache's keys, values and states")


def _logits(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """What the model answers. Tokens that it never answers are left out: their logits are as large as can be."""
    logits = model(ids, use_cache=True, **cache_argument(cache))[0].float()
    return torch.where(logits > -1e4, logits, 0)


def _keys_and_values(layers: Iterable[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of a prompt's first part, as far as a window has them, and those of its second, of all layers."""
    tokens = [
        one[0].transpose(0, 1).flatten(1).float().cpu() for layer in layers for one in (layer.keys, layer.values)
    ]
    return (
        torch.cat([one[:-_SECOND].flatten() for one in tokens]),
        torch.cat([one[-_SECOND:].flatten() for one in tokens]),
    )
