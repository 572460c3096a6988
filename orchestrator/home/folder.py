"""A controller's home: the folder with its settings, token, address and store.

    config.json   HomeConfig, written by who makes the home
    token         the API's bearer token, 0600
    redis-password  of the Redis that Ray's tables are in, 0600; made by its user
    redis.json    what of that Redis the running host uses
    server.json   where the running controller listens
    ray.json      address of the Ray cluster that the controller was started on, unless it has
                  one of its own on this machine
    store.db      the store, unless the config names another
    jobs/         job directories, unless a spec or the config names another place

Promises: the token is created once, readable by its owner only; files are replaced whole,
so a reader never sees half of one. Imports nothing heavy: the CLI reads it.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from orchestrator.home.rate_limit import RateLimit
from orchestrator.home.redis_tables import PASSWORD_FILE, PASSWORD_VARIABLE
from orchestrator.spec.config import QuarantineConfig

HOME_VARIABLE = "OCTAVO_HOME"


class HomeConfig(BaseModel):
    """Settings of one controller."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    store_url: str | None = None
    """SQLAlchemy URL; unset: SQLite in the home."""
    jobs_dir: Path | None = None
    """Folder of job directories; unset: in the home."""
    host: str = "127.0.0.1"
    """Address that the API listens on."""
    port: int = 0
    """Port of the API; 0: any free one, kept for the controller's life."""
    tls_cert: Path | None = None
    """PEM file of the API's certificate, with those that lead to its authority; unset: no TLS."""
    tls_key: Path | None = None
    """PEM file of its key (0600)."""
    plain_http: bool = False
    """The API may listen beyond the loopback without TLS (``orchestrator.home.listening``)."""
    rate: RateLimit = RateLimit()
    """How often one token may ask."""
    fixed_cluster: bool = True
    """No node will ever be added, so what exceeds the cluster fails instead of waiting."""
    standby: int = 0
    """Idle, imported workers kept on every node for jobs still to be submitted."""
    redis: str | None = None
    """Redis for the tables of the host's Ray, as ``[redis[s]://][USER@]HOST[:PORT]``; unset: in
    the memory of Ray's head."""
    quarantine: QuarantineConfig = QuarantineConfig()
    """When nodes are left out, and for how long."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a controller listens."""

    url: str
    port: int
    pid: int


class TokenExposedError(PermissionError):
    """A file with a secret can be read by others than its owner."""


class Home:
    """The files of one controller, under ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @classmethod
    def default(cls) -> Home:
        """``$OCTAVO_HOME``, or ``~/.octavo``."""
        return cls(Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".octavo"))

    @property
    def jobs_dir(self) -> Path:
        return self.config().jobs_dir or self.path / "jobs"

    @property
    def store_url(self) -> str:
        return self.config().store_url or f"sqlite:///{self.path / 'store.db'}"

    def create(self, config: HomeConfig | None = None) -> None:
        """Make the folder, and the config where there is none or a new one is given."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = self.path / "config.json"
        if config is not None or not file.exists():
            replace_file(file, (config or HomeConfig()).model_dump_json(indent=2))

    def config(self) -> HomeConfig:
        """The settings; defaults where there is no file."""
        file = self.path / "config.json"
        return HomeConfig.model_validate_json(file.read_text()) if file.exists() else HomeConfig()

    def token(self, *, create: bool = False) -> str | None:
        """The bearer token, None if there is none; raises ``TokenExposedError`` unless 0600."""
        file = self.path / "token"
        if create and not file.exists():
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            # O_EXCL: of two that create it at once, one wins and both read the same.
            try:
                fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                pass
            else:
                with os.fdopen(fd, "w") as out:
                    out.write(secrets.token_urlsafe(32))
        return _secret(file)

    def renew_token(self) -> str:
        """Another token in place of the one there is, which a running controller takes from then
        on; raises FileNotFoundError where there is none."""
        file = self.path / "token"
        file.stat()
        beside = file.with_name(f".token.{secrets.token_hex(4)}")
        token = secrets.token_urlsafe(32)
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(token)
        beside.replace(file)
        return token

    def redis_password(self) -> str:
        """Of the Redis: what the file or else the environment has, empty where neither has one.

        Raises ``TokenExposedError`` unless the file is 0600.
        """
        return _secret(self.path / PASSWORD_FILE) or os.environ.get(PASSWORD_VARIABLE, "")

    def server(self) -> Server | None:
        """Where the controller said that it listens; None if none ever did."""
        try:
            return Server(**json.loads((self.path / "server.json").read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def write_server(self, server: Server) -> None:
        """Say where the controller listens."""
        value = {"url": server.url, "port": server.port, "pid": server.pid}
        replace_file(self.path / "server.json", json.dumps(value))

    def ray_address(self) -> str:
        """Of the cluster that the controller was started on; empty where Ray is its own."""
        try:
            return str(json.loads((self.path / "ray.json").read_text())["address"])
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return ""

    def write_ray_address(self, address: str) -> None:
        """Say which cluster the controller was started on; empty: on none."""
        if not address:
            (self.path / "ray.json").unlink(missing_ok=True)
            return
        replace_file(self.path / "ray.json", json.dumps({"address": address}))

    def forget_server(self) -> None:
        """No controller listens any more."""
        (self.path / "server.json").unlink(missing_ok=True)


def _secret(file: Path) -> str | None:
    """The text of a file that only its owner can read; None where there is no file."""
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        return None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise TokenExposedError(f"{file} can be read by others (chmod 600 {file})")
    return file.read_text().strip()


def replace_file(file: Path, text: str) -> None:
    """Write ``text`` beside ``file`` and rename it into place."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(file)
