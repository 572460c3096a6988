"""A cluster as systemd's units, for hosts that nobody but you manages.

Promises: pure; services run as an ordinary user with no privileges to gain, restart for ever and
slowly, and give jobs the time for a checkpoint before they end; Ray's token and the Redis' password
are handed over by ``LoadCredential`` and an environment file (0600), and are on no command line.
"""

from __future__ import annotations

from collections.abc import Mapping

from deploy.cluster_profile import ClusterProfile, NodeGroup
from deploy.ray_options import (
    EXIT_S,
    GCS_PORT,
    HEAD_GRACE_S,
    api_options,
    environment,
    head_options,
    node_options,
)

HEAD_UNIT = "octavo-head.service"
TOKEN = "/etc/octavo/ray-token"


def token_file(profile: ClusterProfile) -> str:
    """Where Ray's token is on each host; a path below somebody's home is not the service's."""
    given = profile.security.ray_token_file
    return given if given.startswith("/") else TOKEN


def node_unit(group: NodeGroup) -> str:
    """The unit's name for hosts of a group."""
    return f"octavo-node-{group.name}.service"


def head_service(profile: ClusterProfile) -> str:
    """Ray's head with the controller."""
    security, address = profile.security, profile.head.address
    options = [*head_options(profile), f"--port={GCS_PORT}", f"--node-ip-address={address}"]
    command = (
        f"{profile.hosts.environment}/bin/python -m deploy.serve {profile.storage.home.path} "
        f"--address {address}:{GCS_PORT} "
        f"{api_options(profile, security.tls_cert, security.tls_key)} "
        f"--grace {HEAD_GRACE_S - EXIT_S} --head -- {' '.join(options)}"
    )
    given = environment(profile)
    files = []
    if profile.redis is not None:
        given |= {
            "RAY_REDIS_ADDRESS": profile.redis.address,
            "RAY_external_storage_namespace": profile.name,
        }
        if profile.redis.password_file is not None:
            files.append(f"EnvironmentFile={profile.redis.password_file}")
    writable = [profile.storage.home.path, profile.storage.jobs.path]
    return _service(
        profile,
        f"Octavo's controller and Ray's head of {profile.name}",
        command,
        given,
        [*files, f"ReadWritePaths={' '.join(writable)}", f"TimeoutStopSec={HEAD_GRACE_S}"],
    )


def node_service(profile: ClusterProfile, group: NodeGroup) -> str:
    """Ray's node of a group."""
    command = (
        f"{profile.hosts.environment}/bin/ray start --block "
        f"--address={profile.head.address}:{GCS_PORT} --disable-usage-stats "
        f"{' '.join(node_options(group))}"
    )
    return _service(
        profile,
        f"A node of {profile.name}'s group {group.name}",
        command,
        environment(profile, group),
        [f"ReadWritePaths={profile.storage.jobs.path}", "TimeoutStopSec=30"],
    )


def _service(
    profile: ClusterProfile,
    description: str,
    command: str,
    given: Mapping[str, str],
    more: list[str],
) -> str:
    variables = "\n".join(f"Environment={name}={value}" for name, value in given.items())
    lines = "\n".join(more)
    return f"""\
# Rendered by `octavo deploy`; change cluster.yaml and render it again.
[Unit]
Description={description}
Wants=network-online.target
After=network-online.target remote-fs.target
StartLimitIntervalSec=0

[Service]
User={profile.hosts.user}
UMask=0077
ExecStart={command}
LoadCredential=ray-token:{token_file(profile)}
Environment=RAY_AUTH_TOKEN_PATH=%d/ray-token
Environment=OCTAVO_HOME={profile.storage.home.path}
Environment=PATH={profile.hosts.environment}/bin:/usr/local/bin:/usr/bin:/bin
{variables}
{lines}
Restart=always
RestartSec=5
LimitNOFILE=65536
LimitMEMLOCK=infinity
NoNewPrivileges=yes
ProtectSystem=full
ProtectHome=read-only
PrivateTmp=yes
# Ray's workers are its own to end; one that needs too much memory does not take all with it.
OOMPolicy=continue
TasksMax=infinity

[Install]
WantedBy=multi-user.target
"""
