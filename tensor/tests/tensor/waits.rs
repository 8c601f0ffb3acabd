//! Futures that wait for a peer: the awaited event ends each wait, and a timer ends no wait.
//!
//! Two runtimes, as in two processes, in every combination of runtime and mode of polling. From time to time
//! an end pauses until all pollers sleep, so that some waits begin before the pollers sleep and some after.

use std::sync::OnceLock;
use std::time::Duration;

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tonic_rdma::{Config, PollMode};
use tonic_rdma_tensor::{
    BlockCopy, DeviceBuilder, Dtype, NamedOffer, NamedReply, RdmaDevice, Rights, Shape, Tensor, TensorSpec,
};

use super::pattern;
use support::{Child, announce};

const NAPS: &str = "tonic_rdma_tensor_naps_total";
/// Tensors that each combination moves, and the steps between two pauses.
const STEPS: u64 = 30;
const REST_EVERY: u64 = 7;
/// A pause longer than any poller spins.
const REST: Duration = Duration::from_millis(2);
const LONG: usize = 300_000;

/// Returns the number of waits of this process that a timer ended since the last call, because no event came.
fn waits_ended_by_a_timer() -> u64 {
    static METRICS: OnceLock<Snapshotter> = OnceLock::new();
    let metrics = METRICS.get_or_init(|| {
        let recorder = DebuggingRecorder::new();
        let snapshotter = recorder.snapshotter();
        metrics_util::debugging::DebuggingRecorder::install(recorder).unwrap();
        snapshotter
    });
    let all = metrics.snapshot().into_vec();
    all.into_iter()
        .filter(|(key, ..)| key.key().name() == NAPS)
        .map(|(.., value)| if let DebugValue::Counter(count) = value { count } else { 0 })
        .sum()
}

/// The runtime of one of the two ends, and its mode of polling.
#[derive(Clone, Copy, Debug)]
enum RuntimeKind {
    MultiThread(PollMode),
    CurrentThread(PollMode),
    IdlePolling,
}

impl RuntimeKind {
    const ALL: [Self; 6] = [
        Self::MultiThread(PollMode::Adaptive),
        Self::MultiThread(PollMode::Event),
        Self::MultiThread(PollMode::Busy),
        Self::CurrentThread(PollMode::Adaptive),
        Self::CurrentThread(PollMode::Event),
        Self::IdlePolling,
    ];

    fn run<T>(self, main: impl Future<Output = T>) -> T {
        let mut builder = match self {
            Self::MultiThread(_) => tokio::runtime::Builder::new_multi_thread(),
            _ => tokio::runtime::Builder::new_current_thread(),
        };
        if let Self::IdlePolling = self {
            tonic_rdma::runtime::idle_polling(&mut builder);
        }
        let main =
            async { tokio::time::timeout(Duration::from_secs(240), main).await.expect("a wait hangs") };
        builder.worker_threads(2).enable_all().build().unwrap().block_on(main)
    }

    fn device(self) -> DeviceBuilder {
        let mode = match self {
            Self::MultiThread(mode) | Self::CurrentThread(mode) => mode,
            Self::IdlePolling => PollMode::Adaptive,
        };
        RdmaDevice::builder().queue_pairs_per_peer(2).config(Config::from_env().unwrap().poll_mode(mode))
    }
}

fn spec(length: usize) -> TensorSpec {
    TensorSpec::new(Dtype::U8, Shape::new(&[length as u64]).unwrap()).unwrap()
}

fn tensor(step: u64, length: usize) -> Tensor {
    Tensor::from_bytes(spec(length), pattern(step, length).into()).unwrap()
}

/// Pauses at some steps. Each place in the loop has another `offset`, so that both sides pause at different
/// steps.
async fn rest(step: u64, offset: u64) {
    if (step + offset).is_multiple_of(REST_EVERY) {
        tokio::time::sleep(REST).await;
    }
}

