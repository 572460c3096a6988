"""The Redis that Ray's head keeps its tables in, so that they outlive its process.

Ray's tables say which nodes and actors there are. In memory they die with the process that holds
them (the GCS), and the cluster with it; in a Redis a GCS that is started again finds everybody
living, and what trains needs not notice.

Promises: an address that can't be used is refused with what to do, before Ray is started, which
would try for minutes or crash; the password is never in a URL, nor shown by a ``repr``; what one
cluster keeps, under its ``namespace``, no other sees.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

PASSWORD_VARIABLE = "RAY_REDIS_PASSWORD"
PASSWORD_FILE = "redis-password"
"""In the controller's home, 0600."""
RAY_VARIABLES = ("RAY_REDIS_ADDRESS", "RAY_external_storage_namespace", PASSWORD_VARIABLE)
CHECK_S = 5.0
"""Seconds that Redis may take to answer."""
_TLS_VARIABLES = {
    "RAY_REDIS_CA_CERT": "ca",
    "RAY_REDIS_CLIENT_CERT": "certificate",
    "RAY_REDIS_CLIENT_KEY": "key",
}
"""Ray's, of files: with a client's certificate a Redis needs no password."""


class RedisError(ConnectionError):
    """The Redis can't be used; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class RedisTables:
    """One cluster's part of a Redis."""

    host: str
    port: int
    namespace: str
    """Of the cluster; no '@', which Ray sets apart with."""
    tls: bool = False
    username: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def of(cls, text: str, namespace: str, password: str = "") -> RedisTables:
        """From ``[redis[s]://][USER@]HOST[:PORT]``. Raises ValueError, saying what is wrong."""
        parts = urlsplit(text if "://" in text else f"redis://{text}")
        if parts.scheme not in ("redis", "rediss"):
            raise ValueError(
                f"{parts.scheme}:// is no Redis: write HOST:PORT, redis://HOST:PORT, or "
                "rediss://HOST:PORT for TLS"
            )
        if parts.password is not None:
            # Where it came from it can be seen by anyone who lists processes.
            raise ValueError(
                f"a password doesn't belong into the address: put it into the file {PASSWORD_FILE} "
                f"of the home (chmod 600), or into ${PASSWORD_VARIABLE}"
            )
        if parts.path.strip("/") or parts.query:
            raise ValueError(
                f"{_rest(parts)!r} follows the address; Ray takes a Redis as a whole: HOST:PORT"
            )
        try:
            port = 6379 if parts.port is None else parts.port
        except ValueError:
            raise ValueError(f"{text}: the port is no number from 1 to 65535") from None
        if not parts.hostname or not port:
            raise ValueError(f"{text!r} names no host and port: write HOST:PORT")
        if not namespace or "@" in namespace:
            raise ValueError(f"the namespace {namespace!r} is empty or has an '@' in it")
        return cls(
            host=parts.hostname,
            port=port,
            namespace=namespace,
            tls=parts.scheme == "rediss",
            username=parts.username or "",
            password=password,
        )

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> RedisTables | None:
        """What Ray's own variables name; None where they name none. Raises ValueError."""
        address, namespace, password = (environment.get(name, "") for name in RAY_VARIABLES)
        if not address:
            return None
        if "," in address:
            raise ValueError(f"$RAY_REDIS_ADDRESS is {address!r}: one address of the Redis will do")
        if not namespace:
            # Ray's own default is the same for every cluster that uses the Redis.
            raise ValueError(
                "$RAY_external_storage_namespace is not set: it tells this cluster's tables from "
                "those of others in the same Redis; give the cluster a name and keep it"
            )
        return cls.of(address, namespace, password)

    @property
    def address(self) -> str:
        """As Ray reads it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}"

    def environment(self) -> dict[str, str]:
        """Of the process that starts Ray's head; without the password."""
        address, namespace, _ = RAY_VARIABLES
        return {address: self.address, namespace: self.namespace}

    def check(self) -> None:
        """Ask it whether it is there and takes us. Raises RedisError."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        files = {what: os.environ.get(name) for name, what in _TLS_VARIABLES.items()}
        client = redis.Redis(
            host=self.host,
            port=self.port,
            username=self.username or None,
            password=self.password or None,
            socket_timeout=CHECK_S,
            socket_connect_timeout=CHECK_S,
            retry=Retry(NoBackoff(), 0),
            ssl=self.tls,
            ssl_ca_certs=files["ca"],
            ssl_certfile=files["certificate"],
            ssl_keyfile=files["key"],
        )
        try:
            with client:
                client.ping()
        except redis.exceptions.AuthenticationError as error:
            given = f"another password ({error})" if self.password else "a password"
            raise RedisError(
                f"the Redis at {self.address} wants {given}: put it into the "
                f"file {PASSWORD_FILE} of the home (chmod 600), or into ${PASSWORD_VARIABLE}"
            ) from None
        except redis.exceptions.TimeoutError:
            raise RedisError(
                f"the Redis at {self.address} doesn't answer within {CHECK_S:.0f} s: does it run, "
                "and listen on that address (`bind` in redis.conf)?"
            ) from None
        except (redis.exceptions.RedisError, OSError) as error:
            why = " ".join(str(error).split())
            raise RedisError(
                f"no Redis can be used at {self.address}: {why}; start it, or name another"
            ) from None

    def forget(self) -> None:
        """Take away all that the cluster kept; whoever does must know that it is gone for good."""
        from ray._private.gcs_utils import cleanup_redis_storage

        cleanup_redis_storage(
            self.host, self.port, self.password, self.tls, self.namespace, self.username or None
        )


def _rest(parts: SplitResult) -> str:
    return parts.path + (f"?{parts.query}" if parts.query else "")
