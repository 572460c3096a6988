"""Which backend runs a job's linears, and why. Pure, and needs no torch.

(device, what is known of Transformer Engine, the spec's words) → a choice with its reason, or
a refusal with what to do. Looking at the machine is ``parallel.precision.detection``'s.

What Transformer Engine can run is its own checks' rule (2.20, ``pytorch/quantization.py``):

    =============  =======================================  ==================================
    capability     recipes                                  note
    =============  =======================================  ==================================
    below 8.9      none
    8.9 (Ada)      delayed, current                         CUDA ≥ 12.1; little tested: warned
    9.x (Hopper)   delayed, current, block                  block: CUDA ≥ 12.9
    10.x, 11.x     delayed, current, block, mxfp8           block: powers of two only
    12.0 and up    delayed, current, block                  mxfp8 lacks GEMM layouts there
    =============  =======================================  ==================================

Where the machine's own Transformer Engine says no to a recipe, its word counts over this table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from parallel.config import FP8Config, ModelConfig, Precision
from parallel.precision.recipes import multiple_of

Backend = Literal["transformer_engine", "native", "bf16", "undecided"]
"""``undecided`` is a forecast's, before the nodes are known; no rank runs on it."""

RECIPES = ("delayed", "current", "block", "mxfp8")
TESTED_VERSION = (2, 20)
"""Release of Transformer Engine whose signatures the adapter's calls are checked against."""
BLOCK_CUDA = (12, 9)
ADA_CUDA = (12, 1)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The device that one rank computes on."""

    kind: Literal["cpu", "cuda"]
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None on CPU."""
    cuda: tuple[int, int] | None = None
    """Version of CUDA that torch was built with, where known."""
    name: str = ""

    def __str__(self) -> str:
        if self.capability is None:
            return "CPU"
        shown = f"capability {self.capability[0]}.{self.capability[1]}"
        return f"{self.name} ({shown})" if self.name else shown


@dataclass(frozen=True, slots=True)
class TransformerEngineFacts:
    """What importing Transformer Engine came to on this machine."""

    version: str | None = None
    """None when it isn't installed or can't be imported."""
    problem: str = ""
    """Why it can't run at all; empty when it can."""
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Recipes that it says it can't run here, each with its own words."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What of a job decides whether Transformer Engine can run it at all."""

    widths: tuple[int, ...] = ()
    """Inputs and outputs of the linears, as one rank holds them."""
    tokens: int | None = None
    """Tokens of one micro-batch on one rank."""
    smooth: bool = False
    """Smooth SwiGLU."""
    recompute: bool = False
    """Activations are computed again in the backward."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """What the linears run on, and why; the same on every rank of a job."""

    backend: Backend
    reason: str
    """One sentence for people, with what decided it."""
    warning: str = ""
    """What the user should know of running like this; empty for nothing."""

    def __str__(self) -> str:
        warning = f" ({self.warning})" if self.warning else ""
        return f"{self.backend}: {self.reason}{warning}"


@dataclass(frozen=True, slots=True)
class BackendRefusal:
    """The spec asks for what this device can't run."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"fp8.backend transformer_engine: {self.reason}; {self.remedy}"


