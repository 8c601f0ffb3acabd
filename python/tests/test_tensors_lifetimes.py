"""Tensors whose peer dies, whose device is closed, whose owner is collected, and that many threads use.

Nothing hangs, nothing is lost, and every array stays what it was.
"""

import asyncio
import gc
import random
import threading
import time

import numpy
import pytest
import tonic_rdma
from tensors_peer import Peer, pattern, wait_until
from tonic_rdma.tensors import Device

LOST = "peer_lost"


def kind_of(operation):
    """Runs it, and returns the kind of its error."""
    with pytest.raises(tonic_rdma.TensorError) as error:
        operation()
    assert not isinstance(error.value, tonic_rdma.TensorTimeout)
    return error.value.kind


def in_thread(operation):
    """Runs it in a thread. Returns a function that waits for its value, or raises its error."""
    ended = []

    def run():
        try:
            ended.append((operation(), None))
        except BaseException as error:
            ended.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(20)
        assert ended, "it goes on"
        value, error = ended[0]
        if error is not None:
            raise error
        return value

    return result


# A peer that is killed


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_sender_is_killed_while_the_receiver_waits(kind):
    code = f"""
sender = channel.static_sender("slot", 100) if "{kind}" == "static" else channel.dynamic_sender("slot")
sender.send(pattern(1, 100))
say("sent")
heard()
"""
    with Device() as device:
        make = {
            "static": lambda: device.static_receiver("slot", 100),
            "dynamic": lambda: device.dynamic_receiver("slot"),
        }
        slot = make[kind]()
        with Peer(code, device.endpoint) as peer:
            assert peer.hear() == "sent"
            first = slot.recv(20)
            waiting = in_thread(slot.recv)
            time.sleep(0.02)
            peer.kill()
            assert kind_of(waiting) == LOST
            assert kind_of(lambda: slot.recv(20)) == LOST
            assert kind_of(slot.try_recv) == LOST
            assert kind_of(lambda: asyncio.run(slot.recv_async(20))) == LOST
        assert (first.numpy() == pattern(1, 100)).all()
        with Peer(code, device.endpoint) as peer:  # the slot serves the next one
            assert peer.hear() == "sent"
            assert (slot.recv(20).numpy() == pattern(1, 100)).all()


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("memory", ["registered", "ordinary", "device"])
def test_a_receiver_is_killed_while_the_sender_waits(kind, memory):
    code = f"""
make = {{"static": lambda: device.static_receiver("s", 50000), "dynamic": lambda: device.dynamic_receiver("s")}}
slot = make["{kind}"]()
say("made")
slot.recv(20)
say("taken")
heard()
"""
    with Device() as device, Peer(code) as peer, device.channel(peer.endpoint) as channel:
        assert peer.hear() == "made"
        make = {
            "static": lambda: channel.static_sender("s", 50000),
            "dynamic": lambda: channel.dynamic_sender("s"),
        }
        sender = make[kind]()
        made = {"registered": tonic_rdma.empty, "ordinary": numpy.empty, "device": device.empty}
        array = made[memory](50000, "float32")
        view = numpy.asarray(array)
        view[:] = pattern(2, 50000)
        sender.send(array, timeout=20)
        assert peer.hear() == "taken"
        sender.send(array, wait=False, timeout=20)
        waiting = in_thread(lambda: sender.send(array))
        time.sleep(0.02)
        peer.kill()
        assert kind_of(waiting) == LOST
        assert kind_of(lambda: sender.send(array, timeout=20)) == LOST
        assert kind_of(lambda: sender.flush(20)) == LOST
        wait_until(lambda: not channel.is_open)
        del sender
        gc.collect()
        assert (view == pattern(2, 50000)).all()
        view[:] = 1
    # It goes to the next peer from the same memory.
    with Device() as other, Device() as device, device.channel(other.endpoint) as channel:
        slot, sender = other.static_receiver("s", 50000), channel.static_sender("s", 50000)
        sender.send(array)
        assert sender.sent().in_place.tensors == (memory != "ordinary")
        assert (slot.recv(20).numpy() == 1).all()


