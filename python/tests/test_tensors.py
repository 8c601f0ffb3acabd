"""Slots, named tensors and regions: what they carry, and which copies they make."""

import asyncio
import math
import time
import threading

import numpy
import pytest
import tonic_rdma
from tensors_peer import Peer, pattern, wait_until
from tonic_rdma.tensors import Device

DTYPES = ["float16", "float32", "float64", "int8", "uint16", "int64", "bool", "complex64"]
SHAPES = [(), (1,), (3, 5), (257, 129), (0, 4), (1 << 20,)]


@pytest.fixture
def device():
    with Device() as device:
        yield device


@pytest.fixture
def channel(device):
    """From a device of this process to `device`."""
    with Device() as worker, worker.channel(device.endpoint) as channel:
        yield channel


def in_registered_memory(content):
    array = tonic_rdma.empty(content.shape, content.dtype)
    array.numpy()[...] = content
    return array


# Two processes


def test_a_static_slot_from_another_process():
    code = """
sender = channel.static_sender("slot", (300, 41))
for step in range(50):
    content = pattern(step, (300, 41))
    if step % 3 == 1:
        array = tonic_rdma.empty((300, 41)); array.numpy()[:] = content; content = array
    elif step % 3 == 2:
        array = device.empty((300, 41)); array.numpy()[:] = content; content = array
    sender.send(content, timeout=20)
sender.flush(20)
say(*(f"{kind.tensors} {kind.bytes}" for kind in sender.sent()))
"""
    with Device() as device:
        slot = device.static_receiver("slot", (300, 41), depth=2)
        with Peer(code, device.endpoint) as peer:
            target = numpy.zeros((300, 41), "float32")
            for step in range(50):
                if step % 2:
                    slot.recv_into(target, 20)
                    arrived = target
                else:
                    arrived = slot.recv(20).numpy()
                assert (arrived == pattern(step, (300, 41))).all(), step
            size = 300 * 41 * 4
            assert peer.hear() == f"33 {33 * size} 17 {17 * size} 0 0"
            peer.end()


def test_a_static_slot_in_another_process():
    code = """
slot = device.static_receiver("slot", 5000, "int64", depth=3)
say("made")
for step in range(30):
    assert (slot.recv(20).numpy() == pattern(step, 5000, "int64")).all(), step
say("ok")
"""
    with Peer(code) as peer, Device() as device, device.channel(peer.endpoint) as channel:
        assert peer.hear() == "made"
        sender = channel.static_sender("slot", 5000, "int64")
        array = tonic_rdma.empty(5000, "int64")
        for step in range(30):
            array.numpy()[:] = pattern(step, 5000, "int64")
            sender.send(array, timeout=20)  # the array is free when this returns
        assert peer.hear() == "ok"
        peer.end()


def test_a_dynamic_slot_from_another_process():
    code = """
sender = channel.dynamic_sender("slot")
array = tonic_rdma.empty((64, 1000))
for step in range(40):
    rows = step % 7
    content = pattern(step, (rows, 1000))
    if step % 2:
        array.numpy()[:rows] = content
        content = array.numpy()[:rows]  # a view is found by its address
    sender.send(content, timeout=20)
sender.send(pattern(1, (30, 20)).T, timeout=20)
sender.send(["a", b"bc", ""], timeout=20)
sender.flush(20)
say(sender.sent().in_place.tensors, sender.sent().copied.tensors)
"""
    with Device() as device:
        slot = device.dynamic_receiver("slot", depth=3)
        with Peer(code, device.endpoint) as peer:
            kept = [slot.recv(20) for _ in range(40)]
            assert (slot.recv(20).numpy() == pattern(1, (30, 20)).T).all()
            assert slot.recv(20) == [b"a", b"bc", b""]
            assert peer.hear() == "17 19"  # and 6 without elements
            peer.end()
            # All are still there, when their sender is gone.
            for step, array in enumerate(kept):
                assert array.shape == (step % 7, 1000) and array.readonly
                assert (array.numpy() == pattern(step, array.shape)).all(), step


