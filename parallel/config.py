"""Configuration of the parallel package: degrees, model, FP8 recipe, gradient exchange.

Promises: values are frozen, unknown keys are refused, and what one section can
check alone is checked here. What needs several sections (batch against degrees,
layers against stages) is checked in ``orchestrator.spec.job``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from parallel.fp8_fields_elsewhere import (
    FIELDS_NOT_OFFERED,
    KEY_ALIASES,
    RECIPE_ALIASES,
    RECIPES_NOT_OFFERED,
)

MOST = 2**22
"""What a width, a batch or a degree can be, beyond all there is: counting up to it has an end."""

Precision = Literal["fp8", "bf16"]
"""What a linear layer computes in."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ParallelismConfig(_Section):
    """Degrees; their product is the number of ranks."""

    tensor: int = Field(1, ge=1, le=MOST)
    """Ranks that share one layer's matrices: neighbours, on one node. Embedding and head are
    held whole by each of them."""
    pipeline: int = Field(1, ge=1, le=MOST)
    """Stages the layers are cut into."""
    data: int | None = Field(None, ge=1, le=MOST)
    """Replicas; unset: as many as the slots allow."""
    zero_stage: int = Field(1, ge=0, le=3)
    """DeepSpeed ZeRO stage."""


class ModelConfig(_Section):
    """Shape of the decoder-only transformer (RMSNorm, rotary, SwiGLU, grouped-query attention)."""

    vocab_size: int = Field(256, ge=2, le=MOST)
    """Tokens; 256 for bytes."""
    hidden_size: int = Field(128, ge=16, le=MOST)
    num_layers: int = Field(4, ge=1, le=100_000)
    num_heads: int = Field(4, ge=1, le=MOST)
    num_kv_heads: int | None = Field(None, ge=1, le=MOST)
    """Key and value heads; unset: ``num_heads``."""
    ffn_size: int | None = Field(None, ge=16, le=MOST)
    """Inner width of the SwiGLU MLP; unset: 8/3 of hidden_size, rounded up to 32."""
    factory: str | None = None
    """``package.module:function`` that makes a model of your own (parallel.model_factory); of
    this section it needs num_layers and ``options``, the rest is the built-in model's."""
    options: dict[str, Any] = {}
    """What ``factory`` is given, as it stands here."""
    smooth_swiglu: bool = False
    """Scale each channel of the MLP's inner activation before it is quantized (arXiv
    2409.12517); computes the same in BF16."""
    tie_embeddings: bool = False
    """Embedding and head share one matrix."""
    rope_theta: float = Field(10_000.0, gt=0)
    norm_eps: float = Field(1e-5, gt=0)
    init_std: float = Field(0.02, gt=0)

    @field_validator("factory")
    @classmethod
    def _factory(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[^\W\d][\w.]*:[^\W\d][\w.]*", value):
            raise ValueError("is not written as package.module:function")
        return value


class HighPrecisionLayers(_Section):
    """Transformer layers and modules kept in BF16 throughout."""

    first: int = Field(0, ge=0)
    """How many layers at the start."""
    last: int = Field(0, ge=0)
    """How many layers at the end."""
    names: tuple[str, ...] = ()
    """Patterns of linear names, as ``layers.3.mlp.*``; one that matches nothing is an error."""


RecipeName = Literal["delayed", "current", "block", "mxfp8"]
"""How operands are scaled: by earlier steps' amax; by their own; in blocks; in MX blocks."""

RECIPE_FIELDS: dict[str, dict[str, object]] = {
    "delayed": {
        "margin": 0,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "amax_ema_factor": 0.9,
    },
    "current": {"use_power_2_scales": False},
    "block": {"use_f32_scales": False},
    "mxfp8": {},
}
"""The fields that belong to a recipe alone, and what they are where a spec doesn't say."""

RECIPE_FORMATS = {"delayed": "HYBRID", "current": "HYBRID", "block": "E4M3", "mxfp8": "E4M3"}
"""Transformer Engine's default format of each recipe."""


class FP8Config(_Section):
    """FP8 of the linear layers; fields and defaults are Transformer Engine's.

    A field that belongs to another recipe than ``recipe`` is None, and an error where it was
    given: a setting that does nothing would be taken for one that does.
    """

    recipe: RecipeName = "delayed"
    """``delayed``: a tensor's scale is made from the amax of earlier steps. ``current``: from
    its own. ``block``: from those of its 1×128 blocks (128×128 for weights). ``mxfp8``: from
    those of its 1×32 blocks, one E8M0 exponent each."""
    format: Literal["HYBRID", "E4M3"] | None = Field(None, validate_default=True)
    """HYBRID: E4M3 forward, E5M2 for output gradients. Unset: HYBRID for delayed and current,
    E4M3 for block and mxfp8."""
    margin: int | None = Field(None, ge=0, le=16, validate_default=True)
    """Octaves of headroom below the format's maximum (delayed: 0)."""
    amax_history_len: int | None = Field(None, ge=1, le=65_536, validate_default=True)
    """Updates an amax counts for (delayed: 1024). Each tensor has a history of that length, which
    every step moves and every snapshot copies."""
    amax_compute_algo: Literal["max", "most_recent", "ema"] | None = Field(
        None, validate_default=True
    )
    """The amax of a history (delayed: max). ``ema`` is Octavo's own: an average of the
    history that weights newer updates more, or the newest amax where that is larger."""
    amax_ema_factor: float | None = Field(None, gt=0, lt=1, validate_default=True)
    """What an amax's weight in ``ema`` is multiplied by an update (delayed: 0.9)."""
    use_power_2_scales: bool | None = Field(None, validate_default=True)
    """Round scales down to powers of two (current: false)."""
    use_f32_scales: bool | None = Field(None, validate_default=True)
    """Leave scales as they are instead of rounding them down to powers of two (block: false).
    On CPU this takes FP32 products, which cost twice as much."""
    statistics_every: int = Field(1, ge=1)
    """Per-tensor statistics are taken of every n-th step; amax is the largest since the last."""
    sqnr: bool = False
    """Measure each tensor's signal to quantization-noise ratio too."""
    backend: Literal["auto", "native", "transformer_engine"] = "auto"
    high_precision_layers: HighPrecisionLayers = HighPrecisionLayers()

    @model_validator(mode="wrap")
    @classmethod
    def _words_of_others(
        cls, values: object, build: ModelWrapValidatorHandler[FP8Config]
    ) -> FP8Config:
        """Other systems' keys: taken by our name, or told with everything else that is wrong."""
        if not isinstance(values, Mapping):
            return build(values)
        told: dict[str, str] = {}
        ours: dict[str, object] = {}
        given: dict[str, str] = {}
        for key, value in values.items():
            key = str(key)
            name = KEY_ALIASES.get(key, key)
            if key in FIELDS_NOT_OFFERED:
                told[key] = FIELDS_NOT_OFFERED[key]
            elif name != key and (name in values or name in ours):
                told[key] = f"is another name of {given.get(name, name)}, given too; leave one out"
            else:
                ours[name], given[name] = value, key
        try:
            built = build(ours)
        except ValidationError as error:
            raise _retold(error.errors(include_url=False), given, told, values) from None
        if told:
            raise _retold((), given, told, values)
        return built

    @field_validator("recipe", mode="before")
    @classmethod
    def _recipe_alias(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if value in RECIPES_NOT_OFFERED:
            raise ValueError(RECIPES_NOT_OFFERED[value])
        return RECIPE_ALIASES.get(value, value)

    @field_validator("format", mode="before")
    @classmethod
    def _format(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, str) and value.upper() == "E5M2":
            raise ValueError(
                "pure E5M2 training is not supported, here as in Transformer Engine; "
                "HYBRID has E5M2 for output gradients"
            )
        if value is None:
            return RECIPE_FORMATS.get(info.data.get("recipe", ""))
        return value.upper() if isinstance(value, str) else value

    @field_validator(
        "margin",
        "amax_history_len",
        "amax_compute_algo",
        "amax_ema_factor",
        "use_power_2_scales",
        "use_f32_scales",
        mode="after",
    )
    @classmethod
    def _field_of_its_recipe(cls, value: object, info: ValidationInfo) -> object:
        recipe, name = info.data.get("recipe"), info.field_name or ""
        if recipe is None:
            return value  # the recipe itself is refused already
        own = RECIPE_FIELDS[recipe]
        if name in own:
            if name == "amax_ema_factor" and info.data.get("amax_compute_algo") != "ema":
                if value is not None:
                    raise ValueError("belongs to amax_compute_algo: ema; leave it out")
                return None
            return own[name] if value is None else value
        if value is not None:
            others = [other for other, fields in RECIPE_FIELDS.items() if name in fields]
            raise ValueError(
                f"belongs to recipe {' or '.join(others)}, and does nothing under {recipe}; "
                "leave it out"
            )
        return None


def _retold(
    errors: Iterable[ErrorDetails],
    given: Mapping[str, str],
    told: Mapping[str, str],
    values: Mapping[str, object],
) -> ValidationError:
    """``errors`` at the keys that were ``given``, and beside them what is ``told`` of keys."""
    found = []
    for error in errors:
        first, *rest = error["loc"] or ("",)
        location = (given.get(str(first), first), *rest) if error["loc"] else ()
        context, kind = error.get("ctx", {}), error["type"]
        if "error" in context:  # of a validator of ours
            found.append(_said(str(context["error"]), location, error["input"]))
        else:
            found.append(
                InitErrorDetails(type=kind, loc=location, input=error["input"], ctx=context)
            )
    found += [_said(message, (key,), values[key]) for key, message in told.items()]
    return ValidationError.from_exception_data("FP8Config", found)


def _said(message: str, location: tuple[int | str, ...], value: object) -> InitErrorDetails:
    kind = PydanticCustomError("value_error", "{told}", {"told": message})
    return InitErrorDetails(type=kind, loc=location, input=value)


ExchangeDtype = Literal["fp8", "bf16", "fp32"]
"""What gradients cross the network in."""
EXCHANGE_BITS: dict[ExchangeDtype, int] = {"fp8": 8, "bf16": 16, "fp32": 32}
"""Bits that a value takes there."""


class GradientExchangeConfig(_Section):
    """FP8 exchange of gradients between data-parallel replicas."""

    block: int = Field(128, ge=16, le=4096)
    """Elements that share one power-of-two scale."""
    format: Literal["e4m3", "e5m2"] = "e4m3"
    bucket: int = Field(524_288, ge=1)
    """At most so many elements for each replica are quantized while those before them travel.
    Smaller ones overlap more, and cost the network's latency more often: of 128 Ki to 2 Mi these
    took least time over gloo, with 2 and 4 hosts, at 1 Gbit and without a limit."""
    min_size: int = Field(16_384, ge=0)
    """Elements below which a gradient is exchanged in BF16. A gradient is all matrices of a
    stage together (or what DeepSpeed puts into one bucket of them), not one parameter."""
    high_precision_parameters: tuple[str, ...] = ()
    """Patterns of names of parameters, as ``embedding.weight`` or ``layers.3.mlp.*``, whose
    gradients are exchanged in BF16 though the others are in FP8; one that matches nothing is an
    error. Parameters of one dimension (norms, biases) always go in FP32 and need no naming."""
    error_feedback: bool = False
    """Add the rounding error of one exchange to the next one's gradient. Takes four bytes a
    parameter on each rank, and as many again while a step is under way."""
