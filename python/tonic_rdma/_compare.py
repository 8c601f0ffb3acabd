"""`python -m tonic_rdma compare`: calls by this package beside calls by grpcio, in one run.

Each mode has two processes of its own, a server and a client, for the whole run. The parent lets one client work at
a time: in each round each mode measures each cell, so that a slow minute of the machine meets all modes.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import re
import select
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from tonic_rdma._compare_ends import CALL_LIMIT, SMALL, Cell, Failure, message_class

HELP = "measure calls beside grpcio's, with checked content"
DESCRIPTION = (
    "Measures calls of this package beside calls of grpcio: a message with a `bytes` field goes to a server in"
    " another process and comes back, or stays there. Prints one table."
)

KIB, MIB = 1 << 10, 1 << 20


class Mode(NamedTuple):
    client: str  # "grpcio", "grpcio-aio", "tonic-rdma", "tonic-rdma-aio"
    server: str
    beside: str  # the mode that the ratios are to
    what: str
    kind: str = "echo"  # of calls: see CALLS of `_compare_ends`


MODES = {
    "grpcio": Mode("grpcio", "grpcio", "grpcio", "grpcio at both ends, threads"),
    "grpcio-aio": Mode("grpcio-aio", "grpcio-aio", "grpcio-aio", "grpc.aio at both ends"),
    "tonic-rdma": Mode("tonic-rdma", "tonic-rdma", "grpcio", "this package at both ends, threads"),
    "tonic-rdma-aio": Mode("tonic-rdma-aio", "tonic-rdma-aio", "grpcio-aio", "tonic_rdma.aio at both ends"),
    "grpcio-to-tonic-rdma": Mode(
        "grpcio", "tonic-rdma", "grpcio", "a client of grpcio, a server of this package"
    ),
    "grpcio-one-way": Mode(
        "grpcio",
        "grpcio",
        "grpcio-one-way",
        "grpcio; the server checks the field and sends none back",
        "one-way",
    ),
    "reference": Mode(
        "tonic-rdma",
        "tonic-rdma",
        "grpcio-one-way",
        "this package; the client shares an array, and the server fetches it by a RemoteBuffer and checks it",
        "reference",
    ),
}


# The options.


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes",
        type=list_of(size),
        default=[64, SMALL, MIB, 16 * MIB],
        metavar="LIST",
        help="bytes of the field, with units (default: 64,64KiB,1MiB,16MiB)",
    )
    parser.add_argument(
        "--inflight",
        type=list_of(count),
        default=[1, 32],
        metavar="LIST",
        help="calls in flight, by threads or tasks (default: 1,32); messages above 64 KiB: 1 only",
    )
    parser.add_argument(
        "--duration",
        type=seconds,
        default=0.5,
        metavar="S",
        help="seconds a cell, in each round (default: 0.5)",
    )
    parser.add_argument(
        "--rounds",
        type=count,
        default=5,
        metavar="N",
        help="rounds; figures are medians over them (default: 5)",
    )
    parser.add_argument(
        "--modes",
        type=list_of(mode),
        default=list(MODES),
        metavar="LIST",
        help="; ".join(f"{name}: {mode.what}" for name, mode in MODES.items()) + " (default: all)",
    )
    parser.add_argument(
        "--rust",
        type=pathlib.Path,
        metavar="DIR",
        help="folder of this project's built examples: also measures calls from Python to its native-server,"
        " beside those of its native-client",
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the rows to FILE too")


def list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def values(text: str) -> list[Any]:
        return list(dict.fromkeys(parse(part.strip()) for part in text.split(",")))

    return values


def size(text: str) -> int:
    units = {"": 1, "b": 1, "kib": KIB, "mib": MIB}
    match = re.fullmatch(r"(\d+) ?([a-zA-Z]*)", text)
    value = int(match[1]) * units.get(match[2].lower(), 0) if match else 0
    # A message has to stay below 2 GiB, and an echo has eight copies of it in memory.
    if not 1 <= value <= 1024 * MIB:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: a number of bytes, KiB or MiB, from 1 to 1024MiB, such as 64KiB"
        )
    return value


def count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 1024")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.01 to 600")
    return value


def mode(text: str) -> str:
    if text not in MODES:
        raise argparse.ArgumentTypeError(f"there is no mode {text!r}; the modes are {', '.join(MODES)}")
    return text


# The parent.


def run(options: argparse.Namespace) -> int:
    try:
        message_class()
        report = measure(options)
    except Failure as failure:
        print(f"compare: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(text_of(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what is printed: `about`, lines; `rows`, one for each cell and mode; `rust`, if asked for."""
    cells = [Cell(size, n) for size in options.sizes for n in options.inflight if n == 1 or size <= SMALL]
    if not cells:
        raise Failure(
            "nothing to measure: messages above 64 KiB are measured with one call in flight only: --inflight 1"
        )
    results: dict[tuple[Cell, str], list[dict[str, float]]] = {
        (cell, name): [] for cell in cells for name in options.modes
    }
    floors: dict[Cell, list[dict[str, float]]] = {cell: [] for cell in cells}
    rust: list[dict[str, float]] = []
    children: list[Child] = []
    try:
        clients = {}
        for name in options.modes:
            clients[name] = start_pair(name, MODES[name], children)
        floor = Child("floor", "floor")
        children.append(floor)
        rust_client, rust_address = start_rust(options.rust, children) if options.rust else (None, "")
        for round_ in range(options.rounds):
            for cell in cells:
                # Each round begins with another mode.
                first = round_ % len(options.modes)
                for name in options.modes[first:] + options.modes[:first]:
                    results[cell, name].append(clients[name].ask(cell, options.duration))
                floors[cell].append(floor.ask(cell, options.duration / 4))
            if rust_client:
                rust.append(beside_rust(rust_client, rust_address, options))
        carried = {name: client.carried for name, client in clients.items()}
    finally:
        for child in children:
            child.end()
    report = {"about": about(options, carried), "rows": rows(cells, options.modes, results, floors)}
    if rust:
        report["rust"] = {key: statistics.median(each[key] for each in rust) for key in rust[0]}
    return report


