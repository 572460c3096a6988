"""Where a controller may listen, and that its clients talk to it and to nobody else."""

from __future__ import annotations

import datetime
import ipaddress
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from orchestrator.api.app import create_app
from orchestrator.api.client import Client
from orchestrator.api.client_errors import UnreachableError
from orchestrator.cli.main import call
from orchestrator.home.folder import Home, HomeConfig, Server
from orchestrator.home.listening import Certificate, ListeningError, check_listening, on_loopback
from tests.unit.control_plane import ControlPlane


def certificate(folder: Path, address: str, name: str = "octavo") -> tuple[Path, Path]:
    """Files of a certificate for ``address`` that signed itself, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    today = datetime.datetime.now(datetime.UTC)
    san = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(san, critical=False)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(exist_ok=True)
    cert, secret = folder / f"{name}.pem", folder / f"{name}.key"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.touch(0o600)
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return cert, secret


@contextmanager
def serving(
    plane: ControlPlane, home: Home, cert: Path, key: Path, stop: threading.Event | None = None
) -> Iterator[str]:
    """The API over TLS, as the controller of ``home``; its URL. Until ``stop`` the certificate is
    looked after."""
    token = home.token(create=True)
    assert token
    settings = uvicorn.Config(
        create_app(plane.controller, token),
        port=0,
        log_config=None,
        lifespan="off",
        ssl_certfile=cert,
        ssl_keyfile=key,
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"https://127.0.0.1:{port}"
    home.write_server(Server(url, port, 0))
    if stop is not None:
        keep = Certificate(cert, key).keep
        threading.Thread(target=keep, args=(lambda: settings.ssl, stop), daemon=True).start()
    yield url
    server.should_exit = True
    thread.join(5)


def test_beyond_the_loopback_it_takes_tls_or_a_word(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "10.0.0.1")
    for host in ("127.0.0.1", "::1", "localhost"):
        check_listening(HomeConfig(host=host))
    for host in ("0.0.0.0", "::", "10.0.0.1"):
        assert not on_loopback(host)
        with pytest.raises(ListeningError, match="--tls-cert, --tls-key"):
            check_listening(HomeConfig(host=host))
        check_listening(HomeConfig(host=host, plain_http=True))
        check_listening(HomeConfig(host=host, tls_cert=cert, tls_key=key))


def test_files_that_are_no_certificate_and_its_key_are_refused_with_what_is_wrong(
    tmp_path: Path,
) -> None:
    cert, key = certificate(tmp_path, "10.0.0.1")
    _, other = certificate(tmp_path, "10.0.0.1", "other")
    for one, two, says in (
        (cert, None, "give --tls-key too"),
        (None, key, "give --tls-cert too"),
        (tmp_path / "none.pem", key, "none.pem can't be read: No such file"),
        (key, key, "are no certificate and its key"),
        (cert, other, "mismatch|MISMATCH"),
    ):
        with pytest.raises(ListeningError, match=says):
            check_listening(HomeConfig(tls_cert=one, tls_key=two))
    key.chmod(0o644)
    with pytest.raises(ListeningError, match=r"can be read by others \(chmod 600"):
        check_listening(HomeConfig(tls_cert=cert, tls_key=key))


def test_up_refuses_it_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["up", "--home", str(tmp_path / "home"), "--listen", "0.0.0.0"]
    assert call(asked) == 2
    told = capsys.readouterr().err
    assert "0.0.0.0 without TLS" in told and "--plain-http" in told
    assert not (tmp_path / "home").exists()


def test_a_client_of_the_home_trusts_its_certificate_and_no_other(
    plane: ControlPlane, tmp_path: Path
) -> None:
    # Of a name that no client would look for: it is known by itself.
    cert, key = certificate(tmp_path / "tls", "192.0.2.1")
    home = Home(tmp_path / "home")
    home.create(HomeConfig(tls_cert=cert, tls_key=key))
    with serving(plane, home, cert, key):
        assert Client.of_home(home).jobs() == []
        another, _ = certificate(tmp_path / "tls", "127.0.0.1", "another")
        home.create(HomeConfig(tls_cert=another, tls_key=key))
        with pytest.raises(UnreachableError, match="is not to be trusted") as refused:
            Client.of_home(home).jobs()
        assert "something else answers there" in refused.value.remedy


def test_a_client_that_speaks_tls_to_plain_http_is_told_so(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(plane.controller, "t" * 40)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    with pytest.raises(UnreachableError, match="speaks plain HTTP") as refused:
        Client(f"https://127.0.0.1:{port}", "t" * 40).jobs()
    assert "write http:// for https://" in refused.value.remedy
    server.should_exit = True
    thread.join(10)


def test_a_client_elsewhere_takes_an_authority_by_file_and_looks_at_the_name(
    plane: ControlPlane,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = Home(tmp_path / "home")
    home.create()
    right = certificate(tmp_path / "tls", "127.0.0.1", "right")
    wrong = certificate(tmp_path / "tls", "192.0.2.1", "wrong")
    for (cert, key), code in ((right, 0), (wrong, 3)):
        with serving(plane, home, cert, key) as url:
            monkeypatch.setenv("OCTAVO_URL", url)
            monkeypatch.setenv("OCTAVO_TOKEN", home.token() or "")
            monkeypatch.setenv("OCTAVO_CA", str(cert))
            assert call(["list"]) == code
            monkeypatch.delenv("OCTAVO_CA")
            assert call(["list"]) == 3
            assert "--ca FILE or $OCTAVO_CA" in capsys.readouterr().err
            assert call(["list", "--ca", str(cert)]) == code
            assert call(["list", "--ca", str(tmp_path / "none")]) == 1
            assert "none can't be read: No such file" in capsys.readouterr().err


def test_a_certificate_that_is_replaced_is_taken_without_a_restart(
    plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.home.listening.RENEW_S", 0.02)
    cert, key = certificate(tmp_path / "tls", "127.0.0.1")
    new = certificate(tmp_path / "tls", "127.0.0.1", "new")
    home, stop = Home(tmp_path / "home"), threading.Event()
    home.create(HomeConfig(tls_cert=cert, tls_key=key))
    with serving(plane, home, cert, key, stop):
        assert Client.of_home(home).jobs() == []
        # One after the other, as files are: what is between is no pair, and is not taken.
        new[0].replace(cert)
        new[1].replace(key)
        deadline = time.monotonic() + 30
        while not Client.of_home(home).healthy() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert Client.of_home(home).jobs() == []
        stop.set()