def test_a_dynamic_slot_in_another_process():
    code = """
slot = device.dynamic_receiver("slot", 2)
say("made")
for step in range(30):
    array = slot.recv(20)
    assert (array.numpy() == pattern(step, (step, 100), "uint16")).all(), step
say("ok")
"""
    with Peer(code) as peer, Device() as device, device.channel(peer.endpoint) as channel:
        assert peer.hear() == "made"
        sender = channel.dynamic_sender("slot")
        array = tonic_rdma.empty((30, 100), "uint16")
        for step in range(30):
            view = array.numpy()[:step]
            view[:] = pattern(step, (step, 100), "uint16")
            sender.send(view, timeout=20)  # the array is free when this returns
        assert peer.hear() == "ok"
        peer.end()


def test_named_tensors_between_processes():
    code = """
for step in range(20):
    device.put("theirs", step, pattern(step, (step, 50)))
device.put("dead", 0, None)
device.put("words", 0, numpy.array([["a", "b"], ["cd", ""]]))
for step in range(20):
    assert (channel.request("ours", step, 20).numpy() == pattern(step, 777)).all(), step
assert channel.request("dead", 1, 20) is None
say("ok")
heard()
"""
    with Device() as device, Peer(code, device.endpoint) as peer, device.channel(peer.endpoint) as channel:
        for step in reversed(range(20)):
            arrived = channel.request("theirs", step, 20)
            assert arrived.readonly and (arrived.numpy() == pattern(step, (step, 50))).all()
        for step in range(20):
            device.put("ours", step, in_registered_memory(pattern(step, 777)))
        assert channel.request("dead", 0, 20) is None
        assert channel.request("words", 0, 20) == [[b"a", b"b"], [b"cd", b""]]
        device.put("dead", 1, None)
        assert peer.hear() == "ok"
        peer.say("end")
        peer.end()


def test_a_region_of_another_process():
    code = """
array = device.empty(1 << 20, "uint8")
exported = device.export("region", array, write=True)
say("made")
exported.notice(20)
pages = array.numpy().reshape(-1, 64)
for place in range(8192):
    assert (pages[place * 5077 % 16384] == place % 251).all(), place
array.numpy()[:] = pattern(3, 1 << 20, "uint8")
say("read")
assert exported.array is array
exported.notice(20)
say(array.numpy()[:10].tolist())
"""
    with Peer(code) as peer, Device() as device, device.channel(peer.endpoint) as channel:
        assert peer.hear() == "made"
        region = channel.region("region")
        assert (region.name, region.nbytes, region.readable, region.writable) == ("region", 1 << 20, True, True)
        # Thousands of blocks in one operation, to places all over the region.
        pages = device.empty((8192, 64), "uint8")
        pages.numpy()[:] = (numpy.arange(8192) % 251).astype("uint8")[:, None]
        places = numpy.arange(8192)
        blocks = numpy.stack([places * 64, places * 5077 % 16384 * 64, numpy.full(8192, 64)], axis=1)
        before = tonic_rdma.memory_statistics().copied_bytes
        channel.write(region, pages, blocks=blocks, notify=True)
        assert tonic_rdma.memory_statistics().copied_bytes == before
        assert peer.hear() == "read"
        whole = device.empty(1 << 20, "uint8")
        channel.read(region, whole)
        assert (whole.numpy() == pattern(3, 1 << 20, "uint8")).all()
        scattered = numpy.zeros(1 << 19, "uint8")
        # numpy's transposed arrays too, and blocks that count from an offset.
        channel.read(region, scattered, 8192, numpy.array([places * 64, places[::-1] * 64, places * 0 + 64]).T)
        assert tonic_rdma.memory_statistics().copied_bytes == before + (1 << 19)
        expected = pattern(3, 1 << 20, "uint8")[8192 : 8192 + (1 << 19)].reshape(-1, 64)[::-1]
        assert (scattered.reshape(-1, 64) == expected).all()
        channel.write(region, bytes(range(10)), notify=True)
        assert peer.hear() == str(list(range(10)))
        peer.end()


