"""Faults rehearsed on purpose: the spec's ``drills``, each once in a job's life.

``config`` is what a spec may ask for, ``firing`` what a rank does when, ``batches`` what
becomes of the data; what becomes of a model is ``parallel.faults``.
"""

from launch.drills.config import Drill
from launch.drills.firing import Drills, Target, check_target

__all__ = ["Drill", "Drills", "Target", "check_target"]
