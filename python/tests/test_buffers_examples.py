"""The examples of arrays by reference, with the libraries that they need."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "example, library, says",
    [
        ("ray_actors.py", "ray", "20 arrays of 16 MiB, each read where the producer had made it"),
        ("jax_arrays.py", "jax", "jax's arrays went to another process and came back"),
    ],
)
def test_an_example_runs_to_its_end(example, library, says):
    for needed in (library, "numpy"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example)], check=False, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0 and says in done.stdout, done.stdout + done.stderr