# Types and shapes


@pytest.mark.parametrize("dtype", DTYPES)
def test_types_and_shapes(device, channel, dtype):
    dynamic, sender = device.dynamic_receiver("dynamic", 2), channel.dynamic_sender("dynamic")
    for step, shape in enumerate(SHAPES):
        content = pattern(step, shape, dtype)
        static = device.static_receiver(f"static{step}", shape, dtype)
        for name, array in (("ordinary", content), ("registered", in_registered_memory(content))):
            sender.send(array, wait=False)
            found = dynamic.recv(20)
            assert (found.dtype, found.shape) == (dtype, shape) and (found.numpy() == content).all()
            fixed = channel.static_sender(f"static{step}", shape, dtype)
            fixed.send(array)
            found = static.recv(20)
            assert (found.dtype, found.shape) == (dtype, shape) and (found.numpy() == content).all()
            found.numpy()[...] = 0  # it is a copy of its own
            device.put(name, step, array)
            found = channel.request(name, step, 20)
            assert (found.dtype, found.shape) == (dtype, shape) and (found.numpy() == content).all()


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (["a", b"b\0\xff", "ü"], [b"a", b"b\0\xff", "ü".encode()]),
        ((), []),
        (numpy.array([["ab", "c"], ["", "d"]]), [[b"ab", b"c"], [b"", b"d"]]),
        (numpy.array([[b"ab", b"c"]], dtype=object).T, [[b"ab"], [b"c"]]),
        (numpy.array([b"ab"]), [b"ab"]),
        (numpy.array("ab"), b"ab"),
        (numpy.empty((2, 0), "U1"), [[], []]),
        (numpy.empty((2, 3, 0), "U1"), [[[], [], []], [[], [], []]]),
        (numpy.empty((0, 2), object), []),
    ],
)
def test_strings(device, channel, sent, received):
    slot, sender = device.dynamic_receiver("words"), channel.dynamic_sender("words")
    sender.send(sent)
    assert slot.recv(20) == received
    device.put("words", 1, sent)
    assert channel.request("words", 1, 20) == received


def test_a_shape_without_strings_does_not_take_all_memory(device, channel):
    for step, shape in enumerate([(1 << 40, 0), (1 << 40, 4, 0)]):
        device.put("words", step, numpy.empty(shape, "U1"))
        with pytest.raises(ValueError, match="no strings"):
            channel.request("words", step, 20)


def test_strided_arrays_are_sent_row_major(device, channel):
    dynamic, static = device.dynamic_receiver("dynamic"), device.static_receiver("static", (50, 30))
    senders = channel.dynamic_sender("dynamic"), channel.static_sender("static", (50, 30))
    content = pattern(1, (100, 60))
    for whole in (content, in_registered_memory(content).numpy()):
        for view in (whole[::2, ::2], whole[:50, :30], whole[::-2, 59:29:-1]):
            for receiver, sender in zip((dynamic, static), senders):
                sender.send(view)
                assert (receiver.recv(20).numpy() == view).all()


# Copies and waits


