"""FP8 settings of Transformer Engine, Megatron, accelerate and torchao that the spec doesn't have.

Promises: every field of Transformer Engine's FP8 recipes is a field of ``FP8Config``, an alias of
one, or told here: what it is, that Octavo doesn't offer it, and what to write instead.
"""

from __future__ import annotations

KEY_ALIASES = {
    "fp8_recipe": "recipe",
    "recipe_name": "recipe",
    "fp8_format": "format",
    "fp8_margin": "margin",
    "fp8_amax_history_len": "amax_history_len",
    "fp8_amax_compute_algo": "amax_compute_algo",
}
"""Keys of Megatron, ms-swift, accelerate and torchao, and ours."""

RECIPE_ALIASES = {
    "tensorwise": "current",
    "blockwise": "block",
    "DelayedScaling": "delayed",
    "Float8CurrentScaling": "current",
    "Float8BlockScaling": "block",
    "MXFP8BlockScaling": "mxfp8",
}
"""Recipe words of Megatron and ms-swift, Transformer Engine's classes, and ours."""

_FP4 = "no FP4 (NVFP4BlockScaling) is offered; recipe: mxfp8 has the smallest blocks here"
RECIPES_NOT_OFFERED = {
    "NVFP4BlockScaling": _FP4,
    "nvfp4": _FP4,
    "rowwise": (
        "torchao's scale a row isn't offered; recipe: block has a scale each 128 elements of a "
        "row, current one a tensor"
    ),
    "CustomRecipe": "quantizers of one's own aren't offered in a spec; take one of the recipes",
    "custom": "quantizers of one's own aren't offered in a spec; take one of the recipes",
}

_ATTENTION = (
    "attention in FP8 isn't offered: its products and softmax stay in high precision, its two "
    "projections are FP8 linears; leave it out"
)
_PRODUCTS = (
    "how a matrix product accumulates isn't a setting: sums are in FP32, on the native backend "
    "over the whole product, and Transformer Engine's defaults with it; leave it out"
)
_QUANTIZATION = (
    "how an operand is rounded isn't set one by one; power-of-two scales are "
    "use_power_2_scales: true under recipe: current, and use_f32_scales: false under block"
)
_BLOCK_SHAPE = (
    "the shape of blocks isn't a setting: Transformer Engine's defaults, 1×128 for input and "
    "output gradient, 128×128 for the weight; leave it out, or take recipe: mxfp8 for 1×32"
)
_FP4_ONLY = "it is of FP4 (NVFP4BlockScaling), which isn't offered; leave it out"
_LAYERS = "which layers stay in BF16 is written high_precision_layers: "

FIELDS_NOT_OFFERED = {
    "backward_override": (
        "a backward out of FP8 while the forward stays in it isn't offered; leave it out, or keep "
        "layers in BF16 both ways by high_precision_layers"
    ),
    "override_linear_precision": (
        "single products (fprop, dgrad, wgrad) out of FP8 aren't offered: a linear's three go "
        "together; name linears in high_precision_layers to keep them in BF16"
    ),
    "fp8_wgrad": (
        "single products (fprop, dgrad, wgrad) out of FP8 aren't offered: a linear's three go "
        "together; leave it out"
    ),
    "fp8_dpa": _ATTENTION,
    "fp8_mha": _ATTENTION,
    "fp8_dot_product_attention": _ATTENTION,
    "fp8_multi_head_attention": _ATTENTION,
    "reduce_amax": (
        "amax is always reduced over the ranks of a stage, or replicas would take different "
        "scales and drift apart; leave it out"
    ),
    "tp_only_amax_red": (
        "amax is always reduced over the ranks of a stage, or replicas would take different "
        "scales and drift apart; leave it out"
    ),
    "scaling_factor_compute_algo": (
        "a function of one's own for the scale can't be written in a spec; margin, "
        "amax_history_len and amax_compute_algo (max, most_recent, ema) say how it is made"
    ),
    "interval": (
        "scales are made at every step, as in Transformer Engine, which has dropped the setting; "
        "leave it out"
    ),
    "fp8_interval": (
        "scales are made at every step, as in Transformer Engine, which has dropped the setting; "
        "leave it out"
    ),
    "fp8_gemm_fprop": _PRODUCTS,
    "fp8_gemm_dgrad": _PRODUCTS,
    "fp8_gemm_wgrad": _PRODUCTS,
    "fp8_quant_fwd_inp": _QUANTIZATION,
    "fp8_quant_fwd_weight": _QUANTIZATION,
    "fp8_quant_bwd_grad": _QUANTIZATION,
    "x_block_scaling_dim": _BLOCK_SHAPE,
    "w_block_scaling_dim": _BLOCK_SHAPE,
    "grad_block_scaling_dim": _BLOCK_SHAPE,
    "enable_2d_quantization": (
        "squares of 32×32 for mxfp8's weights aren't offered: they are quantized in 1×32 along "
        "each product; leave it out, or take recipe: block, whose weights are scaled in squares"
    ),
    "fp4_format": _FP4_ONLY,
    "disable_2d_quantization": _FP4_ONLY,
    "disable_rht": _FP4_ONLY,
    "disable_stochastic_rounding": _FP4_ONLY,
    "nvfp4_4over6": _FP4_ONLY,
    "nvfp4_4over6_e4m3_use_256": _FP4_ONLY,
    "nvfp4_4over6_err_mode": _FP4_ONLY,
    "row_scaled_activation": _FP4_ONLY,
    "fp8_param": (
        "weights kept in FP8 alone aren't offered: they are BF16 with FP32 masters, quantized "
        "once a step; leave it out"
    ),
    "fp8_param_gather": (
        "weights gathered in FP8 aren't offered; gradients travel in FP8 by "
        "communication_data_type: fp8"
    ),
    "enable_fsdp_float8_all_gather": (
        "weights gathered in FP8 aren't offered; gradients travel in FP8 by "
        "communication_data_type: fp8"
    ),
    "first_last_layers_bf16": _LAYERS + "{first: 1, last: 1}",
    "num_layers_at_start_in_bf16": _LAYERS + "{first: n}",
    "num_layers_at_end_in_bf16": _LAYERS + "{last: n}",
    "filter_fqns": _LAYERS + "{names: [layers.0.*, …]}",
    "module_filter_fqns": _LAYERS + "{names: [layers.0.*, …]}",
    "use_autocast_during_eval": (
        "evaluation computes in what training does, without observing; leave it out"
    ),
    "opt_level": "it is of MS-AMP, which isn't offered; leave it out",
}
"""What is told of a key of the ``fp8`` section that another system has, and Octavo hasn't."""
