"""Encoders, decoders and both, of `transformers`: what makes each small, and its arguments."""

from typing import Any

import torch
from benchmarks.architectures.small import (
    VOCABULARY,
    Row,
    classified,
    masked_lm,
    padding,
    plain_images,
    sequences,
    tokens,
    unmasked_lm,
)

_DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}

ENCODERS: dict[str, Row] = {
    "DistilBertForMaskedLM": ({}, masked_lm),
    "RobertaForMaskedLM": ({"max_position_embeddings": 66}, masked_lm),
    "AlbertForMaskedLM": ({}, masked_lm),
    "ElectraForMaskedLM": ({}, masked_lm),
    "DebertaForMaskedLM": (_DEBERTA, masked_lm),
    "DebertaV2ForMaskedLM": (_DEBERTA, masked_lm),
    "MPNetForMaskedLM": ({"max_position_embeddings": 66}, masked_lm),
    "LongformerForMaskedLM": ({"attention_window": 4, "max_position_embeddings": 66}, masked_lm),
    "BigBirdForMaskedLM": ({"block_size": 4, "num_random_blocks": 1}, masked_lm),
    "FunnelForMaskedLM": ({"block_sizes": [1, 1], "d_head": 8}, masked_lm),
    "XLNetLMHeadModel": ({"d_head": 8}, unmasked_lm),
    "ConvBertForMaskedLM": ({"head_ratio": 2}, masked_lm),
    "NystromformerForMaskedLM": ({"num_landmarks": 4, "segment_means_seq_len": 16}, unmasked_lm),
    "ModernBertForMaskedLM": ({}, masked_lm),
    "EuroBertForMaskedLM": ({}, masked_lm),
    "NomicBertForMaskedLM": ({}, masked_lm),
    "MraForMaskedLM": ({}, masked_lm),
    "FlaubertWithLMHeadModel": ({}, masked_lm),
    "XLMWithLMHeadModel": ({}, masked_lm),
    "TapasForQuestionAnswering": (
        {"num_aggregation_labels": 4, "max_num_rows": 4, "max_num_columns": 4},
        lambda: {
            **masked_lm(),
            "token_type_ids": torch.randint(0, 2, (2, 16, 7)),
            "labels": torch.randint(0, 2, (2, 16)),
            "aggregation_labels": torch.tensor([0, 1]),
        },
    ),
    "XLMRobertaForTokenClassification": (
        {"max_position_embeddings": 66, "num_labels": VOCABULARY},
        masked_lm,
    ),
    "SqueezeBertForMaskedLM": ({}, masked_lm),
    "MobileBertForMaskedLM": (
        {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
        masked_lm,
    ),
    "FNetForMaskedLM": ({}, unmasked_lm),
    "RoFormerForMaskedLM": ({}, masked_lm),
    "MegatronBertForMaskedLM": ({}, masked_lm),
    "YosoForMaskedLM": ({"use_expectation": True}, masked_lm),
    "CanineForSequenceClassification": (
        {"downsampling_rate": 2, "local_transformer_stride": 8, "num_hash_buckets": 64},
        classified,
    ),
    "ReformerModelWithLMHead": (
        {
            "attn_layers": ["local", "lsh"],
            "axial_pos_embds": False,
            "is_decoder": True,
            "local_attn_chunk_length": 4,
            "lsh_attn_chunk_length": 4,
            "num_buckets": 2,
            "attention_head_size": 8,
            "hash_seed": 0,
        },
        unmasked_lm,
    ),
    "LukeModel": (
        {"entity_vocab_size": 20, "entity_emb_size": 16},
        lambda: {"input_ids": tokens(), "attention_mask": padding()},
    ),
    "LayoutLMForMaskedLM": ({}, masked_lm),
    "EsmForMaskedLM": ({"max_position_embeddings": 66}, masked_lm),
    "PerceiverForMaskedLM": (
        {"num_latents": 8, "d_latents": 32, "num_blocks": 1, "num_self_attends_per_block": 2},
        lambda: {"inputs": tokens(), "attention_mask": padding()},
    ),
    "RemBertForMaskedLM": ({"input_embedding_size": 16, "output_embedding_size": 32}, masked_lm),
    "BertForQuestionAnswering": (
        {"num_labels": 2},
        lambda: {
            "input_ids": tokens(),
            "start_positions": torch.tensor([1, 2]),
            "end_positions": torch.tensor([4, 5]),
        },
    ),
    "GteForMaskedLM": ({}, masked_lm),
    "IBertForMaskedLM": ({}, masked_lm),
    "XmodForMaskedLM": (
        {"default_language": "en_XX", "languages": ["en_XX", "de_DE"]},
        masked_lm,
    ),
    "MarkupLMForSequenceClassification": ({}, classified),
    "OpenAIPrivacyFilterModel": (
        {},
        lambda: {"input_ids": tokens(), "attention_mask": padding()},
    ),
    "RobertaForMultipleChoice": (
        {"max_position_embeddings": 66},
        lambda: {
            "input_ids": tokens(6).view(2, 3, -1),
            "labels": torch.tensor([0, 2]),
        },
    ),
}

_MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LATENT = {
    **_MOE,
    "n_routed_experts": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_MAMBA = {"state_size": 4, "conv_kernel": 4, "expand": 2}

DECODERS: dict[str, Row] = {
    "GPTNeoForCausalLM": (
        {"attention_types": [[["global", "local"], 1]], "window_size": 8},
        masked_lm,
    ),
    "GPTJForCausalLM": ({"rotary_dim": 4}, masked_lm),
    "GPTNeoXForCausalLM": ({}, masked_lm),
    "OPTForCausalLM": ({"word_embed_proj_dim": 32}, masked_lm),
    "BloomForCausalLM": ({}, masked_lm),
    "FalconForCausalLM": ({}, masked_lm),
    "MptForCausalLM": ({"max_seq_len": 64}, masked_lm),
    "PhiForCausalLM": ({}, masked_lm),
    "Phi3ForCausalLM": ({}, masked_lm),
    "PhimoeForCausalLM": ({"num_local_experts": 4}, masked_lm),
    "Qwen2ForCausalLM": ({}, masked_lm),
    "Qwen3ForCausalLM": ({}, masked_lm),
    "Qwen2MoeForCausalLM": (
        {"num_experts": 4, "shared_expert_intermediate_size": 32, **_MOE},
        masked_lm,
    ),
    "Qwen3MoeForCausalLM": ({"num_experts": 4, **_MOE}, masked_lm),
    "GemmaForCausalLM": ({}, masked_lm),
    "Gemma2ForCausalLM": ({"sliding_window": 8}, masked_lm),
    "Gemma3ForCausalLM": ({"sliding_window": 8}, masked_lm),
    "MistralForCausalLM": ({"sliding_window": 8}, masked_lm),
    "StableLmForCausalLM": ({}, masked_lm),
    "CohereForCausalLM": ({}, masked_lm),
    "Cohere2ForCausalLM": ({"sliding_window": 8}, masked_lm),
    "OlmoForCausalLM": ({}, masked_lm),
    "Olmo2ForCausalLM": ({}, masked_lm),
    "OlmoeForCausalLM": ({"num_experts": 4, **_MOE}, masked_lm),
    "GraniteForCausalLM": ({}, masked_lm),
    "GraniteMoeForCausalLM": ({"num_local_experts": 4, **_MOE}, masked_lm),
    "DbrxForCausalLM": (
        {
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {
                "ffn_hidden_size": 32,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "hidden_size": 32,
            },
        },
        masked_lm,
    ),
    "JambaForCausalLM": (
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
        masked_lm,
    ),
    "MambaForCausalLM": (_MAMBA, unmasked_lm),
    "Mamba2ForCausalLM": (
        {**_MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
        unmasked_lm,
    ),
    "FalconMambaForCausalLM": (_MAMBA, unmasked_lm),
    "RwkvForCausalLM": ({"attention_hidden_size": 32, "context_length": 32}, unmasked_lm),
    "RecurrentGemmaForCausalLM": (
        {
            "num_hidden_layers": 3,
            "lru_width": 32,
            "attention_window_size": 8,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
        masked_lm,
    ),
    "xLSTMForCausalLM": (
        {"embedding_dim": 32, "num_blocks": 2, "num_heads": 2, "chunk_size": 8},
        unmasked_lm,
    ),
    "GPTBigCodeForCausalLM": ({}, masked_lm),
    "CodeGenForCausalLM": ({"rotary_dim": 4}, masked_lm),
    "CTRLLMHeadModel": ({"dff": 64}, masked_lm),
    "OpenAIGPTLMHeadModel": ({}, masked_lm),
    "XGLMForCausalLM": ({"attention_heads": 4}, masked_lm),
    "Starcoder2ForCausalLM": ({}, masked_lm),
    "DeepseekV3ForCausalLM": (
        {
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            **_MOE,
        },
        masked_lm,
    ),
    "Glm4ForCausalLM": ({}, masked_lm),
    "SmolLM3ForCausalLM": ({}, masked_lm),
    "NemotronForCausalLM": ({}, masked_lm),
    "PersimmonForCausalLM": ({}, masked_lm),
    "GptOssForCausalLM": ({"num_local_experts": 4, "sliding_window": 8, **_MOE}, masked_lm),
    "BambaForCausalLM": (
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 4,
        },
        masked_lm,
    ),
    "BioGptForCausalLM": ({}, masked_lm),
    "GemmaForSequenceClassification": ({}, classified),
    "Llama4ForCausalLM": ({}, masked_lm),
    "Qwen3_5ForCausalLM": ({}, masked_lm),
    "MiniMaxForCausalLM": ({}, masked_lm),
    "MiniMaxM2ForCausalLM": ({}, masked_lm),
    "Lfm2ForCausalLM": ({}, masked_lm),
    "GlmForCausalLM": ({}, masked_lm),
    "Ernie4_5ForCausalLM": ({}, masked_lm),
    "HunYuanMoEV1ForCausalLM": ({}, masked_lm),
    "OlmoHybridForCausalLM": ({}, masked_lm),
    "DogeForCausalLM": ({}, masked_lm),
    "MixtralForCausalLM": ({}, masked_lm),
    "ApertusForCausalLM": ({}, masked_lm),
    "BailingHybridForCausalLM": ({}, masked_lm),
    "BeamForCausalLM": ({}, masked_lm),
    "BitNetForCausalLM": ({}, masked_lm),
    "Cohere2MoeForCausalLM": ({}, masked_lm),
    "CpmAntForCausalLM": ({}, masked_lm),
    "DiffLlamaForCausalLM": ({}, masked_lm),
    "FlintForCausalLM": ({}, masked_lm),
    "Exaone4ForCausalLM": ({}, masked_lm),
    "FlexOlmoForCausalLM": ({}, masked_lm),
    "HrmTextForCausalLM": ({}, masked_lm),
    "Lfm3ForCausalLM": ({}, masked_lm),
    "NanoChatForCausalLM": ({}, masked_lm),
    "DeepseekV32ForCausalLM": (
        {
            **_LATENT,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 8,
        },
        masked_lm,
    ),
    "LongcatFlashForCausalLM": (
        {
            **_LATENT,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 32,
            "ffn_hidden_size": 64,
        },
        masked_lm,
    ),
    "Molmo2TextModel": ({}, lambda: {"input_ids": tokens(), "attention_mask": padding()}),
    "Qwen3NextForCausalLM": (
        {
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            **_MOE,
        },
        masked_lm,
    ),
}

_BART: dict[str, Any] = {"scale_embedding": True}
_CROSS = {"is_decoder": True, "add_cross_attention": True}


def _features() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 80, 64), "labels": tokens(length=8)}


BOTH: dict[str, Row] = {
    "BartForConditionalGeneration": ({}, sequences),
    "PegasusForConditionalGeneration": (_BART, sequences),
    "MarianMTModel": ({**_BART, "pad_token_id": 0}, sequences),
    "MBartForConditionalGeneration": ({}, sequences),
    "PLBartForConditionalGeneration": ({}, sequences),
    "LEDForConditionalGeneration": (
        {
            "attention_window": 4,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
        sequences,
    ),
    "ProphetNetForConditionalGeneration": (
        {"num_buckets": 8, "relative_max_distance": 16, "ngram": 2},
        sequences,
    ),
    "M2M100ForConditionalGeneration": ({}, sequences),
    "FSMTForConditionalGeneration": (
        {"langs": ["en", "de"], "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY},
        lambda: {**sequences(), "decoder_input_ids": tokens(length=8)},
    ),
    "PegasusXForConditionalGeneration": ({}, sequences),
    "SeamlessM4TForTextToText": ({}, sequences),
    "EncoderDecoderModel": (
        {"decoder_start_token_id": 1, "pad_token_id": 0},
        sequences,
        {"encoder": {"model_type": "bert"}, "decoder": {"model_type": "bert", **_CROSS}},
    ),
    "VisionEncoderDecoderModel": (
        {"decoder_start_token_id": 1, "pad_token_id": 0},
        lambda: {**plain_images(), "labels": tokens(length=8)},
        {"encoder": {"model_type": "vit"}, "decoder": {"model_type": "bert", **_CROSS}},
    ),
    "WhisperForConditionalGeneration": ({"max_source_positions": 32}, _features),
    "Speech2TextForConditionalGeneration": (
        {"conv_channels": 32, "max_source_positions": 64},
        lambda: {
            "input_features": torch.randn(2, 64, 80),
            "attention_mask": padding(length=64),
            "labels": tokens(length=8),
        },
    ),
    "BlenderbotForConditionalGeneration": ({}, sequences),
    "BigBirdPegasusForConditionalGeneration": (
        {"block_size": 4, "num_random_blocks": 1},
        sequences,
    ),
    "LongT5ForConditionalGeneration": (
        {"d_kv": 8, "local_radius": 4, "decoder_start_token_id": 0},
        sequences,
    ),
    "MT5ForConditionalGeneration": ({"d_kv": 8}, sequences),
    "UMT5ForConditionalGeneration": ({"d_kv": 8}, sequences),
    "SwitchTransformersForConditionalGeneration": (
        {
            "d_kv": 8,
            "decoder_start_token_id": 0,
            "num_experts": 4,
            "expert_capacity": 8,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
        },
        sequences,
    ),
    "NllbMoeForConditionalGeneration": (
        {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
        sequences,
    ),
}