def test_what_is_copied(device, channel):
    worker = Device()
    static, fixed = device.static_receiver("static", (64, 64)), channel.static_sender("static", (64, 64))
    dynamic, sender = device.dynamic_receiver("dynamic"), channel.dynamic_sender("dynamic")
    size = 64 * 64 * 4
    registered, ordinary = tonic_rdma.zeros((64, 64)), numpy.zeros((64, 64), "float32")
    of_device = worker.empty((64, 64))
    for array, in_place in [
        (registered, True),
        (registered.numpy(), True),
        (ordinary, False),
        (of_device, True),
        (of_device.numpy(), True),
    ]:
        before, copied = fixed.sent(), tonic_rdma.memory_statistics().copied_bytes
        fixed.send(array)
        now = fixed.sent()
        assert now.in_place.tensors - before.in_place.tensors == in_place
        assert now.copied.bytes - before.copied.bytes == (not in_place) * size
        assert tonic_rdma.memory_statistics().copied_bytes - copied == (not in_place) * size
        static.recv_into(ordinary, 20)
        assert tonic_rdma.memory_statistics().copied_bytes - copied == (not in_place) * size + size
    for step, (array, in_place) in enumerate(
        [(registered.numpy()[1:2], True), (ordinary, False), (of_device, False)]
    ):
        copied = tonic_rdma.memory_statistics().copied_bytes
        device.put("named", step, array, readers=2)
        if not in_place:
            numpy.asarray(array)[:] = 77  # it is free
        for reader in (channel, worker.channel(device.endpoint)):
            assert (reader.request("named", step, 20).numpy() != 77).all()
        assert tonic_rdma.memory_statistics().copied_bytes - copied == (not in_place) * size
    for array, in_place in [(registered, True), (registered.numpy()[1:2], True), (ordinary, False)]:
        before = sender.sent()
        sender.send(array, wait=False)
        assert sender.sent().in_place.tensors - before.in_place.tensors == in_place
        copied = tonic_rdma.memory_statistics().copied_bytes
        dynamic.recv(20)
        assert tonic_rdma.memory_statistics().copied_bytes == copied


def test_a_small_tensor_goes_inline(device, channel):
    slot, sender = device.static_receiver("small", 2), channel.static_sender("small", 2)
    sender.send(tonic_rdma.zeros(2))
    assert sender.sent() == ((0, 0), (0, 0), (1, 8))
    assert slot.recv(20).tobytes() == bytes(8)


def test_send_waits_until_the_receiver_has_read_what_is_not_copied(device, channel):
    slot, sender = device.dynamic_receiver("slot"), channel.dynamic_sender("slot")
    array = tonic_rdma.zeros(1000)
    with pytest.raises(tonic_rdma.TensorTimeout):
        sender.send(array, timeout=0.05)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (sender.flush(20), done.set()))
    thread.start()
    assert not done.wait(0.05)
    slot.recv(20)
    thread.join(20)
    assert done.is_set()


def test_depth(device, channel):
    for slot, sender in [
        (device.static_receiver("s", 100, depth=3), channel.static_sender("s", 100)),
        (device.dynamic_receiver("d", depth=3), channel.dynamic_sender("d")),
    ]:
        for step in range(3):
            sender.send(pattern(step, 100), timeout=20)
        with pytest.raises(tonic_rdma.TensorTimeout):
            sender.send(pattern(3, 100), timeout=0.05)
        assert [slot.recv(20).numpy()[0] for _ in range(3)] == [0, 7, 14]
        assert slot.try_recv() is None
        sender.send(pattern(4, 100), timeout=20)
        assert slot.recv(20).numpy()[0] == 28  # the send that gave up sent nothing


def test_offers(device, channel):
    device.put("x", 1, pattern(0, 10), readers=2)
    assert device.offers() == (1, 40, 0)
    channel.request("x", 1, 20)
    assert device.withdraw("x", 1) == 1
    wait_until(lambda: device.withdraw("x", 1) is None)  # the reader may be served for a moment longer
    with pytest.raises(tonic_rdma.TensorError, match="was delivered already"):
        channel.request("x", 1, 20)
    with pytest.raises(tonic_rdma.TensorTimeout):
        channel.request("x", 2, timeout=0.05)
    with Device(named_tensor_timeout=0.3) as short, Device() as worker:
        with pytest.raises(tonic_rdma.TensorError):
            worker.channel(short.endpoint).request("never", 0)