def test_the_owner_of_named_tensors_is_killed():
    code = """
device.put("x", 1, pattern(1, 1000))
say("put")
heard()
"""
    with Device() as device, Peer(code) as peer, device.channel(peer.endpoint) as channel:
        assert peer.hear() == "put"
        first = channel.request("x", 1, 20)
        waiting = [in_thread(lambda step=step: channel.request("x", step)) for step in (2, 3)]
        time.sleep(0.02)
        peer.kill()
        assert [kind_of(wait) for wait in waiting] == [LOST, LOST]
        assert kind_of(lambda: channel.request("x", 4, 20)) == LOST
        assert (first.numpy() == pattern(1, 1000)).all()


def test_a_reader_of_named_tensors_is_killed():
    code = """
say(channel.request("x", 1, 20).shape)
say("waits")
channel.request("x", 2, 20)
"""
    with Device() as device:
        array = tonic_rdma.zeros(1000)
        device.put("x", 1, array, readers=2)
        with Peer(code, device.endpoint) as peer:
            assert peer.hear() == "(1000,)"
            assert peer.hear() == "waits"
            wait_until(lambda: device.offers()[2] == 1)
            peer.kill()
            wait_until(lambda: device.offers()[2] == 0)
        assert device.withdraw("x", 1) == 1
        array.numpy()[:] = 5


@pytest.mark.parametrize("memory", ["device", "ordinary"])
@pytest.mark.parametrize("use", ["read", "write"])
def test_the_owner_of_a_region_is_killed(use, memory):
    code = """
exported = device.export("region", device.empty(64 << 20, "uint8"), write=True)
say("made")
heard()
"""
    with Device() as device, Peer(code) as peer, device.channel(peer.endpoint) as channel:
        assert peer.hear() == "made"
        region = channel.region("region")
        array = {"device": device.empty, "ordinary": numpy.empty}[memory](64 << 20, "uint8")
        view = numpy.asarray(array)
        view[:] = 0
        begun = threading.Event()

        def run():
            while True:
                getattr(channel, use)(region, array)
                begun.set()

        running = in_thread(run)
        assert begun.wait(20)
        peer.kill()
        assert kind_of(running) == LOST
        assert kind_of(lambda: getattr(channel, use)(region, array, timeout=20)) == LOST
        assert not view.any()
        view[:] = 7
    with Device() as other, Device() as device, device.channel(other.endpoint) as channel:
        exported = other.export("region", other.empty(64 << 20, "uint8"), write=True)
        before = tonic_rdma.memory_statistics().copied_bytes
        channel.write(channel.region("region"), array)
        assert tonic_rdma.memory_statistics().copied_bytes - before == (memory == "ordinary") * (64 << 20)
        assert (exported.array.numpy() == 7).all()
        exported.withdraw()


def test_the_writer_of_a_region_is_killed():
    code = """
region = channel.region("region")
channel.write(region, b"abc", notify=True)
say("written")
while True:
    channel.write(region, numpy.full(1 << 20, 9, "uint8"))
"""
    with Device() as device:
        array = device.empty(1 << 20, "uint8")
        with device.export("region", array, write=True) as exported:
            with Peer(code, device.endpoint) as peer:
                exported.notice(20)
                assert peer.hear() == "written"
                waiting = in_thread(exported.notice)
                wait_until(lambda: array.numpy()[-1] == 9)
                peer.kill()
                assert kind_of(waiting) == LOST
            with Device() as other, other.channel(device.endpoint) as channel:
                channel.write(channel.region("region"), b"xyz", notify=True)
                exported.notice(20)
                assert array.numpy()[:3].tobytes() == b"xyz"


