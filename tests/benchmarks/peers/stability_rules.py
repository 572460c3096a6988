"""What others do about an unstable step, acting in a plain loop as their users set it up.

    rule = RULES["zclip"](steps, folder)
    for step in …:
        …                                   # forward, backward
        rule.clip(parameters, loss)         # this and the next may raise Raised or Stopped
        optimizer.step()                    # times rule.factor
        rule.after(step, batch, loss)

Each is written from its authors' code or description, with its own defaults, and says which. A
rule that raises leaves what comes then to its launcher: torchrun starts the script anew from its
last checkpoint (``Raised``), or nobody does (``Stopped``). What a rule had seen is lost with its
process, as it is with theirs. The thresholds of most are those of ``published_rules``, which
watches recorded steps; here they act.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from monitoring.records import StepRecord
from tests.benchmarks import published_rules

MAX_NORM = 1.0
"""Where gradients are clipped, on every side."""
EXCLUDED = "skip_batches.json"


class Raised(RuntimeError):
    """The rule ends the process; whoever started it starts it anew."""


class Stopped(RuntimeError):
    """The rule ends the run, for a person to look at."""


class Rule:
    """Steady clipping, and nothing else: what all others have too."""

    label = "clipping alone"
    source = "torch.nn.utils.clip_grad_norm_ at 1.0; nothing watches, nothing raises"
    own_optimizer: Callable[..., torch.optim.Optimizer] | None = None
    """What it trains with in place of AdamW."""

    def __init__(self, steps: int, folder: Path) -> None:
        """``steps`` of the whole run; ``folder`` outlives this process."""
        self.steps = steps
        self.factor = 1.0
        """What the newest step is multiplied by: 0 or 1, and 1 without an optimizer of its own."""
        self.excluded: frozenset[int] = frozenset()
        """Batches that the loop leaves out."""

    def clip(self, parameters: Sequence[Tensor], loss: float) -> float:
        """Deal with the gradients before the update; their norm before clipping."""
        return float(clip_grad_norm_(parameters, MAX_NORM))

    def after(self, step: int, batch: int, loss: float) -> None:
        """Look at a step that is over."""


class RaiseNonfinite(Rule):
    """A norm that isn't finite raises."""

    label = "raise and restart under torchrun"
    source = (
        "clip_grad_norm_(error_if_nonfinite=True); PyTorch's tutorial on fault-tolerant training "
        "with torchrun (--max-restarts 3, newest checkpoint)"
    )

    def clip(self, parameters: Sequence[Tensor], loss: float) -> float:
        try:
            return float(clip_grad_norm_(parameters, MAX_NORM, error_if_nonfinite=True))
        except RuntimeError as error:
            raise Raised("the gradient's norm isn't finite") from error


class LightningSpikes(Rule):
    """A spike raises, and names this batch and the one before as ones to leave out.

    The file that names them is Lightning's; reading it and leaving them out is the user's own
    (nothing in Lightning does), and done here by the sampler, over all restarts together, which
    is more than the file holds: each process writes it anew. The callback starts with nothing
    seen, for its ``load_state_dict`` asks for an attribute that it doesn't have.
    """

    label = "Lightning's SpikeDetection"
    source = "Lightning-AI/pytorch-lightning src/lightning/fabric/utilities/spike.py at 7f0c343"

    def __init__(self, steps: int, folder: Path) -> None:
        super().__init__(steps, folder)
        self._file = folder / EXCLUDED
        self._sees = published_rules.Lightning()
        if self._file.exists():
            self.excluded = frozenset(json.loads(self._file.read_text()))

    def after(self, step: int, batch: int, loss: float) -> None:
        if self._sees.observe(record(step, loss, math.nan)):
            bad = self.excluded | {max(batch - 1, 0), batch}
            self._file.write_text(json.dumps(sorted(bad)))
            raise Raised(f"a spike of the loss in batch {batch}: {loss:.3g}")