def start_pair(name: str, mode: Mode, children: list[Child]) -> Child:
    """Starts both processes of a mode, and returns its client."""
    serving = Child(name, "serve", mode.server, mode.kind)
    children.append(serving)
    address, process = f"127.0.0.1:{serving.line()['port']}", str(serving.process.pid)
    calling = Child(name, "call", mode.client, address, process, mode.kind)
    children.append(calling)
    calling.carried = calling.line()["carried"]
    return calling


def start_rust(folder: pathlib.Path, children: list[Child]) -> tuple[Child, str]:
    """Starts native-server, and a client of this package to it. Returns the client, and the address."""
    for example in ("native-server", "native-client"):
        if not (folder / example).is_file():
            raise Failure(
                f"{folder} has no {example}:"
                " run `cargo build --release --example native-server --example native-client`"
            )
    server = Child("rust", command=[str(folder / "native-server"), "127.0.0.1:0"])
    children.append(server)
    address = server.words().removeprefix("listening on ")
    client = Child("tonic-rdma to rust", "call", "tonic-rdma", address, str(server.process.pid), "health")
    children.append(client)
    client.carried = client.line()["carried"]
    return client, address


def beside_rust(client: Child, address: str, options: argparse.Namespace) -> dict[str, float]:
    """Returns microseconds a call: of a client in Python, and of one in Rust, to the same server in Rust."""
    python = client.ask(Cell(0, 1), options.duration)
    calls = max(1000, int(python["calls"]))
    command = [options.rust / "native-client", address, str(calls)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    took = re.search(r"a call took ([\d.]+)(ns|µs|ms|s),", done.stdout)
    if done.returncode or not took:
        raise Failure(f"native-client failed: {(done.stderr or done.stdout).strip()}")
    unit = {"ns": 1e-3, "µs": 1.0, "ms": 1e3, "s": 1e6}[took[2]]
    return {"python_us": python["mean_us"], "rust_us": float(took[1]) * unit}


class Child:
    """A process of a measurement. It ends when its standard input ends, so it never outlives this process."""

    carried = ""

    def __init__(self, name: str, *arguments: str, command: list[str] | None = None) -> None:
        self.name = name
        command = command or [sys.executable, "-m", "tonic_rdma._compare_ends", *arguments]
        self.is_python = command[0] == sys.executable
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def words(self) -> str:
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], 2 * CALL_LIMIT)[0]:
            raise Failure(f"{self.name}: no answer in {2 * CALL_LIMIT:.0f} s")
        line = self.process.stdout.readline().decode()
        if not line:
            _, errors = self.process.communicate(timeout=10)
            last = errors.decode().strip().splitlines() or [f"exit status {self.process.returncode}"]
            raise Failure(f"{self.name}: a process of this mode has ended: {last[-1]}")
        return line.strip()

    def line(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.words())
        if "error" in answer:
            raise Failure(f"{self.name}: {answer['error']}")
        return answer

    def ask(self, cell: Cell, duration: float) -> dict[str, float]:
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps([*cell, duration]).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `line` says why
        return self.line()

    def end(self) -> None:
        try:
            if not self.is_python:
                self.process.terminate()
            self.process.communicate(timeout=10)
        except (subprocess.TimeoutExpired, ValueError):
            self.process.kill()
            self.process.wait()


