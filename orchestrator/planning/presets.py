"""Known model shapes by name: ``model: {preset: llama-8b}``; keys beside it win over the preset's.

Dimensions are those that the models' makers publish; Octavo's model is the same architecture
(RMSNorm, rotary, SwiGLU, grouped-query attention, no biases), but for scaled rotary frequencies of
longer contexts, which it doesn't have. Mixtures of experts can't be trained here: theirs are
for an estimate of memory alone (``octavo plan --presets``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.planning.shapes import shape_of
from orchestrator.spec.errors import Finding, nearest
from parallel.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Preset:
    """One known shape."""

    name: str
    model: Mapping[str, Any]
    """Of a spec's ``model`` section."""
    source: str

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return shape_of(ModelConfig.model_validate(self.model)).parameters


@dataclass(frozen=True, slots=True)
class ExpertsPreset:
    """A mixture of experts, of which nothing but its memory can be told."""

    name: str
    parameters: int
    active: int
    """That a token passes through."""
    source: str


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "ffn_size": ffn,
        "vocab_size": 128_256,
        "rope_theta": 500_000.0,
        **more,
    }


PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "llama-1b",
            _llama(2048, 16, 32, 8, 8192, tie_embeddings=True),
            "Llama 3.2 1B model card",
        ),
        Preset(
            "llama-3b",
            _llama(3072, 28, 24, 8, 8192, tie_embeddings=True),
            "Llama 3.2 3B model card",
        ),
        Preset("llama-8b", _llama(4096, 32, 32, 8, 14_336), "arXiv 2407.21783, table 3"),
        Preset("llama-70b", _llama(8192, 80, 64, 8, 28_672), "arXiv 2407.21783, table 3"),
        Preset("llama-405b", _llama(16_384, 126, 128, 8, 53_248), "arXiv 2407.21783, table 3"),
        Preset(
            "llama2-7b",
            _llama(4096, 32, 32, 32, 11_008, vocab_size=32_000, rope_theta=10_000.0),
            "arXiv 2307.09288",
        ),
        Preset(
            "llama2-13b",
            _llama(5120, 40, 40, 40, 13_824, vocab_size=32_000, rope_theta=10_000.0),
            "arXiv 2307.09288",
        ),
        Preset(
            "llama2-70b",
            _llama(8192, 80, 64, 8, 28_672, vocab_size=32_000, rope_theta=10_000.0),
            "arXiv 2307.09288",
        ),
    )
}

EXPERTS: Mapping[str, ExpertsPreset] = {
    preset.name: preset
    for preset in (
        ExpertsPreset("moe-671b", 671_000_000_000, 37_000_000_000, "DeepSeek-V3, arXiv 2412.19437"),
    )
}


def expand_preset(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """A job file's values with ``model.preset`` written out, and what is wrong with it.

    A preset that is wrong is left out, so that the rest of the file can be checked too.
    """
    model = data.get("model")
    if not isinstance(model, Mapping) or "preset" not in model:
        return dict(data), []
    name = model["preset"]
    given = {key: value for key, value in model.items() if key != "preset"}
    found = PRESETS.get(name) if isinstance(name, str) else None
    if found is not None:
        findings = []
        if given.get("factory") is not None:
            message = "is of the built-in model, and model.factory makes another"
            findings = [Finding(("model", "preset"), message, "keep one of the two")]
            return {**data, "model": given}, findings
        return {**data, "model": {**found.model, **given}}, findings
    if isinstance(name, str) and name in EXPERTS:
        message = "is a mixture of experts, which Octavo doesn't train"
        remedy = "`octavo plan --presets` tells what its state takes"
    else:
        message = "is no shape that is known"
        listed = f"one of {', '.join(PRESETS)}"
        hint = nearest(name, PRESETS) if isinstance(name, str) else ""
        remedy = "; ".join(filter(None, (hint, listed)))
    return {**data, "model": given}, [Finding(("model", "preset"), message, remedy)]
