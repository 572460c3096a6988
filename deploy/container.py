"""Container files: for GPUs on NVIDIA's PyTorch image, which has Transformer Engine, and for CPUs.

    docker build -f Containerfile.gpu -t registry.example.com/octavo:0.1.0 PATH-OF-A-CHECKOUT

Promises: pure; the base is pinned; the image's own torch, CUDA and Transformer Engine are not
touched (``image_packages``); processes run as an ordinary user; no secret is in a layer. What a
build asks of an index is pinned by the checkout's ``constraints.txt``.
"""

from __future__ import annotations

from deploy.cluster_profile import CLOUDS, ClusterProfile, Target

CLOUD_MODULES: dict[Target, tuple[str, ...]] = {
    "aws": ("boto3",),
    "gcp": ("googleapiclient", "google_auth_httplib2"),
    "azure": ("azure.identity", "azure.mgmt.compute", "azure.mgmt.network", "azure.mgmt.resource"),
}
"""What Ray's launcher and the head's autoscaler import for a cloud; the project's extras of the
clouds' names bring it along."""

USER_LINES = """\
RUN groupadd --gid {user} octavo \\
 && useradd --uid {user} --gid {user} --create-home --shell /bin/bash octavo \\
 && install -d -m 700 -o octavo -g octavo /home/octavo/.ray \\
 && install -d -o octavo -g octavo {home} {jobs}
USER {user}:{user}
WORKDIR {home}
# Ray's launcher asks the image for HOME, and mounts Ray's token below it.
ENV HOME=/home/octavo OCTAVO_HOME={home}
CMD ["octavo", "--help"]
"""

IGNORED = (".git", ".venv", "**/__pycache__", "runs", "build", "dist", "*.egg-info", ".*_cache")


def gpu_file(profile: ClusterProfile) -> str:
    """The GPU image's file."""
    # Id 1000 is ubuntu's in the image, which nobody is.
    return f"""\
# Rendered by `octavo deploy`; change cluster.yaml and render it again.
#   docker build -f Containerfile.gpu -t NAME:TAG CHECKOUT
FROM {profile.image.gpu_base}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Ray's launcher copies files into containers, and the head starts machines over ssh.
RUN apt-get update \\
 && apt-get install --yes --no-install-recommends rsync openssh-client \\
 && rm -rf /var/lib/apt/lists/*
COPY . /opt/octavo-source
WORKDIR /opt/octavo-source
# What the image has stays as it is: its torch, NCCL and Transformer Engine belong together.
RUN python -c 'import transformer_engine.pytorch' \\
 && python deploy/image_packages.py /tmp{"".join(f" {name}" for name in _extras(profile))} \\
 && pip list --format=freeze | grep -iE '^(torch|triton|transformer)' > /tmp/before.txt \\
 && pip install --no-cache-dir --no-build-isolation -c /tmp/pinned.txt -r /tmp/wanted.txt \\
 && pip install --no-cache-dir --no-build-isolation --no-deps -c /tmp/pinned.txt . \\
 && pip list --format=freeze | grep -iE '^(torch|triton|transformer)' > /tmp/after.txt \\
 && diff /tmp/before.txt /tmp/after.txt \\
 && rm -rf /opt/octavo-source /tmp/*.txt \\
 && (userdel --remove ubuntu 2> /dev/null || true)
{_user(profile)}"""


def cpu_file(profile: ClusterProfile) -> str:
    """The CPU image's file, for heads and for trying things."""
    return f"""\
# Rendered by `octavo deploy`; change cluster.yaml and render it again.
#   docker build -f Containerfile.cpu -t NAME:TAG CHECKOUT
FROM {profile.image.cpu_base}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# DeepSpeed compiles a small extension at the first start of a rank; Ray's launcher copies files
# into containers by rsync, and the head starts machines over ssh.
RUN apt-get update \\
 && apt-get install --yes --no-install-recommends gcc g++ libc6-dev rsync \\
    openssh-client \\
 && rm -rf /var/lib/apt/lists/*
COPY . /opt/octavo-source
WORKDIR /opt/octavo-source
# torch comes first and pinned, as in `make install`; deepspeed's build imports it. Its builds for
# CPUs, without gigabytes of CUDA, have an index of their own: --build-arg TORCH_INDEX=URL.
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir -c constraints.txt setuptools wheel \\
 && pip install --no-cache-dir -c constraints.txt \\
    ${{TORCH_INDEX:+--index-url $TORCH_INDEX}} torch \\
 && pip install --no-cache-dir -c constraints.txt ninja numpy \\
 && pip install --no-cache-dir -c constraints.txt --no-build-isolation \\
    {_checkout(profile)} \\
 && rm -rf /opt/octavo-source
{_user(profile)}"""


def ignore_file() -> str:
    """What a build doesn't see of the checkout."""
    return "\n".join(IGNORED) + "\n"


def _extras(profile: ClusterProfile) -> tuple[str, ...]:
    """The project's extras that the profile's own target wants."""
    return (profile.target,) if profile.target in CLOUDS else ()


def _checkout(profile: ClusterProfile) -> str:
    """The checkout, for pip."""
    extras = ",".join(_extras(profile))
    return f"'.[{extras}]'" if extras else "."


def _user(profile: ClusterProfile) -> str:
    storage = profile.storage
    return USER_LINES.format(
        user=profile.kubernetes.user_id, home=storage.home.path, jobs=storage.jobs.path
    )