async fn receive(device: RdmaDevice, ready: tokio::sync::oneshot::Sender<String>) {
    let mut small = device.static_receiver("small", &spec(64), 1).unwrap();
    let mut long = device.static_receiver("long", &spec(LONG), 2).unwrap();
    let mut any = device.dynamic_receiver("any", 2).unwrap();
    let mut never = Some(device.static_receiver("never", &spec(64), 1).unwrap());
    let region = device.export("region", device.allocate(LONG).unwrap(), Rights::WRITE).unwrap();
    ready.send(device.endpoint()).unwrap();
    for step in 0..STEPS {
        // From here on another wait is always pending, so that a sleeping poller already knows of a wait.
        if step == STEPS / 2
            && let Some(mut never) = never.take()
        {
            tokio::spawn(async move { never.recv().await.map(drop).unwrap_err() });
        }
        rest(step, 0).await;
        let arrived = small.recv().await.unwrap();
        assert!(arrived.to_tensor().unwrap().bytes().unwrap() == pattern(step, 64));
        drop(arrived);
        rest(step, 1).await;
        let arrived = long.recv().await.unwrap();
        assert!(arrived.to_tensor().unwrap().bytes().unwrap() == pattern(step, LONG));
        drop(arrived);
        rest(step, 2).await;
        assert!(any.recv().await.unwrap().bytes().unwrap() == pattern(step, LONG));
        rest(step, 3).await;
        device.put("named", step, NamedOffer::Tensor(tensor(step, LONG)), 1).unwrap();
        region.notice().await.unwrap();
        let mut bytes = vec![0; LONG];
        region.memory().copy_out(0, &mut bytes).unwrap();
        assert!(bytes == pattern(step, LONG));
    }
    // The end of the sender.
    small.recv().await.unwrap_err();
}

async fn send(device: RdmaDevice, endpoint: &str) {
    let channel = device.channel(endpoint, 0).await.unwrap();
    let mut small = channel.static_sender("small", &spec(64)).await.unwrap();
    let mut long = channel.static_sender("long", &spec(LONG)).await.unwrap();
    let mut any = channel.dynamic_sender("any").await.unwrap();
    let _never = channel.static_sender("never", &spec(64)).await.unwrap();
    let remote = channel.region("region").await.unwrap();
    let mut region = device.allocate(LONG).unwrap();
    for step in 0..STEPS {
        rest(step, 4).await;
        small.send(&tensor(step, 64)).await.unwrap();
        small.flush().await.unwrap();
        rest(step, 5).await;
        region.copy_from_slice(&pattern(step, LONG));
        region = long.send_region(region).await.unwrap();
        rest(step, 6).await;
        any.send(&tensor(step, LONG)).await.unwrap();
        any.flush().await.unwrap();
        rest(step, 7).await;
        let NamedReply::Tensor(named) = channel.request("named", step).await.unwrap() else { panic!("dead") };
        assert!(named.bytes().unwrap() == pattern(step, LONG));
        rest(step, 8).await;
        let blocks = [BlockCopy { local: 0, remote: 0, length: LONG as u64 }];
        region = channel.write(&remote).notify(true).blocks_from(region, &blocks).await.unwrap();
    }
}

fn between(receiver: RuntimeKind, sender: RuntimeKind) {
    let (ready, endpoint) = tokio::sync::oneshot::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            receiver.run(async {
                let device = receiver.device().bind("127.0.0.1:0").await.unwrap();
                receive(device, ready).await;
            })
        });
        sender.run(async {
            let device = sender.device().bind("127.0.0.1:0").await.unwrap();
            send(device, &endpoint.await.unwrap()).await;
        });
    });
}

/// Runs in a child, because the count is for the whole process.
#[test]
fn no_wait_ends_by_a_timer() {
    let child = Child::start(&[], "waits");
    assert_eq!(child.word, "counted");
    child.ends();
}

/// Plays the role `waits`.
pub(crate) fn play() {
    waits_ended_by_a_timer();
    for receiver in RuntimeKind::ALL {
        for sender in RuntimeKind::ALL {
            between(receiver, sender);
            assert_eq!(waits_ended_by_a_timer(), 0, "waits ended by a timer: {sender:?} to {receiver:?}");
        }
    }
    announce("counted");
}

#[test]
fn a_waiting_receiver_follows_the_peer_to_its_next_sender() {
    for end in RuntimeKind::ALL {
        end.run(async {
            let server = end.device().bind("127.0.0.1:0").await.unwrap();
            let client = end.device().bind("127.0.0.1:0").await.unwrap();
            let mut receiver = server.static_receiver("slot", &spec(64), 1).unwrap();
            // No sender is attached yet.
            let waiting = tokio::spawn(async move {
                let arrived = receiver.recv().await.unwrap().to_tensor().unwrap();
                assert!(arrived.bytes().unwrap() == pattern(1, 64));
            });
            tokio::time::sleep(REST).await;
            let channel = client.channel(&server.endpoint(), 0).await.unwrap();
            let first = channel.static_sender("slot", &spec(64)).await.unwrap();
            tokio::time::sleep(REST).await;
            // The receiver now waits for this sender, which leaves without sending.
            drop(first);
            let mut second = channel.static_sender("slot", &spec(64)).await.unwrap();
            tokio::time::sleep(REST).await;
            second.send(&tensor(1, 64)).await.unwrap();
            waiting.await.unwrap();
        });
    }
}