class LLMFoundry(Rule):
    """Composer's NaNMonitor raises; LLM-Foundry's KillLossSpike ends the run "without retry".

    KillLossSpike with ``log_only=False``: by default it acts on nothing. The cap that it would set
    from its first window stays at 10, as in ``published_rules``: it is set in batch 100 alone, when
    the window isn't full yet.
    """

    label = "LLM-Foundry's KillLossSpike and Composer's NaNMonitor"
    source = (
        "mosaicml/llm-foundry llmfoundry/callbacks/kill_loss_spike_callback.py at 8c8dd48 "
        "(log_only=False), mosaicml/composer composer/callbacks/nan_monitor.py at 6405188"
    )

    def __init__(self, steps: int, folder: Path) -> None:
        super().__init__(steps, folder)
        self._sees = published_rules.LLMFoundry()

    def clip(self, parameters: Sequence[Tensor], loss: float) -> float:
        if math.isnan(loss):  # it looks after the loss, before the backward's result is used
            raise Raised("the loss is NaN")
        return super().clip(parameters, loss)

    def after(self, step: int, batch: int, loss: float) -> None:
        if self._sees.observe(record(step, loss, math.nan)):
            raise Stopped(f"the loss is twice its mean for the fifth time in a row: {loss:.3g}")


class _OneSided(published_rules.OLMoCore):
    """As OLMo-core has it since: what lies far below the mean is no outlier."""

    @staticmethod
    def _within(values: deque[float]) -> bool:
        *past, newest = values
        if not all(map(math.isfinite, values)):
            return False
        spread, mean = torch.std_mean(torch.tensor(past, dtype=torch.float32))
        return newest - float(mean) <= 6 * float(spread)


class SkipStep(Rule):
    """An outlier of loss or norm has its step multiplied by 0; a loss that isn't finite raises
    when metrics are collected, every 5 steps."""

    label = "OLMo-core's SkipStepAdamW"
    source = (
        "allenai/OLMo-core src/olmo_core/optim/{skip_step_optimizer,adamw}.py and "
        "train/trainer.py (metrics_collect_interval=5) at fa6c501"
    )

    def __init__(self, steps: int, folder: Path) -> None:
        super().__init__(steps, folder)
        self._sees = _OneSided()
        self._bad = 0
        self.own_optimizer = SkipStepAdamW

    def clip(self, parameters: Sequence[Tensor], loss: float) -> float:
        norm = super().clip(parameters, loss)
        self.factor = 0.0 if self._sees.observe(record(0, loss, norm)) else 1.0
        return norm

    def after(self, step: int, batch: int, loss: float) -> None:
        self._bad += not math.isfinite(loss)
        if self._bad and (step + 1) % 5 == 0:
            raise Raised(f"{loss} loss encountered at step {step}")


class ZClip(Rule):
    """Gradients are clipped to what ZClip makes of their norm, and to 1.0."""

    label = "ZClip"
    source = "bluorion-com/ZClip zclip/zclip.py at 584ce4f, arXiv 2504.02507"

    def __init__(self, steps: int, folder: Path) -> None:
        super().__init__(steps, folder)
        self._sees = published_rules.ZClip()

    def clip(self, parameters: Sequence[Tensor], loss: float) -> float:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        self._sees.observe(record(0, loss, norm))
        limit = min(self._sees.taken, MAX_NORM)
        if norm > limit:  # of a NaN neither is
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))
        return norm


RULES: Mapping[str, type[Rule]] = {
    "clipping": Rule,
    "torchrun": RaiseNonfinite,
    "lightning": LightningSpikes,
    "llm_foundry": LLMFoundry,
    "olmo": SkipStep,
    "zclip": ZClip,
}


class SkipStepAdamW(torch.optim.Optimizer):
    """AdamW whose step is multiplied by ``factor``, 0 or 1, and never left out.

    θ ← θ (1 − f·lr·λ);  m ← m + f(1−β₁)(g − m);  v ← v(1 − f(1−β₂)) + f(1−β₂)g²;
    θ ← θ − f·lr·m̂/(√v̂ + ε);  t ← t + f. As in OLMo-core, where the host never waits for f: with
    f = 0 finite gradients change nothing, and a NaN, of which 0 · NaN is one, all they touch.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.factor = 1.0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        f = self.factor
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                mean, square, taken = state["exp_avg"], state["exp_avg_sq"], state["step"]
                p.mul_(1 - f * group["lr"] * group["weight_decay"])
                mean.lerp_(p.grad, f * (1 - beta1))
                square.mul_(1 - f * (1 - beta2)).add_(f * p.grad * p.grad, alpha=1 - beta2)
                root = (square.sqrt() / (1 - beta2 ** (taken + 1)).sqrt()).add_(group["eps"])
                p.add_(mean / root * (f * -group["lr"] / (1 - beta1 ** (taken + 1))))
                taken.add_(f)


def record(step: int, loss: float, norm: float) -> StepRecord:
    """A record as ``published_rules`` read it, of what a plain loop knows."""
    return StepRecord(1, 0, step, 0.0, step, loss, norm, 0.0, 0, 0.0)
