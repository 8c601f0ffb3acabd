"""What holds for whole processes: forks, Ctrl-C, and the end of the interpreter. Each test runs a program of its own."""

import select
import signal
import subprocess
import sys
import textwrap

import pytest

SETUP = """
import os, signal, sys, threading, time
import grpc, tonic_rdma, echo_pb2, echo_pb2_grpc, echo_service
server, port = echo_service.serve(tonic_rdma)
channel = tonic_rdma.insecure_channel(f"127.0.0.1:{port}")
stub = echo_pb2_grpc.EchoStub(channel)
"""


def program(text, setup=SETUP):
    return [sys.executable, "-X", "faulthandler", "-c", setup + textwrap.dedent(text)]


def run(text, setup=SETUP):
    """What a program prints. It must end by itself, with status 0 and without a word on stderr."""
    done = subprocess.run(program(text, setup), capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def interrupted(text, setup=SETUP):
    """What a program prints that gets Ctrl-C after its first line. It must end by itself, with status 0."""
    process = subprocess.Popen(program(text, setup), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n", process.communicate()
        # Python ignores the exception of a signal that comes within some of its own callbacks, such as those of
        # imports. A user presses the keys again.
        for _ in range(20):
            process.send_signal(signal.SIGINT)
            if select.select([process.stdout], [], [], 2)[0]:
                break
        output, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, (process.returncode, errors)
    return output


@pytest.mark.parametrize(
    "use",
    [
        "stub.Unary(echo_pb2.Request(), timeout=5)",
        "list(stub.ServerStream(echo_pb2.Request(), timeout=5))",
        "tonic_rdma.insecure_channel('localhost:1').unary_unary('/a/b')(b'', timeout=5)",
        "tonic_rdma.server().start()",
    ],
)
def test_a_fork_after_use_gets_a_clear_error(use):
    output = run(f"""
        stub.Unary(echo_pb2.Request())
        child = os.fork()
        if child == 0:
            try:
                {use}
            except RuntimeError as error:
                print(error, flush=True)
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        stub.Unary(echo_pb2.Request())
        server.stop(None).wait()
    """)
    assert "before this process was forked" in output and output.endswith("0\n"), output


def test_a_child_that_does_not_use_the_package_ends_well():
    assert run("""
        response = stub.ServerStream(echo_pb2.Request())
        child = os.fork()
        if child == 0:
            del stub, channel, server, response
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        server.stop(None).wait()
    """) == "7\n"


def test_a_fork_before_use_works():
    setup = "import os, tonic_rdma"
    assert run("""
        child = os.fork()
        import echo_pb2, echo_pb2_grpc, echo_service
        server, port = echo_service.serve(tonic_rdma)
        stub = echo_pb2_grpc.EchoStub(tonic_rdma.insecure_channel(f"127.0.0.1:{port}"))
        assert stub.Unary(echo_pb2.Request(payload=b"x")).payload == b"x"
        server.stop(None).wait()
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """, setup) == "0\n"


# A server that takes connections and calls, and never answers.
SILENT = """
import grpc, tonic_rdma
server = tonic_rdma.server()
port = server.add_insecure_port("127.0.0.1:0")
import threading
never = threading.Event()
hold = grpc.unary_unary_rpc_method_handler(lambda request, context: never.wait(40) and b"")
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a", {"b": hold}),))
server.start()
channel = tonic_rdma.insecure_channel(f"127.0.0.1:{port}")
"""


@pytest.mark.parametrize(
    "wait",
    [
        "server.wait_for_termination()",
        "grpc.channel_ready_future(tonic_rdma.insecure_channel('127.0.0.1:1')).result()",
    ],
)
def test_ctrl_c_ends_waits_without_a_call(wait):
    output = interrupted(
        f"""
        try:
            print("ready", flush=True)
            {wait}
        except KeyboardInterrupt:
            print("interrupted")
        never.set()
        server.stop(None).wait()
        """,
        SILENT,
    )
    assert output == "interrupted\n"


def test_ctrl_c_ends_an_event_loop():
    output = interrupted(
        """
        import asyncio
        async def main():
            channel = tonic_rdma.aio.insecure_channel(f"127.0.0.1:{port}")
            print("ready", flush=True)
            await channel.unary_unary("/a/b")(b"")
        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            print("interrupted")
        never.set()
        server.stop(None).wait()
        """,
        SILENT,
    )
    assert output == "interrupted\n"


def test_the_interpreter_ends_while_a_loop_has_calls():
    assert run("""
        import asyncio
        async def main():
            channel = tonic_rdma.aio.insecure_channel(f"127.0.0.1:{port}")
            calls = [channel.unary_unary("/a/b")(b"") for _ in range(10)]
            await asyncio.sleep(0.1)
            print("end")
        asyncio.run(main())
        never.set()
    """, SILENT) == "end\n"


@pytest.mark.parametrize("seconds", [0, 0.01, 0.3])
def test_the_interpreter_ends_while_futures_wait_for_channels(seconds):
    assert run(f"""
        import time
        for _ in range(20):
            grpc.channel_ready_future(tonic_rdma.insecure_channel("127.0.0.1:1"))
        time.sleep({seconds})
        print("end")
        never.set()
        server.stop(None).wait()
    """, SILENT) == "end\n"
