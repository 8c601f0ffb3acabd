"""Runs the three programs of benches/compare-mpi in turns, and prints the table and the goals."""

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

KIB, MIB = 1 << 10, 1 << 20
SIZES = "8,64,512,1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
QUICK = "8,1KiB,64KiB,1MiB,16MiB"
LIMIT = 600  # seconds for one program, so that a hang ends the run
PROGRAMS = ("ours", "mpi", "gloo")


def parse_size(text):
    match = re.fullmatch(r"(\d+)(?:(B|KiB|MiB))?", text)
    size = int(match[1]) * {"KiB": KIB, "MiB": MIB}.get(match[2], 1) if match else None
    if size is None or size % 4 or not 4 <= size <= 1 << 30:
        raise argparse.ArgumentTypeError(f"bad size {text!r}; accepted: multiples of 4 up to 1024MiB, such as 8, 4KiB, 1MiB")
    return size


def list_of(item):
    return lambda text: [item(part.strip()) for part in text.split(",")]


def between(least, most):
    def parse(text):
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"bad number {text!r}; accepted: {least} to {most}")
        return int(text)

    return parse


def name(size):
    for unit, text in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {text}"
    return f"{size} B"


def micros(value):
    if value is None:
        return "–"
    digits = lambda number: f"{number:.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"
    return f"{digits(value / 1000)} ms" if value >= 1000 else f"{digits(value)} µs"