def test_a_stopped_peer_and_timeouts():
    """Each wait ends when its time is over. An operation that goes on keeps its array until it has ended."""
    code = """
array = device.empty(1 << 20, "uint8")
exported = device.export("region", array, write=True)
slot = device.static_receiver("slot", 1 << 18)
say("made")
say(heard(), array.numpy().min(), array.numpy().max())
"""
    with Device(answer_timeout=1) as device, Peer(code) as peer, device.channel(peer.endpoint) as channel:
        assert peer.hear() == "made"
        region, sender = channel.region("region"), channel.static_sender("slot", 1 << 18)
        array = device.empty(1 << 20, "uint8")
        array.numpy()[:] = 3
        registered = tonic_rdma.zeros(1 << 18)
        peer.stop()
        try:
            for operation in (
                lambda: sender.send(registered, timeout=0.05),
                lambda: sender.flush(0.05),
                lambda: channel.request("x", 1, timeout=0.05),
                lambda: channel.region("other", timeout=0.05),
                lambda: asyncio.run(channel.request_async("x", 2, timeout=0.05)),
            ):
                begun = time.monotonic()
                with pytest.raises(tonic_rdma.TensorTimeout):
                    operation()
                assert time.monotonic() - begun < 15
            # A write needs the peer's processor, or not: this depends on its level of trust.
            for _ in range(3):
                try:
                    channel.write(region, array, timeout=0.1)
                except tonic_rdma.TensorTimeout:
                    pass
        finally:
            peer.go_on()
        channel.write(region, array, timeout=20)
        before = tonic_rdma.memory_statistics().copied_bytes
        channel.write(region, array, timeout=20)
        assert tonic_rdma.memory_statistics().copied_bytes == before  # it is back
        peer.say("now")
        assert peer.hear() == "now 3 3"
        peer.end()


def test_without_registered_memory(monkeypatch):
    """What finds no memory fails by itself: links, slots and arrays serve on."""
    code = """
slot = device.dynamic_receiver("slot")
say("made")
def refused(use):
    try:
        use()
    except MemoryError:
        return True
many = numpy.zeros(64 << 20, "uint8")
region, sender = channel.region("region"), channel.dynamic_sender("theirs")
uses = (lambda: device.empty(64 << 20), lambda: channel.write(region, many), lambda: channel.read(region, many),
        lambda: sender.send(many), lambda: slot.recv(20), lambda: slot.try_recv(), lambda: slot.recv(20))
say([number for number, use in enumerate(uses) if not refused(use)])
channel.write(region, many[:100])
sender.send(many[:100], timeout=20)
say("ok")
"""
    with Device() as device:
        exported = device.export("region", device.empty(64 << 20, "uint8"), write=True)
        theirs = device.dynamic_receiver("theirs")
        monkeypatch.setenv("RDMA_PINNED_LIMIT", "24MiB")
        with Peer(code, device.endpoint) as peer, device.channel(peer.endpoint) as channel:
            assert peer.hear() == "made"
            channel.dynamic_sender("slot").send(tonic_rdma.zeros(64 << 20, "uint8"), wait=False)
            assert peer.hear() == "[]"
            assert theirs.recv(20).shape == (100,)
            assert peer.hear() == "ok"
            peer.end()
        exported.withdraw()


def test_ctrl_c_during_each_wait():
    """It gives up the wait, and nothing else."""
    code = """
import os, signal
slot, fixed = device.dynamic_receiver("d"), device.static_receiver("s", 100)
exported = device.export("e", device.empty(10), write=True)
channel = device.channel(device.endpoint)
sender = channel.dynamic_sender("d")
sender.send(["x"])
for wait in (fixed.recv, lambda: fixed.recv_into(numpy.zeros(100, "float32")), exported.notice,
             lambda: channel.request("n", 1), lambda: sender.send(["y"])):
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        wait()
    except KeyboardInterrupt:
        say("interrupted")
    timer.join()
assert slot.recv(20) == [b"x"]
sender.send(["z"])
assert slot.recv(20) == [b"z"]
say("ok")
"""
    with Peer(code) as peer:
        assert [peer.hear() for _ in range(6)] == ["interrupted"] * 5 + ["ok"]
        peer.end()


def test_what_ends_with_an_offer_may_use_the_device():
    code = """
import weakref

class Temporary:
    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **arguments):
        return kept().__dlpack__()

def kept():
    content = numpy.zeros(100_000)
    weakref.finalize(content, lambda: say(device.offers()[0]))
    return content

device.put("n", 1, kept())
try:
    device.put("n", 1, Temporary())
except tonic_rdma.TensorError:
    say("refused")
say(device.withdraw("n", 1))
"""
    with Peer(code) as peer:
        assert sorted(peer.hear() for _ in range(4)) == ["1", "1", "1", "refused"]
        peer.end()