def test_an_array_is_exported_under_two_names_and_used_again(device, channel):
    array = device.empty(1000, "uint8")
    with device.export("read", array), device.export("write", array, read=False, write=True) as writable:
        reads, writes = channel.region("read"), channel.region("write")
        channel.write(writes, bytes([5] * 1000), notify=True)
        writable.notice(20)
        assert not writable.try_notice()
        target = bytearray(1000)
        channel.read(reads, target)
        assert target == bytes([5] * 1000)
        for use, region in ((channel.write, reads), (channel.read, writes)):
            with pytest.raises(tonic_rdma.TensorError) as error:
                use(region, target)
            assert error.value.kind == "not_permitted"
        # While peers have rights to it, it is copied.
        copied = tonic_rdma.memory_statistics().copied_bytes
        channel.read(reads, array)
        assert tonic_rdma.memory_statistics().copied_bytes == copied + 1000
        reads.close()
        writes.close()
    with device.export("again", array, write=True):
        pass


def test_regions_at_every_offset(device, channel):
    with Device() as worker:
        array = device.empty(100, "uint8")
        exported = device.export("region", array, write=True)
        region = channel.region("region")
        source = worker.empty(100, "uint8")
        source.numpy()[:] = range(100)
        for memory in (source.numpy(), numpy.arange(100, dtype="uint8")):
            for offset in (0, 1, 63, 99):
                for start in (0, 1, 50):
                    length = min(100 - offset, 100 - start)
                    array.numpy()[:] = 255
                    channel.write(region, memory[start : start + length], offset)
                    expected = [255] * 100
                    expected[offset : offset + length] = range(start, start + length)
                    assert array.numpy().tolist() == expected
                    back = numpy.zeros(length, "uint8")
                    channel.read(region, back, offset)
                    assert back.tolist() == expected[offset : offset + length]
        channel.write(region, source.numpy()[:0], 100)  # nothing, at the end
        channel.write(region, source, 0, [])
        exported.withdraw()


# asyncio


def test_everything_in_an_event_loop(device):
    async def main():
        with Device() as worker:
            channel = await worker.channel_async(device.endpoint)
            static, dynamic = device.static_receiver("s", 1000), device.dynamic_receiver("d")
            exported = device.export("e", device.empty(1000), write=True)
            fixed, sender, region = await asyncio.gather(
                channel.static_sender_async("s", 1000),
                channel.dynamic_sender_async("d"),
                channel.region_async("e"),
            )
            target = numpy.zeros(1000, "float32")

            async def receive():
                for step in range(20):
                    assert (((await dynamic.recv_async(20)).numpy()) == pattern(step, step)).all()
                    if step % 2:
                        await static.recv_into_async(target, 20)
                        assert (target == pattern(step, 1000)).all()
                    else:
                        assert ((await static.recv_async(20)).numpy() == pattern(step, 1000)).all()
                    await exported.notice_async(20)
                    arrived = await channel.request_async("n", step, 20)
                    assert (arrived.numpy() == pattern(step, 10)).all()

            async def send():
                for step in range(20):
                    await sender.send_async(pattern(step, step), timeout=20)
                    await fixed.send_async(in_registered_memory(pattern(step, 1000)), timeout=20)
                    await channel.write_async(region, pattern(step, 1000), notify=True)
                    device.put("n", step, pattern(step, 10))
                await sender.flush_async(20)

            await asyncio.gather(receive(), send())
            await channel.read_async(region, target)
            assert (target == pattern(19, 1000)).all()
            # Operations on views of one array wait for one another.
            whole = worker.empty(1000)
            whole.numpy()[:] = pattern(5, 1000)
            parts = [whole.numpy()[at : at + 10] for at in range(0, 1000, 10)]
            await asyncio.gather(*(channel.write_async(region, part, at * 40) for at, part in enumerate(parts)))
            assert (exported.array.numpy() == pattern(5, 1000)).all()

    asyncio.run(main())


