"""A job's detectors: made from its spec, or as an earlier supervisor left them."""

from __future__ import annotations

import logging
import math

from monitoring.amax import TensorScaling
from monitoring.detectors import DetectorBank
from orchestrator.protocol import ResumeState
from orchestrator.spec.job import JobSpec

logger = logging.getLogger(__name__)


def new_bank(spec: JobSpec) -> DetectorBank:
    """Detectors that have seen nothing."""
    fp8 = spec.fp8
    scaling = TensorScaling(
        recipe=fp8.recipe,
        fp8_format=fp8.format or "HYBRID",
        margin=fp8.margin or 0,
        history=fp8.amax_history_len or 1,
    )
    return DetectorBank(
        spec.detection,
        scaling=scaling,
        # A model of the user's own may have any loss.
        guessing_loss=None if spec.model.factory else math.log(spec.model.vocab_size),
        save_every=spec.snapshots.every,
    )


def bank_of(resume: ResumeState) -> DetectorBank:
    """The detectors where an earlier supervisor left them; anew if that can't be read."""
    bank = new_bank(resume.spec)
    if resume.detector_state is not None:
        try:
            bank.load_state_dict(resume.detector_state)
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("detectors start anew, their stored state is unreadable: %r", error)
            bank = new_bank(resume.spec)
    return bank
