"""Authentication with an epoch's key: workers prove that they hold it, and authenticate everything that they send.

    meeting   each worker sends everybody a nonce, then each a proof: a MAC of the epoch, all labels, all nonces, and of
              who proves it to whom
    session   a key derived from the epoch's and from the nonces, so that no two services have the same
    record    a small agreement (peers.py); ends with a MAC of its number, of who says it to whom, and of what about
    stream    messages (packed.py); ends with a MAC of all their bytes, and of what the stream is about

All MACs are HMAC-SHA256, cut to 16 bytes. A stream's bytes enter as their GMAC under a secret key: a universal hash, of
which nobody sees a value, so that all streams of a session may use one nonce. It depends on every byte's position, not
on how the bytes are cut. Whoever lacks the key guesses a MAC once in 2^128 / blocks of 16 bytes.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import TYPE_CHECKING, Any

from refitd.errors import TransportError

if TYPE_CHECKING:
    import torch

    from refitd.copy_services.epoch import Epoch
    from refitd.copy_services.peers import Deadline, Peers

KEY_BYTES = 32
NONCE_BYTES = 32
MAC_BYTES = 16
_LENGTH = struct.Struct("<q")
_ENDS = struct.Struct("<qq")


class Authenticator:
    """Makes and checks MACs with one key."""

    def __init__(self, key: bytes) -> None:
        """Use a key of KEY_BYTES.

        Raises:
            TransportError: it has another length.
        """
        if len(key) != KEY_BYTES:
            raise TransportError(
                f"an epoch's key has {len(key)} bytes, expected {KEY_BYTES}; use one version of refitd"
            )
        self._key = key
        self._stream_key = _hmac(key, b"stream key")
        _gmac(self._stream_key)  # loads the library now, not in the first run

    def mac(self, purpose: bytes, *parts: bytes) -> bytes:
        """Return the MAC of some parts, MAC_BYTES long. MACs for different purposes never stand for each other."""
        return _hmac(self._key, purpose, *parts)[:MAC_BYTES]

    def is_mac(self, found: bytes, purpose: bytes, *parts: bytes) -> bool:
        """Whether `found` is the MAC of these parts."""
        return hmac.compare_digest(found, self.mac(purpose, *parts))

    def stream(self, about: bytes) -> StreamMac:
        """Return the MAC of a stream that is about to begin, and of what it is `about`."""
        return StreamMac(self, self._stream_key, about)

    def random_bytes(self, purpose: bytes, nbytes: int) -> bytes:
        """Return bytes that are unpredictable without the key."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        cipher = Cipher(algorithms.AES(_hmac(self._key, b"random bytes", purpose)), modes.CTR(bytes(16)))
        return cipher.encryptor().update(bytes(nbytes))


class StreamMac:
    """The MAC of buffers in the order given: a Digest (packed.py)."""

    def __init__(self, authenticator: Authenticator, key: bytes, about: bytes) -> None:
        self._authenticator, self._about = authenticator, about
        self._gmac = _gmac(key)
        self._length, self._made = 0, b""

    def update(self, buffer: torch.Tensor, /) -> None:
        """Add a uint8 buffer in main memory."""
        self._gmac.authenticate_additional_data(buffer.numpy())
        self._length += buffer.numel()

    def digest(self) -> bytes:
        """Return the MAC, MAC_BYTES long. Nothing may be added afterwards."""
        if not self._made:
            self._gmac.finalize()
            length = _LENGTH.pack(self._length)
            self._made = self._authenticator.mac(b"stream", self._about, length, self._gmac.tag)
        return self._made


def prove(peers: Peers, epoch: Epoch, deadline: Deadline) -> Authenticator:
    """Prove over the connections of a group that this worker holds the epoch's key, and check that the others do.

    Collective. Return what authenticates everything that these connections carry from now on.

    Raises:
        DeadlineExceeded, PeerLost: a worker did not answer.
        TransportError: who came as a worker does not hold the key; has its label.
    """
    held = Authenticator(epoch.key)
    nonces = peers.all_gather(secrets.token_bytes(NONCE_BYTES), deadline, "proving who is there")
    meeting = [text.encode() for text in (epoch.id, *epoch.labels)] + nonces

    def proof(prover: int, to: int) -> bytes:
        return held.mac(b"proof", _ENDS.pack(prover, to), *meeting)

    proofs = peers.all_to_all([proof(peers.index, to) for to in range(len(peers))], deadline, "proving who is there")
    for position, found in enumerate(proofs):
        if not hmac.compare_digest(found, proof(position, peers.index)):
            raise TransportError(
                f"who came as {epoch.labels[position]} does not hold the key of epoch {epoch.id}, or its proof was "
                f"altered on the way to {epoch.labels[peers.index]}"
            )
    return Authenticator(_hmac(epoch.key, b"session", *meeting))


def _gmac(key: bytes) -> Any:
    """Return an AES-GCM encryptor that encrypts nothing, and authenticates what it is given."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES(key), modes.GCM(bytes(12))).encryptor()


def _hmac(key: bytes, purpose: bytes, *parts: bytes) -> bytes:
    """Return an HMAC-SHA256, 32 bytes. Lengths are part of it, so that no part can end elsewhere."""
    made = hmac.new(key, digestmod="sha256")
    for part in (purpose, *parts):
        made.update(_LENGTH.pack(len(part)))
        made.update(part)
    return made.digest()
