"""Authentication between a coordinator and etcd: certificates, users and secret files."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from refitd.config import EtcdConfig, EtcdPlace
from refitd.coordinator.journals import SwapRecord
from refitd.coordinator.journals.etcd import EtcdJournal, Lead
from refitd.coordinator.journals.gateway import Gateway, NotReached, Refused
from refitd.errors import CommitError
from refitd.testing import eventually
from tests.support import etcd

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(etcd.MISSING), reason=etcd.MISSING)]

DECIDED = SwapRecord("s1", "policy", 4, "decided", "plan", "", 1.0, b"{}", "r")


def certificate(folder: Path, name: str, address: str) -> tuple[str, str, str]:
    """Make an authority and a certificate that it signs; return the files ca, cert and key."""
    now = datetime.datetime.now(datetime.UTC)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    authority = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"{name} authority")])
    # no common name: where etcd has users, its gateway refuses certificates that have one
    names = [authority, x509.Name([x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, name)])]
    files = []
    for i, (key, subject) in enumerate(zip(keys, names, strict=True)):
        made = x509.CertificateBuilder().subject_name(subject).issuer_name(names[0]).public_key(key.public_key())
        made = made.serial_number(x509.random_serial_number())
        made = made.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
        made = made.add_extension(x509.BasicConstraints(ca=i == 0, path_length=None), critical=True)
        made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        if i:
            where = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
            made = made.add_extension(where, critical=False)
            used = [x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH]
            made = made.add_extension(x509.ExtendedKeyUsage(used), critical=False)
        signed = made.sign(keys[0], hashes.SHA256())
        files.append(folder / f"{name}{i}.pem")
        files[-1].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    files.append(folder / f"{name}.key")
    none = serialization.NoEncryption()
    files[-1].write_bytes(keys[1].private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, none))
    ca, cert, key_file = map(str, files)
    return ca, cert, key_file


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, str]:
    return certificate(tmp_path, "etcd", "127.0.0.1")


@pytest.fixture
def server(files: tuple[str, str, str]) -> Iterator[etcd.Etcd]:
    with etcd.Etcd(tls=files) as found:
        yield found


def opened(place: EtcdPlace, options: EtcdConfig) -> EtcdJournal:
    lead = Lead(Gateway(place, options), place, "ipc:///test")
    assert not lead.attempt()
    return EtcdJournal(lead, place, "")


def test_certificates_admit_a_coordinator_and_prove_etcd(
    server: etcd.Etcd, files: tuple[str, str, str], tmp_path: Path
) -> None:
    ca, cert, key = files
    journal = opened(server.place(), EtcdConfig(ca=ca, cert=cert, key=key))
    journal.write(DECIDED)
    journal.close()
    ask = {"key": "YQ=="}, 0.5
    with pytest.raises(NotReached, match=r"(?i)certificate|EOF occurred"):
        Gateway(server.place(), EtcdConfig(ca=ca)).ask("kv/range", *ask)  # etcd does not know who this is
    strange, *_ = certificate(tmp_path, "other", "127.0.0.1")
    with pytest.raises(NotReached, match="certificate verify failed"):
        Gateway(server.place(), EtcdConfig(ca=strange, cert=cert, key=key)).ask("kv/range", *ask)
    plain = EtcdPlace(server.place().members, "/refitd", False)
    with pytest.raises(NotReached):
        Gateway(plain, EtcdConfig()).ask("kv/range", *ask)


def test_a_certificate_of_another_host_is_refused(tmp_path: Path) -> None:
    ca, cert, key = files = certificate(tmp_path, "far", "10.0.0.1")
    server = etcd.Etcd(tls=files)
    server.members[0].start()
    gateway = Gateway(server.place(), EtcdConfig(ca=ca, cert=cert, key=key))

    def refusal() -> str:
        with pytest.raises(NotReached) as refused:
            gateway.ask("kv/range", {"key": "YQ=="}, 0.5)
        return str(refused.value)

    try:
        eventually(lambda: "IP address mismatch" in refusal(), "etcd is refused for its address")
    finally:
        server.__exit__()


def test_users_with_a_role_for_the_prefix_alone_suffice(
    server: etcd.Etcd, files: tuple[str, str, str], tmp_path: Path
) -> None:
    ca, cert, key = files
    for command in (
        ("user", "add", "root:secret"),
        ("user", "grant-role", "root", "root"),
        ("user", "add", "refitd:pass word"),
        ("role", "add", "mine"),
        ("role", "grant-permission", "mine", "readwrite", "--prefix=true", "/refitd/a/"),
        ("user", "grant-role", "refitd", "mine"),
        ("auth", "enable"),
    ):
        server.ctl(*command)
    password = tmp_path / "password"
    password.write_text("pass word\n")
    with pytest.raises(CommitError, match=r"mode 644 lets others read the password; chmod 600"):
        password.chmod(0o644)
        Gateway(server.place("/refitd/a"), EtcdConfig(ca=ca, user="refitd", password_file=str(password)))
    password.chmod(0o600)
    known = EtcdConfig(ca=ca, cert=cert, key=key, user="refitd", password_file=str(password))
    journal = opened(server.place("/refitd/a"), known)
    journal.write(DECIDED)
    journal._lead.gateway._token = "run.out"  # as after some minutes
    journal.write(SwapRecord("s2", "policy", 5, "decided", "", "", 2.0))
    journal.guard()
    journal.close()
    again = opened(server.place("/refitd/a"), known)
    assert again.highest("policy") == 5
    again.close()
    with pytest.raises(Refused, match=r"permission denied; check etcd.user, etcd.password_file"):
        opened(server.place("/refitd/b"), known)
    password.write_text("wrong")
    with pytest.raises(Refused, match=r"authentication failed.*; check etcd.user"):
        opened(server.place("/refitd/a"), known)
