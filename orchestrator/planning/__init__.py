"""What a job will need and take, worked out before anything runs. Pure, and needs no torch.

``shapes``       parameters of a model, of a pipeline stage, of a rank
``memory``       bytes a rank and a node hold, by kind: what the engine really allocates
``activations``  what a micro-batch keeps until its backward
``traffic``      bytes a rank sends in a step, by kind
``devices``      devices and networks as data, with their sources
``step_time``    pipeline bubble and a roofline of a step
``estimate``     all of these for one completed spec, and whether it fits
``intervals``    how often to take snapshots and checkpoints
``search``       the best degrees of all that the checks accept; what to change where nothing fits
``presets``      known shapes by name
``cluster``      what a plan takes from a cluster, and where a job doesn't fit it

Promises: the same spec gives the same numbers everywhere. Memory is checked against CPU runs
(``tests/benchmarks/bench_plan.py``) and speed against published ones, from those that nothing was
fitted to comes its range (``tests/unit/test_plan_published.py``); none of it was tried on a GPU
here.
"""
