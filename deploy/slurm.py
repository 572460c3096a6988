"""A cluster inside an allocation of Slurm: one batch script.

    sbatch octavo.sbatch job.yaml

One task a node runs ``ray symmetric-run``: on the first node it starts Ray's head and the
controller (``deploy.serve``), which trains the job and ends with its exit code; on the others it
joins, and joins again where Ray was too slow or died. Promises: pure; shellcheck has nothing to say
of it; before the time is up jobs are paused after a checkpoint and the script puts itself into the
queue again, where it goes on; on `scancel --batch --signal=TERM ID` they are paused and it ends (a
plain scancel ends Ray at once: jobs go on from what is saved); Ray's token comes from a file (0600)
on the shared file system.
"""

from __future__ import annotations

import shlex

from deploy.cluster_profile import ClusterProfile, NodeGroup
from deploy.profile_values import mebibytes
from deploy.ray_options import GCS_PORT, LOOPBACK, api_options, environment, node_options

UNFINISHED = 101
"""What the controller's process ends with when it was asked to end before the job did."""
START_S = 300
"""Seconds that a node waits for the head: file systems are slow when a thousand processes start."""


def batch_script(profile: ClusterProfile) -> str:
    """Of all node groups: the first node, which is of the first group, has the head too."""
    lines = ["#!/usr/bin/env bash"]
    for i, group in enumerate(profile.node_groups):
        if i:
            lines.append("#SBATCH hetjob")
        lines += [f"#SBATCH {option}" for option in _options(profile, group, first=not i)]
    return "\n".join(lines) + "\n" + _body(profile)


def _options(profile: ClusterProfile, group: NodeGroup, *, first: bool) -> list[str]:
    slurm = profile.slurm
    found = []
    if first:
        found += [f"--job-name={profile.name}", f"--time={slurm.time}"]
        found.append("--output=%x-%j.log")
        # A node that fails ends its own task alone: the job goes on without it.
        found += ["--no-kill", "--requeue", "--open-mode=append"]
        # USR1: the time is nearly up. TERM: somebody wants it to end.
        found.append(f"--signal=B:USR1@{slurm.notice_s}")
        if slurm.account is not None:
            found.append(f"--account={slurm.account}")
    partition = group.partition or slurm.partition
    if partition is not None:
        found.append(f"--partition={partition}")
    found += [f"--nodes={group.fewest}", "--ntasks-per-node=1"]
    found.append(f"--cpus-per-task={group.cpus}")
    found.append(f"--mem={mebibytes(group.memory)}M")
    if group.gpus:
        found.append(f"--gpus-per-node={group.gpus}")
    return [*found, "--exclusive"]