def test_a_cancelled_receive_loses_no_tensor(device, channel):
    async def main():
        slots = device.dynamic_receiver("d", 4), device.static_receiver("s", 10, depth=4)
        senders = channel.dynamic_sender("d"), channel.static_sender("s", 10)
        for slot, sender in zip(slots, senders):
            for step in range(300):
                task = asyncio.create_task(slot.recv_async(20))
                await asyncio.sleep(0)
                await sender.send_async(pattern(step, 10), timeout=20)
                for _ in range(step % 4):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    arrived = await task
                except asyncio.CancelledError:
                    arrived = await slot.recv_async(20)
                assert (arrived.numpy() == pattern(step, 10)).all()

    asyncio.run(main())


def test_a_cancelled_wait_loses_no_notice(device, channel):
    exported = device.export("e", device.empty(10), write=True)
    region = channel.region("e")

    async def main():
        task = asyncio.create_task(exported.notice_async(20))
        await asyncio.sleep(0.05)
        channel.write(region, pattern(1, 10), notify=True)
        time.sleep(0.2)  # the event loop has not seen the end of the wait
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await exported.notice_async(20)

    asyncio.run(main())


def test_a_cancelled_write_gives_its_array_back(device, channel):
    async def main():
        with Device() as worker:
            exported = device.export("e", device.empty(1 << 20), write=True)
            region = channel.region("e")
            array = worker.empty(1 << 20)
            for step in range(50):
                array.numpy()[:] = step
                task = asyncio.create_task(channel.write_async(region, array))
                for _ in range(step % 3):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                before = tonic_rdma.memory_statistics().copied_bytes
                await channel.write_async(region, array, timeout=20)
                assert tonic_rdma.memory_statistics().copied_bytes == before
                assert (exported.array.numpy() == step).all()

    asyncio.run(main())


def test_an_endless_timeout(device, channel):
    slot, sender = device.dynamic_receiver("d"), channel.dynamic_sender("d")
    sender.send([b"x"], timeout=math.inf)
    assert slot.recv(1e300) == [b"x"]


# Wrong arguments