class BackendRefusedError(ValueError):
    """A job asks for Transformer Engine where it can't run: ``refusal`` says why and what to do."""

    def __init__(self, refusal: BackendRefusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal

    def __reduce__(self) -> tuple[type[BackendRefusedError], tuple[BackendRefusal]]:
        return (type(self), (self.refusal,))


def choose(
    precision: Precision,
    config: FP8Config,
    device: DeviceFacts,
    te: TransformerEngineFacts,
    workload: Workload | None = None,
) -> BackendChoice | BackendRefusal:
    """The backend of a job on ``device``; a refusal only for ``backend: transformer_engine``."""
    if precision == "bf16":
        return BackendChoice("bf16", "the job's precision is bf16")
    if config.backend == "native":
        return BackendChoice("native", "asked for by fp8.backend", _native_warning(device))
    obstacle = _obstacle(config, device, te, workload or Workload())
    if obstacle is None:
        assert device.capability is not None
        reason = f"Transformer Engine {te.version} runs {config.recipe} scaling on {device}"
        return BackendChoice("transformer_engine", reason, _te_warning(device, te))
    if config.backend == "transformer_engine":
        return BackendRefusal(obstacle.reason, obstacle.remedy)
    return BackendChoice("native", obstacle.reason, _native_warning(device))


def agreed(
    choices: Sequence[BackendChoice | BackendRefusal],
) -> BackendChoice | BackendRefusal:
    """One choice for all ranks of a job, whose devices may differ: the one that all can run.

    A refusal of one refuses the job; one that can't run Transformer Engine makes all native.
    """
    refused = next((c for c in choices if isinstance(c, BackendRefusal)), None)
    if refused is not None:
        return refused
    chosen = [c for c in choices if isinstance(c, BackendChoice)]
    odd = next((c for c in chosen if c.backend != chosen[0].backend), None)
    if odd is None:
        return chosen[0]
    native = next(c for c in chosen if c.backend == "native")
    return BackendChoice("native", f"not all ranks can do otherwise: {native.reason}")


def recipes_on(capability: tuple[int, int]) -> tuple[str, ...]:
    """Recipes that Transformer Engine 2.20 runs on a device of this capability."""
    if capability < (8, 9):
        return ()
    if capability < (9, 0):
        return ("delayed", "current")
    if (10, 0) <= capability < (12, 0):
        return RECIPES
    return ("delayed", "current", "block")


def forecast(
    precision: Precision, config: FP8Config, workload: Workload | None = None, *, on_gpu: bool
) -> BackendChoice:
    """What can be said of the choice before any node is known, as ``submit --dry-run`` does.

    On CPU it is final. For a GPU job it is ``undecided`` where it depends on the nodes' device,
    and the reason says how. Raises BackendRefusedError.
    """
    if precision == "bf16" or config.backend == "native" or not on_gpu:
        decided = choose(precision, config, DeviceFacts("cpu"), TransformerEngineFacts())
        if isinstance(decided, BackendRefusal):
            raise BackendRefusedError(decided)
        return decided if not on_gpu else BackendChoice(decided.backend, decided.reason)
    if wrong := misfit(config, workload or Workload()):
        if config.backend == "transformer_engine":
            raise BackendRefusedError(BackendRefusal(wrong, "change it, or use backend: auto"))
        return BackendChoice("native", wrong)
    runs = [told for told, capability in _GENERATIONS.items() if _runs(config, capability)]
    where = f"capability {', '.join(runs)}" if runs else "no capability"
    otherwise = "refused" if config.backend == "transformer_engine" else "native"
    return BackendChoice(
        "undecided",
        f"the nodes' device decides: {config.recipe} scaling runs in Transformer Engine on "
        f"{where}; {otherwise} elsewhere or without it",
    )


_GENERATIONS = {
    "8.9": (8, 9),
    "9.x": (9, 0),
    "10.x": (10, 0),
    "11.x": (11, 0),
    "12.0 and up": (12, 0),
}
"""What to call capabilities that are treated alike, and one of each."""


def _runs(config: FP8Config, capability: tuple[int, int]) -> bool:
    return config.recipe in recipes_on(capability) and not _fp32_block(config, capability)


def workload_of(
    model: ModelConfig, *, ffn: int, shards: int, tokens: int | None, recompute: bool
) -> Workload:
    """What one rank holds of Octavo's own model, in ``shards`` tensor ranks; ``ffn`` is the
    inner width of its MLP, ``tokens`` those of a micro-batch. Of a user's own the widths are
    unknown.
    """
    if model.factory is not None:
        return Workload(tokens=tokens, recompute=recompute)
    hidden = model.hidden_size
    kv_width = (model.num_kv_heads or model.num_heads) * (hidden // model.num_heads)
    inner = ffn // shards
    return Workload(
        widths=(hidden, (hidden + 2 * kv_width) // shards, hidden // shards, 2 * inner, inner),
        tokens=tokens,
        smooth=model.smooth_swiglu,
        recompute=recompute,
    )


def misfit(config: FP8Config, workload: Workload, capability: tuple[int, int] | None = None) -> str:
    """Why Transformer Engine can't run such a job's layers; empty when it can.

    It pads neither widths nor tokens, where the native layers pad tokens. On ``capability``
    10.0 and up block scaling is emulated by mxfp8, whose blocks of 32 it then needs whole.
    """
    emulated = config.recipe == "block" and capability is not None and capability >= (10, 0)
    multiple = multiple_of("mxfp8" if emulated else config.recipe)
    odd = next((width for width in workload.widths if width % multiple), None)
    if odd is not None:
        return f"{config.recipe} scaling takes widths that {multiple} divides, not {odd}"
    if workload.tokens is not None and workload.tokens % multiple:
        return (
            f"{config.recipe} scaling takes tokens a micro-batch that {multiple} divides, "
            f"not {workload.tokens}"
        )
    if workload.smooth:
        return "smooth SwiGLU is not built on Transformer Engine"
    if workload.recompute and config.amax_compute_algo == "ema":
        return "Transformer Engine would shift an ema history twice a micro-batch under recompute"
    return ""


def _obstacle(
    config: FP8Config, device: DeviceFacts, te: TransformerEngineFacts, workload: Workload
) -> BackendRefusal | None:
    """Why Transformer Engine can't run this recipe here; None when it can."""
    elsewhere = "use backend: native or auto"
    if device.kind != "cuda" or device.capability is None:
        return BackendRefusal(
            "Transformer Engine needs a CUDA device and the job runs on CPU",
            "set gpus_per_node, or backend: auto",
        )
    can = recipes_on(device.capability)
    if not can:
        return BackendRefusal(f"{device} has no FP8: Transformer Engine needs 8.9", elsewhere)
    if config.recipe not in can:
        return BackendRefusal(
            f"Transformer Engine doesn't run {config.recipe} scaling on {device}",
            f"use recipe: {' or '.join(can)}, or backend: auto",
        )
    if _fp32_block(config, device.capability):
        return BackendRefusal(
            f"block scaling with FP32 scales is not run on {device}, where it is emulated by mxfp8",
            "use power-of-two scales, or backend: auto",
        )
    needed = _cuda_needed(config.recipe, device.capability)
    if needed and device.cuda and device.cuda < needed:
        return BackendRefusal(
            f"{config.recipe} scaling on {device} needs CUDA {needed[0]}.{needed[1]}, "
            f"torch has {device.cuda[0]}.{device.cuda[1]}",
            "install a torch built with it, or use backend: auto",
        )
    wrong = misfit(config, workload, device.capability)
    if wrong:
        return BackendRefusal(wrong, "change it, or use backend: auto")
    if te.version is None or te.problem:
        what = te.problem or "Transformer Engine is not installed"
        return BackendRefusal(what, "pip install 'octavo[te]', or backend: auto")
    if _version(te.version) < TESTED_VERSION:
        tested = ".".join(map(str, TESTED_VERSION))
        return BackendRefusal(
            f"Transformer Engine {te.version} is older than {tested}",
            f"install {tested}, or backend: auto",
        )
    if config.recipe in te.unsupported:
        return BackendRefusal(te.unsupported[config.recipe], "use another recipe, or backend: auto")
    return None


def _fp32_block(config: FP8Config, capability: tuple[int, int]) -> bool:
    fp32_scales = bool(getattr(config, "use_f32_scales", False))
    return config.recipe == "block" and fp32_scales and capability >= (10, 0)


def _cuda_needed(recipe: str, capability: tuple[int, int]) -> tuple[int, int] | None:
    if recipe == "block":
        return BLOCK_CUDA
    return ADA_CUDA if capability < (9, 0) else None


def _te_warning(device: DeviceFacts, te: TransformerEngineFacts) -> str:
    assert device.capability is not None and te.version is not None
    if device.capability < (9, 0):
        return "training in FP8 on capability 8.9 is little tried; 9.0 and up are what it is for"
    if _version(te.version) > TESTED_VERSION:
        tested = ".".join(map(str, TESTED_VERSION))
        return f"Octavo's calls are checked against {tested}, this is {te.version}"
    return ""


def _native_warning(device: DeviceFacts) -> str:
    if device.kind == "cuda":
        return "native FP8 has the numbers of FP8 at BF16's speed or below"
    return ""


def _version(text: str) -> tuple[int, int]:
    """Major and minor; (0, 0) of what is no version."""
    parts = text.split(".")[:2]
    if len(parts) < 2 or not all(part.isdigit() for part in parts):
        return (0, 0)
    return (int(parts[0]), int(parts[1]))