def _body(profile: ClusterProfile) -> str:
    home = profile.storage.home.path
    security = profile.security
    given = environment(profile, profile.node_groups[0])
    given.pop("RAY_NODE_TYPE_NAME", None)
    exported = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in given.items())
    token = security.ray_token_file.replace("~", "$HOME", 1)
    api = api_options(profile, security.tls_cert, security.tls_key)
    return f"""\
# Rendered by `octavo deploy`; change cluster.yaml and render it again.
#   sbatch octavo.sbatch job.yaml
set -euo pipefail
umask 077

job_file="${{1:?name the job file: sbatch octavo.sbatch job.yaml}}"
job_file="$(realpath -- "$job_file")"
export PATH={shlex.quote(profile.hosts.environment)}/bin:"$PATH"
# A home has one controller: each allocation has its own. To go on with another's job in a new one:
#   sbatch octavo.sbatch job.yaml {home}/ID
export OCTAVO_HOME="${{2:-{home}/$SLURM_JOB_ID}}"
export RAY_AUTH_TOKEN_PATH="{token}"
if [[ ! -s "$RAY_AUTH_TOKEN_PATH" ]]; then
  echo "no token in $RAY_AUTH_TOKEN_PATH: run \\`ray get-auth-token --generate\\` once" >&2
  exit 2
fi
chmod 600 "$RAY_AUTH_TOKEN_PATH"
{exported}
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT={START_S}
# Several allocations may share a node's /tmp. Short, as names of sockets are limited.
export RAY_TMPDIR="/tmp/octavo-$SLURM_JOB_ID"

head_host="$(scontrol show hostnames "${{SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}}" \\
  | head -n 1)"
head_address="$(getent ahostsv4 "$head_host" | awk 'NR == 1 {{ print $1 }}')"
if [[ -z "$head_address" || "$head_address" == 127.* ]]; then
  echo "no address of $head_host that other nodes could reach: see getent ahostsv4" >&2
  exit 2
fi

# The controller looks for this file: jobs are paused after a checkpoint, then it ends.
stop_file="$OCTAVO_HOME/stop"
# symmetric-run ends with 0 where Ray did not start too: what the controller came to is in here.
ended_file="$OCTAVO_HOME/ended-$SLURM_JOB_ID"
mkdir -p "$OCTAVO_HOME" {shlex.quote(profile.storage.jobs.path)}
rm -f "$stop_file" "$ended_file"
again=no
trap 'touch "$stop_file"' TERM INT
trap 'again={"yes" if profile.slurm.requeue else "no"}; touch "$stop_file"' USR1

# shellcheck disable=SC2329
control() {{
  local code=0
  "$@" || code=$?
  echo "$code" > "$ended_file"
  return "$code"
}}

# shellcheck disable=SC2329
node() {{
  local task head=no
  if [[ " $(hostname -I) " == *" $head_address "* ]]; then head=yes; fi
  while true; do
    ray symmetric-run "$@" &
    task=$!
    while kill -0 "$task" 2> /dev/null; do
      sleep 2
      # A node waits minutes for a head that is gone, which this one will not come back from.
      if [[ $head == no && -s "$ended_file" ]]; then ray stop --force > /dev/null 2>&1 || true; fi
    done
    if [[ $head == yes || -s "$ended_file" ]]; then return 0; fi
    # Ray gives a node 30 s to join: one that took longer, or whose Ray died, comes again.
    sleep 5
    timeout 5 bash -c ": < /dev/tcp/$head_address/{GCS_PORT}" 2> /dev/null || return 0
  done
}}
export -f control node
export head_address ended_file

controller=(python -m deploy.serve "$OCTAVO_HOME" --address "$head_address:{GCS_PORT}"
  {api}
  --grace {max(30, profile.slurm.notice_s - 30)}
  --job "$job_file" --key "slurm-$(basename "$OCTAVO_HOME")")
{_steps(profile)}

# A signal interrupts `wait`, not the step.
while kill -0 "$step" 2> /dev/null; do wait "$step" || true; done
if [[ ! -s "$ended_file" ]]; then
  echo "the controller did not run: Ray's words are above" >&2
  exit 1
fi
code="$(< "$ended_file")"
# Slurm requeues what a failed node or another's job ended, not what ended itself.
if [[ $again == yes && $code == {UNFINISHED} ]]; then
  echo "the time is up: paused, and into the queue again"
  scontrol requeue "$SLURM_JOB_ID" || echo "not requeued: sbatch it again with $OCTAVO_HOME" >&2
fi
exit "$code"
"""


def _steps(profile: ClusterProfile) -> str:
    """One step, of one task a node; of several groups each is a part of it."""
    parts = [_part(profile, group, i) for i, group in enumerate(profile.node_groups)]
    line = " : \\\n  ".join(parts)
    return f"srun --kill-on-bad-exit=0 {line} &\nstep=$!"


def _part(profile: ClusterProfile, group: NodeGroup, place: int) -> str:
    several = len(profile.node_groups) > 1
    options = " ".join(shlex.quote(option) for option in node_options(group))
    het = f"--het-group={place} " if several else ""
    # Since 22.05 a step doesn't inherit the job's --cpus-per-task: its task would have one core,
    # and so would all that Ray starts there. Ranks find their own among those of the node.
    gpus = f"--gpus-per-node={group.gpus} " if group.gpus else ""
    # It waits for nobody: jobs wait for nodes, and a node that comes late is taken too.
    return (
        f"{het}--ntasks-per-node=1 --cpus-per-task={group.cpus} {gpus}--cpu-bind=none \\\n"
        f"  --export=ALL,RAY_NODE_TYPE_NAME={group.name} \\\n"
        f'  bash -c \'node "$@"\' node --address "$head_address:{GCS_PORT}" \\\n'
        f"  --dashboard-host={LOOPBACK} --disable-usage-stats {options} \\\n"
        f'  -- bash -c \'control "$@"\' control "${{controller[@]}}"'
    )