def about(options: argparse.Namespace, carried: dict[str, str]) -> list[str]:
    import google.protobuf
    import grpc
    from google.protobuf.internal import api_implementation

    from tonic_rdma import _native

    versions = {
        "Python": platform.python_version(),
        "tonic_rdma": _native.__version__,
        "grpcio": grpc.__version__,
        "protobuf": f"{google.protobuf.__version__} ({api_implementation.Type()})",
    }
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    cores = len(os.sched_getaffinity(0))
    each = (
        f"{options.rounds} rounds of {options.duration:g} s for each mode and cell; figures are their medians"
    )
    return [f"{said}; {cores} cores", each] + [f"{name}: {how}" for name, how in carried.items() if how]


def rows(
    cells: list[Cell],
    modes: list[str],
    results: dict[tuple[Cell, str], list[dict[str, float]]],
    floors: dict[Cell, list[dict[str, float]]],
) -> list[dict[str, Any]]:
    """Times are microseconds."""
    found = []
    for cell in cells:
        floor = {key: median(floors[cell], key) for key in ("protobuf_us", "wake_us")}
        for name in modes:
            of_mode = {key: median(results[cell, name], key) for key in ("p50_us", "per_second", "cpu_us")}
            row: dict[str, Any] = {"mode": name, "size": cell.size, "in_flight": cell.in_flight, **of_mode}
            beside = results.get((cell, MODES[name].beside))
            # Of each round by itself, because the machine changes from round to round.
            pairs = list(zip(results[cell, name], beside or [], strict=False))
            row["latency_x"] = (
                statistics.median(other["p50_us"] / ours["p50_us"] for ours, other in pairs) if pairs else None
            )
            row["calls_x"] = (
                statistics.median(ours["per_second"] / other["per_second"] for ours, other in pairs)
                if pairs
                else None
            )
            in_turn, is_echo = cell.in_flight == 1, MODES[name].kind == "echo"
            row["protobuf_us"] = floor["protobuf_us"] if is_echo else None
            row["of_protobuf"] = floor["protobuf_us"] / row["p50_us"] if in_turn and is_echo else None
            row["wake_us"] = floor["wake_us"] if in_turn and MODES[name].client.endswith("-aio") else None
            found.append(row)
    return found


def median(rounds: list[dict[str, float]], key: str) -> float:
    return statistics.median(each[key] for each in rounds)


# The table.


def text_of(report: dict[str, Any]) -> str:
    header = [
        "mode",
        "size",
        "in flight",
        "p50",
        "calls/s",
        "CPU/call",
        "latency ×",
        "calls/s ×",
        "protobuf",
        "of protobuf",
        "wake-up",
    ]
    lines = [header]
    last = None
    for row in report["rows"]:
        cell = (row["size"], row["in_flight"])
        if last not in (None, cell):
            lines.append([""] * len(header))
        last = cell
        lines.append(
            [
                row["mode"],
                bytes_of(row["size"]),
                str(row["in_flight"]),
                time_of(row["p50_us"]),
                number_of(row["per_second"]),
                time_of(row["cpu_us"]),
                times(row["latency_x"]),
                times(row["calls_x"]),
                time_of(row["protobuf_us"]),
                times(row["of_protobuf"]),
                time_of(row["wake_us"]),
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def aligned(line: list[str]) -> str:
        cells = [
            f"{text:<{width}}" if not column else f"{text:>{width}}"
            for column, (text, width) in enumerate(zip(line, widths))
        ]
        return "  ".join(cells).rstrip()

    table = [aligned(lines[0]), "─" * (sum(widths) + 2 * (len(widths) - 1))] + [
        aligned(line) for line in lines[1:]
    ]
    notes = [
        "Each call echoes the field, but those of grpcio-one-way and reference leave it at the server; content: all"
        " as sent, and references without a copy besides the fetch. CPU/call: user and system time of both processes.",
        "latency ×, calls/s ×: how many times as good as grpcio (asyncio: as grpc.aio; reference: as grpcio-one-way)"
        " in the same cell and round.",
        "protobuf: its own time for both directions, in one process: make, serialise, parse, read the field.",
        "of protobuf: that time as a part of p50; 1 would be a transport that takes no time.",
        "wake-up: asyncio's own; a thread wakes the event loop by an eventfd, and the loop wakes the thread.",
    ]
    if rust := report.get("rust"):
        added = rust["python_us"] - rust["rust_us"]
        notes.append(
            f"A health check at a server in Rust takes {rust['python_us']:.1f} µs from Python, {rust['rust_us']:.1f} µs"
            f" from Rust (means, one in flight): Python adds {added:.1f} µs."
        )
    return "\n".join([*report["about"], "", *table, "", *notes])


def bytes_of(value: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if value >= unit and value % unit == 0:
            return f"{value // unit} {name}"
    return f"{value} B"


def time_of(microseconds: float | None) -> str:
    if microseconds is None:
        return "–"
    return f"{microseconds:.3g} µs" if microseconds < 999.5 else f"{microseconds / 1000:.3g} ms"


def number_of(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}" if value < 10_000 else f"{value / 1000:.1f} k"


def times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.3g}" if ratio < 99.5 else f"{ratio:.0f}"