def test_what_ends_with_an_interrupted_operation_may_use_its_slot():
    code = """
import os, signal, weakref

fixed = device.static_receiver("s", 10)
sender = device.channel(device.endpoint).static_sender("s", 10)
sender.send(pattern(1, 10))
given = pattern(2, 10)
weakref.finalize(given, lambda: (fixed.recv(10), sender.flush(10), say("flushed")))
waiting = sender._native.send(given, True, None)
del given
timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
timer.start()
try:
    waiting.wait()
except KeyboardInterrupt:
    say("interrupted")
timer.join()
"""
    with Peer(code) as peer:
        assert sorted(peer.hear() for _ in range(2)) == ["flushed", "interrupted"]
        peer.end()


# Arrays that outlive the rest


def test_arrays_outlive_everything():
    with Peer('exported = device.export("e", device.empty(100), write=True)\nsay("made")\nheard()') as peer:
        device, worker = Device(), Device()
        channel = worker.channel(device.endpoint)
        remote = worker.channel(peer.endpoint)
        assert peer.hear() == "made"
        slot, fixed = device.dynamic_receiver("d", 3), device.static_receiver("s", 70000)
        sender, fixed_sender = channel.dynamic_sender("d"), channel.static_sender("s", 70000)
        registered = tonic_rdma.empty(70000)
        registered.numpy()[:] = pattern(1, 70000)
        sender.send(registered, wait=False)
        arrived = slot.recv(20)
        sender.send(pattern(2, 70000))  # it is on its way, and never taken
        fixed_sender.send(pattern(3, 70000))
        copied = fixed.recv(20)
        device.put("n", 1, pattern(4, 70000))
        named = channel.request("n", 1, 20)
        device.put("n", 2, registered)  # never asked for
        own, exported_array = worker.empty(100), device.empty(3 << 20, "uint8")
        own.numpy()[:] = 5
        exported = device.export("e", exported_array, write=True)
        region = channel.region("e")
        channel.write(region, numpy.full(3 << 20, 6, "uint8"))
        channel_region = remote.region("e")
        remote.write(channel_region, own)
        views = [
            (memoryview(arrived)[10:], pattern(1, 70000)[10:]),
            (arrived.numpy()[::2], pattern(1, 70000)[::2]),
            (numpy.from_dlpack(copied), pattern(3, 70000)),
            (named.numpy().reshape(7, -1).T, pattern(4, 70000).reshape(7, -1).T),
            (own.numpy()[1:], numpy.full(99, 5, "float32")),
            (memoryview(exported_array), numpy.full(3 << 20, 6, "uint8")),
            (registered.numpy(), pattern(1, 70000)),
        ]
        peer.kill()
    order = [
        device,
        worker,
        channel,
        remote,
        slot,
        fixed,
        sender,
        fixed_sender,
        exported,
        region,
        channel_region,
    ]
    order += [arrived, copied, named, own, exported_array, registered]
    del device, worker, channel, remote, slot, fixed, sender, fixed_sender, exported, region, channel_region
    del arrived, copied, named, own, exported_array, registered
    random.shuffle(order)
    while order:
        order.pop()
        gc.collect()
        assert all((numpy.asarray(view) == content).all() for view, content in views)
    # Memory that these views keep goes to no one else.
    with Device() as device:
        others = [device.empty(70000) for _ in range(50)]
        for other in others:
            other.numpy()[:] = 9
        assert all((numpy.asarray(view) == content).all() for view, content in views)
        for view, _ in views:
            if not memoryview(view).readonly:
                numpy.asarray(view)[...] = 1


def test_what_a_device_made_keeps_it():
    device = Device()
    endpoint, slot = device.endpoint, device.dynamic_receiver("d")
    exported = device.export("e", device.empty(10), write=True)
    sender = Device().channel(endpoint).dynamic_sender("d")
    channel = Device().channel(endpoint)
    region = channel.region("e")
    del device
    gc.collect()
    for step in range(3):
        sender.send([str(step)])
        assert slot.recv(20) == [str(step).encode()]
        channel.write(region, b"x", notify=True)
        exported.notice(20)


