"""Tiny models with random weights, for the tests of `kvhoist.transformers`."""

from __future__ import annotations

import torch
import transformers

COMMON = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def config(kind: str, **more: object) -> transformers.PreTrainedConfig:
    """Llama (grouped heads), Qwen, Gemma (sliding windows between full attention), Mistral (windows only), DeepSeek
    (MLA and experts: keys and values of unlike sizes), hybrids, and others."""
    grouped = {**COMMON, "num_key_value_heads": 2, "head_dim": 16, **more}
    if kind == "llama":
        return transformers.LlamaConfig(**grouped)
    if kind == "qwen":
        return transformers.Qwen3Config(**grouped)
    if kind == "gemma":
        return transformers.Gemma3TextConfig(**{**grouped, "num_hidden_layers": 6, "sliding_window": 33, **more})
    if kind == "mistral":
        return transformers.MistralConfig(**{**grouped, "sliding_window": 40, **more})
    # States and KV of weights this large move the logits of the hybrids by one and more.
    large = {**COMMON, "initializer_range": 0.2}
    if kind == "granite":
        return transformers.GraniteMoeHybridConfig(
            **large, num_key_value_heads=2, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_expand=2,
            mamba_n_groups=1, layer_types=["mamba", "attention"] * 2, num_local_experts=0, shared_intermediate_size=64,
            position_embedding_type="rope",
        )  # fmt: skip
    if kind == "lfm2":
        return transformers.Lfm2Config(**large, num_key_value_heads=2, full_attn_idxs=[1, 3])
    if kind == "jamba":
        return transformers.JambaConfig(
            **large, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, num_experts=1,
            num_experts_per_tok=1, mamba_d_state=8, use_mamba_kernels=False,
        )  # fmt: skip
    if kind == "bamba":
        return transformers.BambaConfig(
            **large, num_key_value_heads=2, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_expand=2,
            mamba_n_groups=1, attn_layer_indices=[1, 3],
        )  # fmt: skip
    if kind == "falcon-h1":
        return transformers.FalconH1Config(
            **{**grouped, **large}, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_d_ssm=128, mamba_n_groups=1,
        )  # fmt: skip
    if kind == "qwen-next":
        return transformers.Qwen3NextConfig(
            **{**grouped, **large, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4},
            num_experts_per_tok=2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
            linear_value_head_dim=16,
        )  # fmt: skip
    if kind == "recurrent-gemma":
        return transformers.RecurrentGemmaConfig(**grouped, attention_window_size=32, lru_width=64)
    if kind == "doge":
        return transformers.DogeConfig(**COMMON, num_key_value_heads=2, **more)
    if kind == "qwen2-vl":
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
        return transformers.Qwen2VLConfig(
            text_config={**COMMON, "num_key_value_heads": 2, "rope_parameters": rope},
            vision_config=dict(depth=1, embed_dim=32, hidden_size=64, num_heads=2, patch_size=4, mlp_ratio=2),
            vision_start_token_id=124, video_token_id=125, image_token_id=126, vision_end_token_id=127,
        )  # fmt: skip
    assert kind == "deepseek"
    return transformers.DeepseekV3Config(
        **COMMON, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16,
        v_head_dim=16, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32,
        first_k_dense_replace=1, **more,
    )  # fmt: skip


KINDS = ["llama", "qwen", "gemma", "mistral", "deepseek"]
#: Recurrent layers among attention: Mamba 2, Mamba 2 and attention in each layer, gated delta nets, convolutions.
HYBRIDS = ["granite", "falcon-h1", "qwen-next", "lfm2"]
#: Hybrids that answer otherwise in transformers 5.17 when a prompt is given in two parts.
FORGETFUL = ["bamba", "jamba"]


def model(kind: str, seed: int = 1, **more: object):
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    settings = config(kind, **more)
    of = transformers.AutoModelForImageTextToText if kind == "qwen2-vl" else transformers.AutoModelForCausalLM
    return of.from_config(settings, dtype=torch.float32).eval()


def prompt(tokens: int, seed: int = 7, rows: int = 1) -> torch.Tensor:
    """Tokens that are none of the special ones."""
    return torch.randint(3, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def padded(*prompts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Prompts of one row each as a batch, with padding on the left."""
    width = max(one.shape[1] for one in prompts)
    ids, mask = torch.zeros(len(prompts), width, dtype=torch.long), torch.zeros(len(prompts), width, dtype=torch.long)
    for n, one in enumerate(prompts):
        ids[n, width - one.shape[1] :], mask[n, width - one.shape[1] :] = one[0], 1
    return {"input_ids": ids, "attention_mask": mask}
