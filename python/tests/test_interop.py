"""The interop cases between grpcio and tonic_rdma, and between two processes with tonic_rdma.

`interop/matrix` runs them between tonic_rdma and the peers in Rust.
"""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "interop/stock/python"
TLS_CASES = ["empty_unary", "large_unary", "ping_pong", "custom_metadata", "checked_unary"]
# grpcio's API does not show a server whether a message came compressed, so a server can't refuse it.
UNSEEN = "client_compressed_unary"


def started(side, implementation, *arguments):
    command = [sys.executable, str(PROGRAM), side, f"--implementation={implementation}", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("client", ["grpcio", "tonic_rdma"])
@pytest.mark.parametrize("server", ["grpcio", "tonic_rdma"])
def test_interop(client, server, secure, tls, tmp_path):
    if client == server == "grpcio":
        pytest.skip("nothing of ours")
    cases = subprocess.check_output([sys.executable, PROGRAM, "client", "--list"], text=True).split()
    wanted = TLS_CASES if secure else [it for it in cases if it != UNSEEN]
    server_flags, client_flags = ["--port=0"], ["--test_case=" + ",".join(wanted)]
    if secure:
        for name in ("ca", "server_key", "server", "client_key", "client"):
            (tmp_path / name).write_bytes(getattr(tls, name))
        common = ["--use_tls=true"]
        server_flags += [*common, f"--cert_file={tmp_path}/server", f"--key_file={tmp_path}/server_key"]
        server_flags += [f"--client_ca_file={tmp_path}/ca"]
        client_flags += [*common, "--use_test_ca=true", f"--ca_file={tmp_path}/ca"]
        client_flags += [f"--client_cert_file={tmp_path}/client", f"--client_key_file={tmp_path}/client_key"]
    if client == "tonic_rdma":
        # TLS has no native calls.
        found = "tcp" if server == "grpcio" else "rdma" if secure else "native"
        client_flags.append(f"--require={found}")
    with started("server", server, *server_flags) as serving:
        try:
            port = serving.stdout.readline().strip()
            with started("client", client, f"--server_port={port}", *client_flags) as calling:
                output, _ = calling.communicate()
        finally:
            serving.kill()
    assert calling.returncode == 0, output
    assert [line for line in output.splitlines() if line.endswith(" ok")] == [f"{it} ok" for it in wanted]