def test_an_export_ends_with_its_object():
    with Device() as device, Device() as worker, worker.channel(device.endpoint) as channel:
        device.export("e", device.empty(10))
        gc.collect()
        assert kind_of(lambda: channel.region("e")) == "refused"


def test_the_memory_of_an_array_comes_back_with_its_last_view():
    with Device() as device:
        array = device.empty(1000)
        address = array.numpy().ctypes.data
        view = memoryview(array)[5:6]
        del array
        gc.collect()
        assert device.empty(1000).numpy().ctypes.data != address
        view.release()
        assert any(device.empty(1000).numpy().ctypes.data == address for _ in range(3))


def test_a_fork_of_a_process_with_a_device():
    code = """
import os
slot = device.dynamic_receiver("d")
channel = device.channel(device.endpoint)
sender, array = channel.dynamic_sender("d"), device.empty(100)
exported = device.export("e", array)
array.numpy()[:] = 7
begun = exported._native.notice(None)
child = os.fork()
if child == 0:
    def refused(use):
        try:
            use()
        except RuntimeError as error:
            return "forked" in str(error)
    used = (Device, slot.recv, slot.try_recv, lambda: sender.send(["x"]), lambda: channel.request("n", 1),
            lambda: device.empty(3), lambda: device.put("n", 1, None), exported.notice, exported.try_notice,
            lambda: tonic_rdma.asarray(array.numpy()), begun.wait)
    failed = [number for number, use in enumerate(used) if not refused(use)]
    assert (array.numpy() == 7).all()
    for one in (sender, slot, exported, channel, device):
        one.close()
    del device, slot, channel, sender, exported, array, used, one, begun
    gc.collect()
    say("child", failed)
    sys.exit()
_, status = os.waitpid(child, 0)
sender.send(["x"])
assert slot.recv(20) == [b"x"]
channel.read(channel.region("e"), array.numpy().copy())
say("parent", status)
"""
    with Peer(code) as peer:
        assert peer.hear() == "child []"
        assert peer.hear() == "parent 0"
        peer.end()


@pytest.mark.parametrize("how", ["threads", "asyncio"])
def test_the_interpreter_ends_during_operations(how):
    code = """
channel = device.channel(device.endpoint)
exported = device.export("e", device.empty(64 << 20, "uint8"), write=True)
region, array, ordinary = channel.region("e"), device.empty(64 << 20, "uint8"), numpy.zeros(64 << 20, "uint8")
slot, sender = device.dynamic_receiver("d"), channel.dynamic_sender("d")
device.put("n", 1, ordinary)

def again(use):
    while True:
        use()

uses = [lambda: channel.write(region, array), lambda: channel.read(region, ordinary), slot.recv, exported.notice,
        lambda: channel.request("never", 1), lambda: sender.send(ordinary)]

async def main():
    tasks = [asyncio.create_task(use) for use in (channel.write_async(region, array), slot.recv_async(),
             channel.read_async(region, ordinary), channel.request_async("never", 1), exported.notice_async(),
             sender.send_async(ordinary))]
    await asyncio.sleep(0.01)
    say("ends")
    sys.exit()

if HOW == "asyncio":
    asyncio.run(main())
for use in uses:
    threading.Thread(target=again, args=(use,), daemon=True).start()
time.sleep(0.05)
say("ends")
"""
    for _ in range(5):
        with Peer(code.replace("HOW", repr(how))) as peer:
            assert peer.hear() == "ends"
            peer.end()


# Many threads, and the garbage collector