WRONG = {
    "shape": lambda device, channel: device.empty((2, -1)),
    "dtype": lambda device, channel: device.static_receiver("x", 3, "object"),
    "depth": lambda device, channel: device.dynamic_receiver("x", -1),
    "buffers": lambda device, channel: device.static_receiver("x", 3, depth=1025),
    "name": lambda device, channel: device.dynamic_receiver("x" * 2000),
    "queue_pairs": lambda device, channel: Device(queue_pairs=-1),
    "Config::queue_pairs_per_peer": lambda device, channel: Device(queue_pairs=65),
    "max_tensor_bytes": lambda device, channel: Device(max_tensor_bytes=1 << 64),
    "answer_timeout": lambda device, channel: Device(answer_timeout=1e300),
    "invalid socket address": lambda device, channel: Device("nowhere"),
    "step": lambda device, channel: device.put("x", -1, None),
    "readers": lambda device, channel: device.put("x", 1, None, readers=1 << 32),
    "queue_pair": lambda device, channel: device.channel("127.0.0.1:1", -1),
    "timeout": lambda device, channel: device.channel("127.0.0.1:1", timeout=math.nan),
    "named_tensor_timeout": lambda device, channel: Device(named_tensor_timeout=math.nan),
    "elements": lambda device, channel: device.export("x", device.empty(0)),
    "Device.empty": lambda device, channel: device.export("x", tonic_rdma.empty(3)),
    "whole array": lambda device, channel: device.export("x", device.empty(3).numpy()[1:]),
    "the name of the tensor": lambda device, channel: channel.request("", 1),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_values(device, channel, what):
    with pytest.raises(ValueError, match=what):
        WRONG[what](device, channel)


def test_wrong_types(device, channel):
    slot, sender, array = device.dynamic_receiver("d"), channel.dynamic_sender("d"), device.empty(3)
    for wrong in (None, 5, [1, 2], [["a"]], object(), {"a": 1}, numpy.array([1, "a"], object)):
        with pytest.raises(TypeError):
            sender.send(wrong)
        if wrong is not None:
            with pytest.raises(TypeError):
                device.put("x", 1, wrong)
    for call in (
        lambda: device.channel(5),
        lambda: device.channel("127.0.0.1:1", timeout="1"),
        lambda: device.empty("x"),
        lambda: device.dynamic_receiver(b"x"),
        lambda: device.export("x", None),
        lambda: slot.recv("soon"),
    ):
        with pytest.raises(TypeError):
            call()
    for call in (channel.read, channel.write):
        with pytest.raises(TypeError, match="region: .* not Array"):
            call(array, array)
    assert slot.try_recv() is None and device.offers() == (0, 0, 0)


def test_wrong_names_shapes_and_types_of_slots(device, channel):
    static, dynamic = device.static_receiver("s", (2, 3)), device.dynamic_receiver("d")
    with pytest.raises(tonic_rdma.TensorError) as error:
        device.export("s", device.empty(3))
    assert error.value.kind == "name_taken"
    for attach in (
        lambda: channel.static_sender("nothing", (2, 3)),
        lambda: channel.static_sender("s", (3, 2)),
        lambda: channel.static_sender("s", (2, 3), "int32"),
        lambda: channel.static_sender("d", (2, 3)),
        lambda: channel.dynamic_sender("s"),
        lambda: channel.region("d"),
    ):
        with pytest.raises(tonic_rdma.TensorError) as error:
            attach()
        assert error.value.kind == "refused"
    sender = channel.static_sender("s", (2, 3))
    for wrong in (pattern(0, (3, 2)), pattern(0, (2, 3), "int32"), pattern(0, 6), tonic_rdma.empty((2, 4))):
        with pytest.raises(ValueError, match=r"array: takes float32\[2, 3\], not "):
            sender.send(wrong)
        with pytest.raises(ValueError, match=r"array: takes float32\[2, 3\], not "):
            static.recv_into(wrong, 0.1)
        with pytest.raises(ValueError, match=r"array: takes float32\[2, 3\], not "):
            asyncio.run(static.recv_into_async(wrong, 0.1))
    read_only = numpy.zeros((2, 3), "float32")
    read_only.flags.writeable = False
    for wrong in (read_only, numpy.zeros((3, 2), "float32").T):
        with pytest.raises(ValueError):
            static.recv_into(wrong, 0.1)
    # Nothing is lost by that.
    sender.send(pattern(1, (2, 3)))
    assert (static.recv(20).numpy() == pattern(1, (2, 3))).all()
    static.close()
    with pytest.raises(tonic_rdma.TensorError, match="closed"):
        static.recv(1)
    device.static_receiver("s", 4).close()  # the name is free
    dynamic.close()


def test_bytes_outside_of_regions_and_arrays(device, channel):
    with Device() as worker:
        array = device.empty(1000, "uint8")
        exported = device.export("region", array, write=True)
        region = channel.region("region")
        for local in (worker.empty(100, "uint8"), worker.empty(300, "uint8").numpy()[100:200], bytearray(100)):
            wrong = [
                {"offset": 901},
                {"offset": (1 << 64) - 1},
                {"blocks": [(0, 0, 101)]},
                {"blocks": [(0, 0, 1), (100, 0, 1)]},
                {"blocks": [(0, 0, 1), (1 << 63, 0, 1)]},
                {"blocks": [((1 << 64) - 1, 0, 2)]},
                {"blocks": [(0, 999, 2)]},
                {"blocks": [(0, 0, 1), (0, 1000, 1)]},
                {"blocks": [(0, (1 << 64) - 1, 1)]},
                {"blocks": [(0, 500, 1)], "offset": 500},
                {"blocks": [(0, 0, (1 << 64) - 1)]},
                {"blocks": numpy.array([[0, 999, 2]])},
                {"blocks": numpy.array([[-1, 0, 2]])},
                {"blocks": numpy.array([[0, -1, 2]])},
                {"blocks": numpy.array([[0, 0, -1]])},
                {"blocks": [(0, 0)]},
                {"blocks": [(0, 0, -1)]},
                {"blocks": numpy.zeros((3, 2), int)},
                {"blocks": numpy.zeros((3, 3))},
                {"blocks": numpy.zeros(3, int)},
            ]
            for arguments in wrong:
                with pytest.raises(ValueError):
                    channel.write(region, local, **arguments)
                with pytest.raises(ValueError):
                    channel.read(region, local, **arguments)
        for wrong in (5, "x", [5], [("a", 0, 0)], object()):
            with pytest.raises((TypeError, ValueError), match="blocks"):
                channel.write(region, b"x", blocks=wrong)
        with pytest.raises(ValueError, match="one piece"):
            channel.write(region, numpy.zeros((10, 10), "uint8")[:, ::2])
        for read_only in (b"x", channel.request):
            with pytest.raises((TypeError, ValueError)):
                channel.read(region, read_only)
        with (
            Device() as third,
            third.channel(device.endpoint) as other,
            pytest.raises(ValueError, match="another link"),
        ):
            other.write(region, b"x")
        assert not array.numpy().any() and channel.is_open
        exported.withdraw()


def test_repeated_and_overlapping_blocks(device, channel):
    array = device.empty(100, "uint8")
    exported = device.export("region", array, write=True)
    region = channel.region("region")
    with Device() as worker:
        source = worker.empty(10, "uint8")
        source.numpy()[:] = range(10)
        for local in (source, source.numpy().copy()):
            # In the order of the list, the last one wins.
            channel.write(region, local, blocks=[(0, 0, 10), (5, 2, 5), (1, 3, 1), (0, 90, 10), (9, 99, 0)])
            assert array.numpy()[:10].tolist() == [0, 1, 5, 1, 7, 8, 9, 7, 8, 9]
            assert array.numpy()[90:].tolist() == list(range(10))
            array.numpy()[:] = 0
    exported.withdraw()


def test_what_is_closed_says_so():
    device, worker = Device(), Device()
    channel = worker.channel(device.endpoint)
    slot, exported = device.dynamic_receiver("d"), device.export("e", device.empty(10), write=True)
    sender, region = channel.dynamic_sender("d"), channel.region("e")
    waits = [slot.recv, exported.notice, lambda: channel.request("n", 1)]
    errors = []

    def run(wait):
        try:
            wait()
        except tonic_rdma.TensorError as error:
            errors.append(error.kind)

    threads = [threading.Thread(target=run, args=(wait,)) for wait in waits]
    for thread in threads:
        thread.start()
    threads[0].join(0.05)
    region.close()
    with pytest.raises(tonic_rdma.TensorError, match="remote region was closed"):
        channel.write(region, b"x")
    channel.close()
    for call in (lambda: channel.region("e"), lambda: channel.endpoint, lambda: sender.send([b"x"])):
        with pytest.raises(tonic_rdma.TensorError, match="closed"):
            call()
    assert not channel.is_open
    device.close()
    for thread in threads:
        thread.join(20)
    assert len(errors) == 3 and set(errors) <= {"closed", "peer_lost"}
    for call in (
        lambda: device.empty(3),
        lambda: device.put("x", 1, None),
        lambda: device.channel(worker.endpoint),
        lambda: slot.recv(1),
        lambda: slot.try_recv(),
    ):
        with pytest.raises(tonic_rdma.TensorError, match="closed"):
            call()
    worker.close()
    device.close()
