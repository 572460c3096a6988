"""The fault matrix: a real FP8 job over several hosts, one fault a row, no human.

    python -m tests.hosts.faults [--rows kill,frozen] [--repeat 3] [--out runs/faults.md] [--resume]

``rows`` has the faults as data and ``acts`` their verbs, ``scene`` a job under observation,
``outcome`` what a row showed, ``records`` what has been shown so far, ``table`` how it is told.
"""
