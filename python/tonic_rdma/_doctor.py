"""`python -m tonic_rdma doctor`: what this machine and this environment have, what is missing, and why."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import select
import subprocess
import sys
import time
from typing import Any, NamedTuple

HELP = "say what this machine has, and what carries a call"
DESCRIPTION = (
    "Lists each capability, whether it is present, and why; then makes a call to a process of its own. Ends with"
    " status 1 if something is missing that the package needs."
)

OLDEST_GRPCIO = (1, 66)
LIMIT = 30.0  # seconds, for the call and for each step before it


class Row(NamedTuple):
    what: str
    present: bool
    why: str
    needed: bool = False

    @property
    def state(self) -> str:
        return "yes" if self.present else "MISSING" if self.needed else "no"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    rows = found()
    if options.json:
        print(json.dumps([{"what": row.what, "state": row.state, "why": row.why} for row in rows], indent=1))
    else:
        width = max(len(row.what) for row in rows)
        print("\n".join(f"{row.what:<{width}}  {row.state:<7}  {row.why}" for row in rows))
    missing = [row.what for row in rows if row.state == "MISSING"]
    if missing:
        print(f"doctor: missing: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


def found() -> list[Row]:
    system = platform.system() == "Linux" and sys.maxsize > 1 << 32
    rows = [
        Row(
            "Linux, 64 bits",
            system,
            f"{platform.system()} {platform.release()}, {platform.machine()}",
            needed=True,
        ),
        Row(
            "Python",
            True,
            f"{platform.python_version()}, {platform.python_implementation()}; {os.cpu_count()} processors",
        ),
        grpcio(),
        protobuf(),
    ]
    try:
        from tonic_rdma import _native
    except ImportError as error:
        return [*rows, Row("tonic_rdma", False, f"its native part can't be loaded: {error}", needed=True)]
    rows.append(Row("tonic_rdma", True, f"version {_native.__version__}"))
    rows += [Row(what, present, why) for what, present, why in _native.capabilities()]
    return [*rows, *a_call()]


def grpcio() -> Row:
    oldest = ".".join(map(str, OLDEST_GRPCIO))
    try:
        import grpc
    except ImportError as error:
        return Row(
            "grpcio", False, f"{error}; its types are needed: pip install 'grpcio>={oldest}'", needed=True
        )
    version = tuple(int(part) for part in grpc.__version__.split(".")[:2])
    old = f"; {oldest} or later is needed" if version < OLDEST_GRPCIO else ""
    return Row("grpcio", not old, f"version {grpc.__version__}{old}", needed=True)


def protobuf() -> Row:
    try:
        version = importlib.import_module("google.protobuf").__version__
        kind = importlib.import_module("google.protobuf.internal.api_implementation").Type()
    except ImportError as error:
        return Row("protobuf", False, f"{error}; generated messages need it, and so does compare")
    slow = "" if kind == "upb" else ", which is slower than upb"
    return Row("protobuf", True, f"version {version}, {kind}{slow}")


def a_call() -> list[Row]:
    """Makes calls to a server in a child process."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tonic_rdma._doctor"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        import tonic_rdma

        assert child.stdout
        said = child.stdout.readline() if select.select([child.stdout], [], [], LIMIT)[0] else b""
        if not said.strip().isdigit():
            child.kill()
            errors = child.communicate()[1].decode().strip().splitlines() or [
                f"it said nothing in {LIMIT:.0f} s"
            ]
            return [Row("a call", False, f"the process that serves it failed: {errors[-1]}", needed=True)]
        with tonic_rdma.insecure_channel(f"127.0.0.1:{int(said)}") as channel:
            call = channel.unary_unary("/tonic_rdma.doctor.Doctor/Echo")
            times = []
            for index in range(1000):
                began = time.perf_counter()
                sent = b"%d" % index
                if call(sent, timeout=LIMIT) != sent:
                    return [Row("a call", False, "its reply was not what was sent", needed=True)]
                times.append(time.perf_counter() - began)
            connection, verdict, reason = channel.connection, channel.verdict, channel.reason
        median = sorted(times)[len(times) // 2]
        how = "native calls" if getattr(connection, "native", False) else "HTTP/2"
        return [
            Row(
                "a call",
                True,
                f"to a process of this host: {how}, {median * 1e6:.1f} µs (median of 1000)",
                needed=True,
            ),
            Row("RDMA for it", verdict == "rdma", f"over {verdict}, because {reason}"),
        ]
    except Exception as error:  # noqa: BLE001, whatever is wrong here is what the user asked for
        return [Row("a call", False, f"{type(error).__name__}: {error}", needed=True)]
    finally:
        child.kill()
        child.communicate()


def serve() -> None:
    """Prints a port, and echoes bytes at it until the standard input ends."""
    import grpc

    import tonic_rdma

    server = tonic_rdma.server()
    handlers: dict[str, Any] = {"Echo": grpc.unary_unary_rpc_method_handler(lambda request, context: request)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("tonic_rdma.doctor.Doctor", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve()
