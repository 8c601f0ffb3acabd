"""TLS: the official programs' flags, those that name files, and credentials from them."""

import ssl

import grpc

FILES = {
    "client": ["ca_file", "client_cert_file", "client_key_file"],
    "server": ["cert_file", "key_file", "client_ca_file"],
}


def add_flags(parser, side):
    parser.add_argument("--use_tls", type=boolean, nargs="?", const=True, default=False)
    if side == "client":
        parser.add_argument("--use_test_ca", type=boolean, nargs="?", const=True, default=False)
        parser.add_argument("--server_host_override")
    for name in FILES[side]:
        parser.add_argument(f"--{name}")


def boolean(text):
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def client(arguments):
    """Credentials, or None without TLS."""
    if not arguments.use_tls:
        return None
    if arguments.use_test_ca and not arguments.ca_file:
        raise SystemExit("--use_test_ca needs --ca_file")
    check_files(arguments, *FILES["client"])
    return grpc.ssl_channel_credentials(
        root_certificates=content(arguments, "ca_file") if arguments.use_test_ca else None,
        private_key=content(arguments, "client_key_file"),
        certificate_chain=content(arguments, "client_cert_file"),
    )


def server(arguments):
    """Credentials, or None without TLS. With --client_ca_file each client has to show a certificate."""
    if not arguments.use_tls:
        return None
    if not (arguments.cert_file and arguments.key_file):
        raise SystemExit("--use_tls needs --cert_file and --key_file")
    check_files(arguments, "client_ca_file", "cert_file", "key_file")
    pair = (content(arguments, "key_file"), content(arguments, "cert_file"))
    authority = content(arguments, "client_ca_file")
    credentials = arguments.implementation.ssl_server_credentials
    return credentials([pair], root_certificates=authority, require_client_auth=authority is not None)


def check_files(arguments, authority, certificate, key):
    """Checks the files by Python's own TLS, because C-core only logs a wrong file and continues."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    named = {name: getattr(arguments, name) for name in (authority, certificate, key)}
    checks = [
        ([authority], lambda: context.load_verify_locations(named[authority])),
        ([certificate, key], lambda: context.load_cert_chain(named[certificate], named[key])),
    ]
    for names, check in checks:
        if any(content(arguments, name) is not None for name in names):
            try:
                check()
            except (OSError, TypeError) as error:
                raise SystemExit(f"{' '.join(f'--{name}={named[name]}' for name in names)}: {error}") from error


def content(arguments, name):
    path = getattr(arguments, name)
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise SystemExit(f"--{name}: {path}: {error.strerror}") from error
