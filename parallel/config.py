"""Configuration of the parallel package: degrees, model, FP8 recipe, gradient exchange.

Promises: values are frozen, unknown keys are refused, and what one section can
check alone is checked here. What needs several sections (batch against degrees,
layers against stages) is checked in ``orchestrator.spec``.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Precision = Literal["fp8", "bf16"]
"""What a linear layer computes in."""

RECIPE_ALIASES = {"tensorwise": "current", "blockwise": "block"}
"""Recipe words of Megatron and ms-swift, and ours."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ParallelismConfig(_Section):
    """Degrees; their product is the number of ranks."""

    tensor: int = Field(1, ge=1)
    """Ranks that share one layer's matrices."""
    pipeline: int = Field(1, ge=1)
    """Stages the layers are cut into."""
    data: int | None = Field(None, ge=1)
    """Replicas; unset: as many as the slots allow."""
    zero_stage: int = Field(1, ge=0, le=3)
    """DeepSpeed ZeRO stage."""


class ModelConfig(_Section):
    """Shape of the decoder-only transformer (RMSNorm, rotary, SwiGLU, grouped-query attention)."""

    vocab_size: int = Field(256, ge=2)
    """Tokens; 256 for bytes."""
    hidden_size: int = Field(128, ge=16)
    num_layers: int = Field(4, ge=1)
    num_heads: int = Field(4, ge=1)
    num_kv_heads: int | None = Field(None, ge=1)
    """Key and value heads; unset: ``num_heads``."""
    ffn_size: int | None = Field(None, ge=16)
    """Inner width of the SwiGLU MLP; unset: 8/3 of hidden_size, rounded up to 32."""
    rope_theta: float = Field(10_000.0, gt=0)
    norm_eps: float = Field(1e-5, gt=0)
    init_std: float = Field(0.02, gt=0)


class HighPrecisionLayers(_Section):
    """Transformer layers and modules kept in BF16 throughout."""

    first: int = Field(0, ge=0)
    """How many layers at the start."""
    last: int = Field(0, ge=0)
    """How many layers at the end."""
    names: tuple[str, ...] = ()
    """Patterns of linear names, as ``layers.3.mlp.*``; one that matches nothing is an error."""


class FP8Config(_Section):
    """FP8 of the linear layers; fields and defaults are Transformer Engine's."""

    recipe: Literal["delayed", "current"] = "delayed"
    format: Literal["HYBRID", "E4M3"] = "HYBRID"
    """HYBRID: E4M3 forward, E5M2 for output gradients."""
    margin: int = Field(0, ge=0, le=16)
    """Octaves of headroom below the format's maximum (delayed only)."""
    amax_history_len: int = Field(1024, ge=1)
    """Updates an amax counts for (delayed only)."""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    backend: Literal["auto", "native", "transformer_engine"] = "auto"
    high_precision_layers: HighPrecisionLayers = HighPrecisionLayers()

    @field_validator("recipe", mode="before")
    @classmethod
    def _recipe_alias(cls, value: object) -> object:
        return RECIPE_ALIASES.get(value, value) if isinstance(value, str) else value


class GradientExchangeConfig(_Section):
    """FP8 exchange of gradients between data-parallel replicas."""

    block: int = Field(128, ge=16, le=4096)
    """Elements that share one power-of-two scale."""
    format: Literal["e4m3", "e5m2"] = "e4m3"
    min_size: int = Field(16_384, ge=0)
    """Elements below which a bucket is exchanged in BF16."""
    error_feedback: bool = False
    """Add the rounding error of one step to the next step's gradient."""