def test_threads_and_the_collector_at_random():
    """Threads use everything at once, drop it at any moment, and close what others use."""
    with Device() as device, Device() as worker:
        end = time.monotonic() + 8
        failures = []

        def work(number):
            chance = random.Random(number)
            held, step = [], 0
            while time.monotonic() < end and not failures:
                step += 1
                name, size = f"{number}.{step}", chance.choice([1, 100, 5000, 300_000])
                channel = worker.channel(device.endpoint)
                content = pattern(step + number, size)
                array = chance.choice([tonic_rdma.empty, device.empty, worker.empty])(size)
                array.numpy()[:] = content
                match chance.randrange(5):
                    case 0:
                        slot = device.dynamic_receiver(name)
                        sender = channel.dynamic_sender(name)
                        sender.send(array, wait=False)
                        arrived = slot.recv(20)
                    case 1:
                        slot = device.static_receiver(name, size)
                        sender = channel.static_sender(name, size)
                        sender.send(array)
                        arrived = slot.recv(20)
                        if chance.random() < 0.3:
                            threading.Thread(target=slot.close).start()
                    case 2:
                        device.put(name, 0, array)
                        arrived = channel.request(name, 0, 20)
                    case 3:
                        exported = device.export(name, device.empty(size), write=True)
                        region = channel.region(name)
                        channel.write(region, array, notify=True)
                        exported.notice(20)
                        arrived = exported.array
                        if chance.random() < 0.5:
                            back = chance.choice([worker.empty, numpy.zeros])(size, "float32")
                            channel.read(region, back)
                            assert (numpy.asarray(back) == content).all()
                        region.close()
                        exported.withdraw()
                    case 4:
                        slot = device.dynamic_receiver(name)
                        waiting = in_thread(lambda: slot.recv(20))
                        threading.Thread(target=slot.close).start()
                        assert kind_of(waiting) == "closed"
                        arrived = array
                assert (arrived.numpy() == content).all(), (name, size)
                held.append((arrived if chance.random() < 0.5 else memoryview(arrived), content))
                chance.shuffle(held)
                del held[20:]
                if chance.random() < 0.05:
                    gc.collect(chance.randrange(3))
            assert all((numpy.asarray(view) == content).all() for view, content in held)

        def guarded(number):
            try:
                work(number)
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=guarded, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures, failures


LEAKS = """
import os
from pathlib import Path

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def descriptors():
    return len(os.listdir("/proc/self/fd"))

async def later(channel, slot, sender):
    await sender.send_async(["x"], timeout=20)
    return await slot.recv_async(20)

def round(worker, step):
    channel = worker.channel(device.endpoint)
    content = pattern(step, 10_000)
    array = device.empty(10_000)
    array.numpy()[:] = content
    registered = tonic_rdma.empty(10_000)
    registered.numpy()[:] = content
    fixed, slot = device.static_receiver("s", 10_000), device.dynamic_receiver("d")
    fixed_sender, sender = channel.static_sender("s", 10_000), channel.dynamic_sender("d")
    for one in (array, registered, content):
        fixed_sender.send(one, timeout=20)
        assert (fixed.recv(20).numpy() == content).all()
        sender.send(one, wait=False, timeout=20)
        assert (slot.recv(20).numpy() == content).all()
    assert loop.run_until_complete(later(channel, slot, sender)) == [b"x"]
    device.put("n", step, registered)
    assert (channel.request("n", step, 20).numpy() == content).all()
    with device.export("e", array, write=True) as exported:
        with channel.region("e") as region:
            channel.write(region, registered, notify=True)
            exported.notice(20)
            channel.read(region, worker.empty(10_000))
    for fails in (lambda: slot.recv(0.0001), lambda: channel.region("nothing"),
                  lambda: device.export("e", content), lambda: sender.send(5)):
        try:
            fails()
        except (RuntimeError, ValueError, TypeError):
            pass

loop = asyncio.new_event_loop()
"""


def run_rounds(code):
    with Peer(LEAKS + code) as peer:
        before, after = ([int(number) for number in peer.hear(50).split()] for _ in range(2))
        peer.end()
    assert after[1] <= before[1] + 2, "descriptors"
    assert after[0] <= before[0] + (12 << 20), f"{(after[0] - before[0]) / 2**20:.1f} MiB"


@pytest.mark.timeout(120)
def test_nothing_leaks_in_a_thousand_rounds():
    run_rounds("""
worker = Device()
for step in range(1300):
    round(worker, step)
    if step in (299, 1299):
        gc.collect()
        say(resident(), descriptors())
""")


@pytest.mark.timeout(120)
def test_no_device_and_no_link_leaks():
    run_rounds("""
for step in range(130):
    with Device() as worker:
        round(worker, step)
    if step in (29, 129):
        gc.collect()
        time.sleep(1)
        say(resident(), descriptors())
""")
