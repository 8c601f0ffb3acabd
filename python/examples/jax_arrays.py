"""Arrays of jax go to another process by reference, and come back.

    python examples/jax_arrays.py

jax takes and gives arrays by DLPack. What jax computes lies in its own memory, so `share` copies it, once. An
array of `tonic_rdma.empty` that is fetched into, or `jax.dlpack.from_dlpack(buffer)`, is memory that jax works
on in place.
"""

import multiprocessing
from multiprocessing.connection import Connection

import jax
import jax.numpy as jnp
import numpy

import tonic_rdma


def worker(pipe: Connection) -> None:
    """Squares the arrays that come, in place of their owner."""
    while (buffer := pipe.recv()) is not None:
        array = jax.dlpack.from_dlpack(buffer)  # fetches
        squared = jnp.square(array)
        kept = tonic_rdma.share(squared, readers=1, time_limit=60)
        pipe.send(kept)


def main() -> None:
    # Not by fork: a fork has none of the threads that carry fetches, nor those of jax.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=worker, args=(there,))
    process.start()
    try:
        for length in (1, 1000, 1 << 20):
            sent = jnp.arange(length, dtype="float32") / length
            with tonic_rdma.share(sent) as buffer:
                here.send(buffer)  # the handle is pickled; the lease stays here
                squared = here.recv()
                # Into an array that jax then uses where it lies.
                array = tonic_rdma.empty(squared.shape, squared.dtype)
                squared.fetch_into(array)
                result = jax.dlpack.from_dlpack(array)
            numpy.testing.assert_array_equal(numpy.asarray(result), numpy.square(numpy.asarray(sent)))
    finally:
        here.send(None)
        process.join(30)
    print("jax's arrays went to another process and came back")


if __name__ == "__main__":
    main()
