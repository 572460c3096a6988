"""Detectors: what looks at every step record and says what is wrong.

bank = DetectorBank(DetectionConfig())
for record in records:
    for incident in bank.observe(record):
        print(incident.message)
"""

from monitoring.detectors.amax_saturation import AmaxSaturation
from monitoring.detectors.amax_surge import AmaxSurge
from monitoring.detectors.bank import DetectorBank
from monitoring.detectors.base import DETECTORS, Detector, build_detectors, register
from monitoring.detectors.exchange_error import ExchangeError
from monitoring.detectors.frozen_scale import FrozenScale
from monitoring.detectors.grad_norm_spike import GradNormSpike
from monitoring.detectors.loss_spike import LossSpike
from monitoring.detectors.nonfinite import NonFinite
from monitoring.detectors.projected_overflow import ProjectedOverflow
from monitoring.detectors.replica_disagreement import ReplicaDisagreement
from monitoring.detectors.slow_divergence import SlowDivergence
from monitoring.detectors.underflow import Underflow

__all__ = [
    "DETECTORS",
    "AmaxSaturation",
    "AmaxSurge",
    "Detector",
    "DetectorBank",
    "ExchangeError",
    "FrozenScale",
    "GradNormSpike",
    "LossSpike",
    "NonFinite",
    "ProjectedOverflow",
    "ReplicaDisagreement",
    "SlowDivergence",
    "Underflow",
    "build_detectors",
    "register",
]
