"""Two actors of Ray pass arrays by reference.

    python examples/ray_actors.py

The producer puts each array into registered memory and returns a handle, which Ray moves as it moves any small
object. The consumer fetches the array from the producer's memory: it is neither pickled nor copied into Ray's
object store.
"""

import numpy
import ray

import tonic_rdma

SHAPE = (1024, 2048)  # float64: 16 MiB
STEPS = 20


@ray.remote
class Producer:
    def produce(self, step: int) -> tonic_rdma.RemoteBuffer:
        array = tonic_rdma.empty(SHAPE, "float64")
        array.numpy()[...] = numpy.random.default_rng(step).random(SHAPE)
        # One fetch ends the lease. If the consumer dies before it, time does.
        return tonic_rdma.share(array, readers=1, time_limit=60)

    def copied_bytes(self) -> int:
        return tonic_rdma.memory_statistics().copied_bytes


@ray.remote
class Consumer:
    def total(self, buffer: tonic_rdma.RemoteBuffer) -> float:
        return float(buffer.numpy(timeout=30).sum())


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        producer, consumer = Producer.remote(), Consumer.remote()
        # The consumer works on one array while the producer makes the next ones.
        buffers = [producer.produce.remote(step) for step in range(STEPS)]
        totals = ray.get([consumer.total.remote(buffer) for buffer in buffers], timeout=50)
        for step, total in enumerate(totals):
            assert total == float(numpy.random.default_rng(step).random(SHAPE).sum()), step
        assert ray.get(producer.copied_bytes.remote()) == 0
        try:
            ray.get(consumer.total.remote(buffers[0]))
            raise AssertionError("it was read before")
        except tonic_rdma.Gone:
            pass
    finally:
        ray.shutdown()
    print(f"{STEPS} arrays of {numpy.prod(SHAPE) * 8 >> 20} MiB, each read where the producer had made it")


if __name__ == "__main__":
    main()