def cells(sizes, ranks, cores, quick):
    """Returns bytes, iterations and warm-ups of each size. They are the same for all programs."""
    shared = ranks > len(cores)
    found = []
    for size in sizes:
        iterations = 1000 if size <= 4 * KIB else 300 if size <= 256 * KIB else max(8, 128 * MIB // size)
        iterations = min(iterations, 100) if shared else iterations
        iterations = max(5, iterations // 4) if quick else iterations
        # Each buffer is used once before. There are as many as in mpi.c.
        buffers = max(2, min(16, 64 * MIB // size))
        found.append((size, iterations, max(buffers, iterations // 8)))
    return found


class Run:
    """The processes of one program. They end with the `with` block."""

    def __init__(self, commands):
        self.processes = []
        self.commands = commands

    def __enter__(self):
        for command, environment in self.commands:
            self.processes.append(
                subprocess.Popen(
                    command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, start_new_session=True
                )
            )
        return self

    def __exit__(self, *_):
        for process in self.processes:
            # The group has ended if all went well.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def output(self, what):
        try:
            texts = [process.communicate(timeout=LIMIT)[0] for process in self.processes]
        except subprocess.TimeoutExpired:
            sys.exit(f"compare-mpi: {what} did not end within {LIMIT} s")
        for process in self.processes:
            # Our command ends with status 1 if a result was wrong. Then its rows say so.
            if process.returncode != 0 and "tonic-rdma-allreduce" not in str(process.args[0]):
                sys.exit(f"compare-mpi: {what} ended with status {process.returncode}")
        return texts


def lines(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def run_mpi(options, ranks, work, cores):
    pinned = ranks <= len(cores)
    command = ["mpirun", "-n", str(ranks), "--bind-to", "none", "--oversubscribe"]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    # --oversubscribe makes Open MPI yield; ranks with a core of their own shall not.
    command += ["--mca", "mpi_yield_when_idle", "0" if pinned else "1"]
    command += [options.mpi, "--cells", ",".join(":".join(map(str, cell)) for cell in work)]
    if pinned:
        command += ["--cores", ",".join(map(str, cores))]
    with Run([(command, {})]) as run:
        return {(row["bytes"], row["place"]): row for row in lines(run.output(f"Open MPI with {ranks} ranks")[0])}


def run_gloo(_, ranks, work, cores):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(Path(__file__).with_name("gloo.py"))
    command = ["/usr/bin/python3", program, "--cells", ",".join(":".join(map(str, cell)) for cell in work)]
    if ranks <= len(cores):
        command += ["--cores", ",".join(map(str, cores))]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    with Run([(command, shared | {"RANK": str(rank)}) for rank in range(ranks)]) as run:
        return {(row["bytes"], row["place"]): row for row in lines(run.output(f"gloo with {ranks} ranks")[0])}


def run_ours(options, ranks, work, cores):
    places = {"registered": "in", "registered-out-of-place": "out", "slice": "slice"}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "rows.json")
        each = lambda index: ",".join(str(cell[index]) for cell in work)
        command = [options.ours, "--ranks", str(ranks), "--sizes", each(0), "--iterations", each(1), "--warm-up", each(2)]
        command += ["--operand", ",".join(places), "--pin", "yes" if ranks <= len(cores) else "no", "--json", str(path)]
        with Run([(command, {})]) as run:
            run.output(f"tonic-rdma-allreduce with {ranks} ranks")
        if not path.exists():
            sys.exit(f"compare-mpi: tonic-rdma-allreduce with {ranks} ranks wrote no rows")
        return {(row["bytes"], places[row["operand"]]): row for row in json.loads(path.read_text())["rows"]}


def main():
    parser = argparse.ArgumentParser(prog="compare-mpi", description="Compares allreduce with Open MPI and gloo.")
    parser.add_argument("--rounds", type=between(1, 99), help="rounds of which the medians are taken (5, with --quick 1)")
    parser.add_argument("--ranks", type=list_of(between(2, 64)), default=[2, 4, 8], help="numbers of ranks (2,4,8)")
    parser.add_argument("--sizes", type=list_of(parse_size), help=f"bytes of the f32 tensors ({SIZES})")
    parser.add_argument("--json", metavar="FILE", help="write the rows and goals to this file")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, fewer iterations, one round")
    parser.add_argument("--ours", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--mpi", required=True, help=argparse.SUPPRESS)
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 5)
    sizes = options.sizes or list_of(parse_size)(QUICK if options.quick else SIZES)
    cores = sorted(os.sched_getaffinity(0))
    runners = {"ours": run_ours, "mpi": run_mpi, "gloo": run_gloo}

    figures, errors = {}, 0
    for turn in range(rounds):
        for ranks in options.ranks:
            work = cells(sizes, ranks, cores, options.quick)
            for index in range(len(PROGRAMS)):
                program = PROGRAMS[(index + turn) % len(PROGRAMS)]
                print(f"round {turn + 1} of {rounds}: {ranks} ranks, {program}", file=sys.stderr)
                for (size, place), row in runners[program](options, ranks, work, cores).items():
                    figures.setdefault((ranks, size, program, place), []).append(row["p50_us"])
                    errors += row["errors"]

    medians = {key: statistics.median(values) for key, values in figures.items()}
    rows = [row_of(medians, ranks, size) for ranks in options.ranks for size in sizes]
    goals = check(rows, errors)
    show(rows, goals, rounds, cores)
    if options.json:
        each_round = [
            {"ranks": ranks, "bytes": size, "program": program, "place": place, "p50_us": values}
            for (ranks, size, program, place), values in figures.items()
        ]
        content = {"rounds": rounds, "cores": len(cores), "errors": errors, "rows": rows, "goals": goals, "each_round": each_round}
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(goal["reached"] for goal in goals) else 1


def row_of(medians, ranks, size):
    """Returns the medians of a cell in µs, and how many times as fast ours is."""
    get = lambda program, place: medians.get((ranks, size, program, place))
    times = lambda theirs, ours: theirs / ours if theirs and ours else None
    row = {"ranks": ranks, "bytes": size}
    for place in ("in", "out", "slice"):
        row[f"ours_{place}_us"] = get("ours", place)
    row |= {"mpi_in_us": get("mpi", "in"), "mpi_out_us": get("mpi", "out"), "gloo_us": get("gloo", "in")}
    row["over_mpi_in"] = times(row["mpi_in_us"], row["ours_in_us"])
    row["over_mpi_out"] = times(row["mpi_out_us"], row["ours_out_us"])
    row["slice_over_mpi"] = times(row["mpi_in_us"], row["ours_slice_us"])
    row["over_gloo"] = times(row["gloo_us"], row["ours_in_us"])
    return row


def check(rows, errors):
    """Returns the goals, each with the worst cell. A goal without a measured cell is left out."""
    few = lambda row: row["ranks"] == 2
    mpi, gloo = ("over_mpi_in", "over_mpi_out"), ("over_gloo",)
    wanted = [
        ("2 ranks, 8 B to 4 KiB: latency ≤ 1.0 × Open MPI's", mpi, 1.0, lambda row: few(row) and 8 <= row["bytes"] <= 4 * KIB),
        ("2 ranks, 1 to 64 MiB: bandwidth ≥ 1.5 × Open MPI's", mpi, 1.5, lambda row: few(row) and MIB <= row["bytes"] <= 64 * MIB),
        ("4 and 8 ranks: no slower than Open MPI", mpi, 1.0, lambda row: row["ranks"] in (4, 8)),
        ("everywhere: ≥ 5 × gloo", gloo, 5.0, lambda row: True),
    ]
    goals = [{"goal": "every result right", "reached": errors == 0, "worst": f"{errors} wrong elements"}]
    for text, columns, least, applies in wanted:
        found = [(row[column], row, column) for row in rows if applies(row) for column in columns if row[column] is not None]
        if not found:
            continue
        ratio, row, column = min(found, key=lambda it: it[0])
        missed = sum(value < least for value, _, _ in found)
        place = {"over_mpi_in": ", in place", "over_mpi_out": ", out of place"}.get(column, "")
        worst = f"{ratio:.2f} × as fast with {row['ranks']} ranks at {name(row['bytes'])}{place}; {missed} of {len(found)} cells miss it"
        goals.append({"goal": text, "reached": ratio >= least, "worst": worst})
    return goals


def show(rows, goals, rounds, cores):
    times = lambda value: "–" if value is None else f"{value:.2f}"
    print("| ranks | size | in place: ours | Open MPI | × | out of place: ours | Open MPI | × | any slice in place: ours | × Open MPI | gloo | ours in place × gloo |")
    print("|" + "---|" * 12)
    for row in rows:
        texts = [str(row["ranks"]), name(row["bytes"])]
        texts += [micros(row["ours_in_us"]), micros(row["mpi_in_us"]), times(row["over_mpi_in"])]
        texts += [micros(row["ours_out_us"]), micros(row["mpi_out_us"]), times(row["over_mpi_out"])]
        texts += [micros(row["ours_slice_us"]), times(row["slice_over_mpi"]), micros(row["gloo_us"]), times(row["over_gloo"])]
        print("| " + " | ".join(texts) + " |")
    version = lambda *command: re.search(r"\d[\w.]*", subprocess.run(command, capture_output=True, text=True, check=True).stdout)[0]
    torch = version("/usr/bin/python3", "-c", "import torch; print(torch.__version__)")
    print(f"\n×: how many times as fast ours is. Medians of {rounds} rounds of the medians of all iterations; the latency of an")
    print("iteration is that of the slowest rank. Registered memory, except for \"any slice\". gloo is called from Python.")
    print(f"Open MPI {version('mpirun', '--version')}, torch {torch}, {len(cores)} cores: {processor()}.\n")
    for goal in goals:
        print(f"{'reached' if goal['reached'] else 'MISSED'}: {goal['goal']} (worst: {goal['worst']})")


def processor():
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else "unknown processor"


if __name__ == "__main__":
    sys.exit(main())
