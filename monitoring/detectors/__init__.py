"""Detectors: what looks at every step record and says what is wrong.

bank = DetectorBank(DetectionConfig())
for record in records:
    for incident in bank.observe(record):
        print(incident.message)
"""

from monitoring.detectors.amax_saturation import AmaxSaturation
from monitoring.detectors.bank import DetectorBank
from monitoring.detectors.base import DETECTORS, Detector, build_detectors, register
from monitoring.detectors.exchange_error import ExchangeError
from monitoring.detectors.grad_norm_spike import GradNormSpike
from monitoring.detectors.loss_spike import LossSpike
from monitoring.detectors.nonfinite import NonFinite

__all__ = [
    "DETECTORS",
    "AmaxSaturation",
    "Detector",
    "DetectorBank",
    "ExchangeError",
    "GradNormSpike",
    "LossSpike",
    "NonFinite",
    "build_detectors",
    "register",
]
