"""A Redis for Ray's tables is understood, or refused with what to do."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from orchestrator.home.folder import Home, TokenExposedError
from orchestrator.home.redis_tables import PASSWORD_FILE, RedisError, RedisTables


@pytest.mark.parametrize(
    ("text", "address", "username"),
    [
        ("10.0.0.9:6380", "redis://10.0.0.9:6380", ""),
        ("tables", "redis://tables:6379", ""),
        ("redis://octavo@tables:7000/", "redis://tables:7000", "octavo"),
        ("rediss://[fd00::9]:6379", "rediss://[fd00::9]:6379", ""),
    ],
)
def test_an_address_is_read_as_ray_and_redis_write_it(
    text: str, address: str, username: str
) -> None:
    tables = RedisTables.of(text, "mine")
    assert (tables.address, tables.username) == (address, username)
    assert tables.environment() == {
        "RAY_REDIS_ADDRESS": address,
        "RAY_external_storage_namespace": "mine",
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("http://tables:6379", "no Redis"),
        ("tables:70000", "no number from 1 to 65535"),
        (":6379", "names no host"),
        ("redis://tables:6379/2", "'/2' follows the address"),
        ("redis://octavo:secret@tables:6379", "doesn't belong into the address"),
    ],
)
def test_what_is_no_address_is_refused_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        RedisTables.of(text, "mine")
    assert "secret" not in str(refused.value)


def test_a_cluster_that_shares_a_redis_must_have_a_name() -> None:
    given = {"RAY_REDIS_ADDRESS": "tables:6379"}
    assert RedisTables.of_environment({}) is None
    with pytest.raises(ValueError, match="RAY_external_storage_namespace is not set"):
        RedisTables.of_environment(given)
    with pytest.raises(ValueError, match="one address"):
        RedisTables.of_environment({"RAY_REDIS_ADDRESS": "a:1,b:2"})
    named = given | {"RAY_external_storage_namespace": "mine", "RAY_REDIS_PASSWORD": "secret"}
    tables = RedisTables.of_environment(named)
    assert tables is not None and (tables.namespace, tables.password) == ("mine", "secret")
    assert "secret" not in repr(tables) and "secret" not in str(tables.environment())


def test_a_redis_that_is_not_there_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with pytest.raises(RedisError, match=f"127.0.0.1:{port}.*start it, or name another"):
        RedisTables.of(f"127.0.0.1:{port}", "mine").check()


@pytest.mark.parametrize(
    ("answer", "password", "says"),
    [
        (b"-NOAUTH Authentication required.\r\n", "", "wants a password"),
        (b"-WRONGPASS invalid username-password pair\r\n", "wrong", "wants another password"),
    ],
)
def test_a_password_that_is_missing_or_wrong_is_told_with_where_it_goes(
    answer: bytes, password: str, says: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse_all() -> None:
            connection, _ = server.accept()
            with connection:
                while asked := connection.recv(65536):
                    connection.sendall(answer * asked.count(b"*"))

        threading.Thread(target=refuse_all, daemon=True).start()
        tables = RedisTables.of(f"127.0.0.1:{server.getsockname()[1]}", "mine", password)
        with pytest.raises(RedisError, match=f"{says}.*{PASSWORD_FILE}"):
            tables.check()


def test_the_password_comes_from_a_file_of_the_owner_alone_or_else_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_REDIS_PASSWORD", raising=False)
    home = Home(tmp_path)
    assert home.redis_password() == ""
    monkeypatch.setenv("RAY_REDIS_PASSWORD", "of the environment")
    assert home.redis_password() == "of the environment"
    file = tmp_path / PASSWORD_FILE
    file.write_text("of the file\n")
    file.chmod(0o644)
    with pytest.raises(TokenExposedError, match="chmod 600"):
        home.redis_password()
    file.chmod(0o600)
    assert home.redis_password() == "of the file"
