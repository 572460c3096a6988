"""Examples below the ``--help`` of each command, and what all commands have alike.

Promises: every command has examples, and every example is understood by its command
(``tests/unit/test_cli_help.py``).
"""

from __future__ import annotations

import typer

from orchestrator.cli.options import connected

EXAMPLES: dict[str, tuple[str, ...]] = {
    "run": (
        "octavo run job.yaml",
        "octavo run job.yaml --out /data/runs -o json",
    ),
    "submit": (
        "octavo submit job.yaml",
        "octavo submit job.yaml --key nightly-2026-11-30",
        "octavo submit job.yaml --dry-run",
    ),
    "plan": (
        "octavo plan job.yaml",
        "octavo plan job.yaml --device b200 --network ib400 --price 4",
        "octavo plan job.yaml --cluster cluster.yaml --group h100",
        "octavo plan job.yaml -o json",
        "octavo plan --presets",
    ),
    "list": ("octavo list", "octavo list --mine --state running", "octavo list -o json"),
    "jobs": ("octavo jobs --mine",),
    "status": ("octavo status my-model", "octavo status my-model-1a2b -o json"),
    "logs": (
        "octavo logs my-model -f",
        "octavo logs my-model -f --rank 3 --since 10m",
        "octavo logs my-model --attempt 2 --tail 100",
    ),
    "events": ("octavo events my-model -f", "octavo events my-model -o json"),
    "watch": ("octavo watch my-model", "octavo watch my-model -o json"),
    "report": ("octavo report my-model --to report.html", "octavo report my-model -o json"),
    "replay": ("octavo replay my-model", "octavo replay my-model --policy stricter.yaml"),
    "drill": ("octavo drill job.yaml", "octavo drill job.yaml --kinds bit_flip,lr_shock"),
    "cancel": ("octavo cancel my-model", "octavo cancel my-model --reason 'wrong data'"),
    "pause": ("octavo pause my-model", "octavo pause my-model --no-wait"),
    "resume": ("octavo resume my-model", "octavo resume my-model --parallelism pipeline=1,data=2"),
    "rollback": (
        "octavo rollback my-model --to-step 80",
        "octavo rollback my-model --to-step 80 --skip 90,95-99 --reason 'bad shard'",
    ),
    "precision": (
        "octavo precision my-model --layer 'layers.*.mlp.down' --to bf16",
        "octavo precision my-model --layer layers.3.attn.out --layer layers.3.mlp.down --to fp8",
    ),
    "exchange": ("octavo exchange my-model --to bf16", "octavo exchange my-model --to auto"),
    "up": (
        "octavo up",
        "octavo up --slots 8 --standby 4",
        "octavo up --listen 10.0.0.1 --port 8443 --tls-cert octavo.pem --tls-key octavo.key",
    ),
    "down": ("octavo down",),
    "dashboard": ("octavo dashboard my-model", "octavo dashboard my-model --out board.json"),
    "nodes": ("octavo nodes", "octavo nodes quarantine 10.0.0.7 --reason 'its fan fails' --for 2h"),
    "nodes quarantine": ("octavo nodes quarantine 10.0.0.7 --reason 'its fan fails' --for 2h",),
    "nodes release": ("octavo nodes release 10.0.0.7",),
    "doctor": (
        "octavo doctor",
        "octavo doctor --group h100 --address 10.0.0.1:6379",
        "octavo doctor --group all -o json",
    ),
    "deploy": ("octavo deploy render cluster.yaml", "octavo deploy apply cluster.yaml"),
    "deploy render": (
        "octavo deploy render cluster.yaml",
        "octavo deploy render --target slurm cluster.yaml --out scripts",
        "octavo deploy render --target rayjob cluster.yaml --job job.yaml",
    ),
    "deploy diff": (
        "octavo deploy diff cluster.yaml --out manifests",
        "octavo deploy diff --target kuberay cluster.yaml",
    ),
    "deploy apply": (
        "octavo deploy apply cluster.yaml",
        "octavo deploy apply --target slurm cluster.yaml --job job.yaml --yes",
    ),
    "token": ("octavo token create ci --role submit", "octavo token list"),
    "token create": (
        "octavo token create grafana --role read",
        "octavo token create alice --role submit --expires 90d",
    ),
    "token list": ("octavo token list", "octavo token list --all -o json"),
    "token rotate": (
        "octavo token rotate ci --overlap 1h --expires 90d",
        "octavo token rotate home",
    ),
    "token revoke": ("octavo token revoke ci", "octavo token revoke 5f0c2a91"),
    "token whoami": ("octavo token whoami",),
}
"""By the words of the command."""


def complete(app: typer.Typer, before: str = "") -> None:
    """Give every command of ``app`` its examples, and those that ask a controller ``--ca``."""
    for command in app.registered_commands:
        function = command.callback
        assert function is not None, "a command is a function"
        word = command.name or function.__name__.replace("_", "-")
        command.callback = connected(function)
        command.epilog = _epilog(f"{before}{word}")
    for group in app.registered_groups:
        inner, word = group.typer_instance, f"{before}{group.name}"
        assert inner is not None, "a group is an app"
        group.epilog = _epilog(word)
        info = inner.registered_callback
        if info is not None and info.callback is not None:
            info.callback = connected(info.callback)
        complete(inner, f"{word} ")


def _epilog(word: str) -> str:
    # \b: these lines stay lines.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in EXAMPLES.get(word, ()))])
