"""`python -m tonic_rdma doctor` and `compare`, and the soak, as users run them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent
PACKAGE = [sys.executable, "-m", "tonic_rdma"]


def run(*command, status=0):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr


def test_doctor_says_what_carries_a_call():
    rows = {row["what"]: row for row in json.loads(run(*PACKAGE, "doctor", "--json"))}
    assert rows["grpcio"]["state"] == rows["tonic_rdma"]["state"] == rows["a call"]["state"] == "yes"
    assert "because" in rows["RDMA for it"]["why"]
    table = run(*PACKAGE, "doctor").splitlines()
    assert [line.split("  ")[0] for line in table] == list(rows)


def test_doctor_fails_without_the_native_part(tmp_path):
    package = FOLDER / "tonic_rdma"
    (tmp_path / "tonic_rdma").mkdir()
    for name in ("_doctor.py", "_compare.py", "_compare_collectives.py", "_compare_ends.py", "__main__.py"):
        (tmp_path / "tonic_rdma" / name).write_text((package / name).read_text())
    (tmp_path / "tonic_rdma" / "__init__.py").touch()
    program = f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['tonic_rdma', 'doctor'];"
    said = run(sys.executable, "-c", program + "runpy.run_module('tonic_rdma', run_name='__main__')", status=1)
    assert "missing: tonic_rdma" in said


@pytest.mark.timeout(300)
def test_compare_measures_all_modes(tmp_path):
    report = tmp_path / "report.json"
    brief = ["--sizes", "64,100KiB", "--inflight", "1,3", "--duration", "0.05", "--rounds", "2"]
    table = run(*PACKAGE, "compare", *brief, "--json", report)
    rows = json.loads(report.read_text())["rows"]
    modes = ["grpcio", "grpcio-aio", "tonic-rdma", "tonic-rdma-aio", "grpcio-to-tonic-rdma"]
    modes += ["grpcio-one-way", "reference"]
    cells = [(64, 1), (64, 3), (100 << 10, 1)]  # large messages: one in flight
    assert [(row["mode"], row["size"], row["in_flight"]) for row in rows] == [
        (m, *cell) for cell in cells for m in modes
    ]
    for row in rows:
        assert row["p50_us"] > 0 and row["per_second"] > 0 and row["cpu_us"] > 0 and row["latency_x"] > 0
        assert row["mode"] in table


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--sizes", "12GB"], "'12GB' is no size"),
        (["--sizes", "0"], "'0' is no size"),
        (["--inflight", "0"], "'0' is no number from 1 to 1024"),
        (["--duration", "nan"], "'nan' is no number of seconds"),
        (["--rounds", "-1"], "no number"),
        (["--modes", "tcp"], "there is no mode 'tcp'; the modes are grpcio,"),
    ],
)
def test_compare_refuses_a_wrong_value(arguments, said):
    assert said in run(*PACKAGE, "compare", *[f"{arguments[0]}={arguments[1]}"], status=2)


def test_compare_needs_something_to_measure():
    assert "nothing to measure" in run(*PACKAGE, "compare", "--sizes=1MiB", "--inflight=2", status=1)
    assert "has no native-server" in run(*PACKAGE, "compare", "--rust=/nowhere", "--duration=0.01", status=1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", [[], ["--in-process"]])
def test_many_calls_leave_nothing(where):
    assert "flat: nothing grew" in run(
        sys.executable, FOLDER / "tests" / "soak.py", "--calls", 4000, "--seed", 1, *where
    )
