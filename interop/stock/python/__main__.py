"""A gRPC peer on grpcio (C-core) or on tonic_rdma, with the flags of gRPC's official interop programs (see interop/README.md).

python interop/stock/python server --port=PORT
python interop/stock/python client --server_host=HOST --server_port=PORT --test_case=NAME[,NAME...]
python interop/stock/python client --list

--implementation=tonic_rdma lets this project's package make the channels or the server; --require=tcp|rdma|native fails a case whose
connection is another.
"""

import argparse
import concurrent.futures
import importlib
import sys

import cases
import service
import tls

LIMIT_S = 30


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    programs = parser.add_subparsers(dest="program", required=True)
    server = programs.add_parser("server")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=0)
    tls.add_flags(server, "server")
    client = programs.add_parser("client")
    client.add_argument("--server_host", default="127.0.0.1")
    client.add_argument("--server_port", type=int)
    client.add_argument("--test_case", default="")
    client.add_argument("--list", action="store_true", help="the cases, one a line")
    for flag, default in [("iterations", 100), ("num_threads", 4), ("max_failures", 0)]:
        client.add_argument(f"--soak_{flag}", type=int, default=default)
    client.add_argument("--require", choices=["tcp", "rdma", "native"])
    tls.add_flags(client, "client")
    for program in (server, client):
        program.add_argument("--implementation", type=implementation, default="grpcio")
    arguments = parser.parse_args()
    if arguments.program == "server":
        service.serve(arguments, tls.server(arguments))
    elif arguments.list:
        print("\n".join(cases.TABLE))
    else:
        sys.exit(run(arguments))


def implementation(name):
    """The module with `insecure_channel`, `server` and so on."""
    return importlib.import_module({"grpcio": "grpc", "tonic_rdma": "tonic_rdma"}[name])


def run(arguments):
    failed = 0
    arguments.credentials = tls.client(arguments)
    for name in filter(None, arguments.test_case.split(",")):
        outcome = one(name, arguments)
        print(name, outcome, flush=True)
        failed |= outcome.startswith("failed")
    return failed


def one(name, arguments):
    case = cases.TABLE.get(name)
    if case is None:
        return f"skipped: {cases.CANNOT.get(name, 'this peer does not have the case')}"
    # A call that hangs blocks its thread, but not the end of the program: see main's exit.
    worker = concurrent.futures.ThreadPoolExecutor(1)
    try:
        worker.submit(case, arguments).result(LIMIT_S)
        return "ok"
    except concurrent.futures.TimeoutError:
        return f"failed: not done after {LIMIT_S} s"
    except Exception as error:
        return f"failed: {' '.join(f'{type(error).__name__}: {error}'.split())[:600]}"
    finally:
        worker.shutdown(wait=False)


if __name__ == "__main__":
    main()
