"""What a peer's certificate, which TLS has checked, says of it: for `ServicerContext.auth_context`."""

import base64
import ipaddress
from collections.abc import Iterator

_COMMON_NAME = b"\x55\x04\x03"  # 2.5.4.3
_ALTERNATIVE_NAMES = b"\x55\x1d\x11"  # 2.5.29.17
_EXTENSIONS = 0xA3
_KINDS = {0x81: "peer_email", 0x82: "peer_dns", 0x86: "peer_uri", 0x87: "peer_ip"}


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """The (tag, content) of the DER elements that `der` is made of."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:
            count = length & 0x7F
            length, at = int.from_bytes(der[at : at + count], "big"), at + count
        yield tag, der[at : at + length]
        at += length


def _address(packed: bytes) -> bytes:
    return str(ipaddress.ip_address(packed)).encode()


def auth_properties(pem: bytes) -> dict[str, list[bytes]]:
    """The properties, under grpc's names, of a certificate in PEM."""
    body = b"".join(line for line in pem.splitlines() if not line.startswith(b"-----"))
    [(_, certificate)] = _elements(base64.b64decode(body))
    fields = list(_elements(next(_elements(certificate))[1]))
    if fields[0][0] == 0xA0:  # the version, absent in version 1
        del fields[0]
    subject = fields[4][1]  # after serial number, algorithm, issuer, validity
    found: dict[str, list[bytes]] = {}
    for _, names in _elements(subject):
        for _, name in _elements(names):
            (_, kind), (_, value) = _elements(name)
            if kind == _COMMON_NAME:
                found.setdefault("x509_common_name", []).append(value)
    found["x509_pem_cert"] = [pem]
    for _, content in (field for field in fields if field[0] == _EXTENSIONS):
        for _, extension in _elements(next(_elements(content))[1]):
            (_, kind), *_, (_, value) = _elements(extension)
            if kind == _ALTERNATIVE_NAMES:
                for tag, name in _elements(next(_elements(value))[1]):
                    if tag in _KINDS:
                        text = _address(name) if tag == 0x87 else name
                        found.setdefault("x509_subject_alternative_name", []).append(text)
                        found.setdefault(_KINDS[tag], []).append(text)
    return found