/// Runs `work` beside a task that counts its own turns on the thread. Returns the count.
async fn beside_a_ticker(work: impl Future<Output = ()>) -> u64 {
    let ticks = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let ticking = std::sync::Arc::clone(&ticks);
    let ticker = tokio::spawn(async move {
        loop {
            ticking.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            tokio::task::yield_now().await;
        }
    });
    work.await;
    ticker.abort();
    ticks.load(std::sync::atomic::Ordering::Relaxed)
}

#[test]
fn a_loop_without_waits_lets_other_tasks_of_its_thread_run() {
    const TENSORS: u32 = 1024;
    RuntimeKind::CurrentThread(PollMode::Adaptive).run(async {
        let server = RdmaDevice::builder().queue_pairs_per_peer(2).bind("127.0.0.1:0").await.unwrap();
        let client = RdmaDevice::builder().queue_pairs_per_peer(2).bind("127.0.0.1:0").await.unwrap();
        let mut receiver = server.static_receiver("slot", &spec(64), TENSORS).unwrap();
        let channel = client.channel(&server.endpoint(), 0).await.unwrap();
        let mut sender = channel.static_sender("slot", &spec(64)).await.unwrap();
        let ticks = beside_a_ticker(async {
            for step in 0..TENSORS {
                sender.send(&tensor(step.into(), 64)).await.unwrap();
            }
        });
        let ticks = ticks.await;
        assert!(ticks >= 4, "the other task ran {ticks} times while {TENSORS} tensors were sent");
        let ticks = beside_a_ticker(async {
            for step in 0..TENSORS {
                let arrived = receiver.recv().await.unwrap().to_tensor().unwrap();
                assert!(arrived.bytes().unwrap() == pattern(step.into(), 64));
            }
        });
        let ticks = ticks.await;
        assert!(ticks >= 4, "the other task ran {ticks} times while {TENSORS} tensors were received");
    });
}

#[test]
fn a_waiting_owner_is_notified_by_a_peer_that_attaches_later() {
    for end in RuntimeKind::ALL {
        end.run(async {
            let server = end.device().bind("127.0.0.1:0").await.unwrap();
            let client = end.device().bind("127.0.0.1:0").await.unwrap();
            let region = server.export("region", server.allocate(64).unwrap(), Rights::WRITE).unwrap();
            let waiting = tokio::spawn(async move {
                region.notice().await.unwrap();
                region.notice().await.unwrap_err();
            });
            tokio::time::sleep(REST).await;
            let channel = client.channel(&server.endpoint(), 0).await.unwrap();
            let remote = channel.region("region").await.unwrap();
            tokio::time::sleep(REST).await;
            let blocks = [BlockCopy { local: 0, remote: 0, length: 64 }];
            let local = client.allocate(64).unwrap();
            channel.write(&remote).notify(true).blocks_from(local, &blocks).await.unwrap();
            // The second wait ends with the link.
            tokio::time::sleep(REST).await;
            drop((remote, channel, client));
            waiting.await.unwrap();
        });
    }
}

/// A receiver that leaves with the last tensor. What it has got, it has got: the sender is told so.
#[test]
fn a_receiver_may_leave_with_the_last_tensor() {
    let spec = TensorSpec::new(Dtype::U8, Shape::new(&[4 << 20]).unwrap()).unwrap();
    for round in 0..40 {
        let (address, opened) = std::sync::mpsc::channel();
        let receiver = std::thread::spawn(move || {
            tokio::runtime::Runtime::new().unwrap().block_on(async {
                let device = RdmaDevice::builder().bind("127.0.0.1:0").await.unwrap();
                let mut slot = device.static_receiver("last", &spec, 1).unwrap();
                address.send(device.endpoint()).unwrap();
                drop(slot.recv().await.unwrap());
            });
        });
        tokio::runtime::Runtime::new().unwrap().block_on(async {
            let device = RdmaDevice::builder().bind("127.0.0.1:0").await.unwrap();
            let channel = device.channel(&opened.recv().unwrap(), 0).await.unwrap();
            let mut sender = channel.static_sender("last", &spec).await.unwrap();
            let region = device.allocate(4 << 20).unwrap();
            let sent = sender.send_region(region).await;
            assert!(sent.is_ok(), "round {round}: {sent:?}");
        });
        receiver.join().unwrap();
    }
}
