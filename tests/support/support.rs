//! Connected streams, content to send over them, and a limit on how long a test may take.

use std::future::Future;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio_stream::StreamExt as _;
use tonic_rdma::{Config, PollMode, Verdict};
use tonic_rdma::{Dialer, EndpointStream, Listener};

/// Long enough for any test on a busy machine; a test that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// How a test's runtime polls.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Runtime {
    /// Current thread, idle polling.
    Idle,
    /// Current thread, as tokio builds it.
    CurrentThread,
    /// Two workers.
    MultiThread,
}

impl Runtime {
    pub(crate) const ALL: [Self; 3] = [Self::Idle, Self::CurrentThread, Self::MultiThread];

    /// Runs `test` to its end, or fails if it hangs.
    pub(crate) fn run<T>(self, test: impl Future<Output = T>) -> T {
        self.run_for_ever(async { tokio::time::timeout(PATIENCE, test).await.expect("the test hangs") })
    }

    /// Runs `task`, however long that takes.
    pub(crate) fn run_for_ever<T>(self, task: impl Future<Output = T>) -> T {
        let mut builder = match self {
            Self::MultiThread => tokio::runtime::Builder::new_multi_thread(),
            Self::Idle | Self::CurrentThread => tokio::runtime::Builder::new_current_thread(),
        };
        if matches!(self, Self::Idle) {
            tonic_rdma::runtime::idle_polling(&mut builder);
        }
        builder.worker_threads(2).enable_all().build().unwrap().block_on(task)
    }
}

/// One step of a test that moves so much that only its steps can be told from ones that hang.
pub(crate) async fn moving<T>(step: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, step).await.expect("nothing moves")
}

/// The default settings, changed by the environment: with `RDMA_DEVICE` set the tests run on that device.
pub(crate) fn config() -> Config {
    Config::from_env().unwrap()
}

/// Runs `test` in every kind of runtime and with every way of polling.
pub(crate) fn everywhere<F: Future<Output = ()>>(test: impl Fn(Config) -> F) {
    for runtime in Runtime::ALL {
        for mode in [PollMode::Adaptive, PollMode::Event] {
            runtime.run(test(config().poll_mode(mode)));
        }
    }
    Runtime::MultiThread.run(test(config().poll_mode(PollMode::Busy)));
}

/// A listener on a free port of this machine.
pub(crate) async fn listen(config: Config) -> Listener {
    Listener::new(TcpListener::bind("127.0.0.1:0").await.unwrap(), config).unwrap()
}

/// Both ends of a connection over RDMA: client, server.
pub(crate) async fn pair(config: Config) -> (EndpointStream, EndpointStream) {
    let mut listener = listen(config.clone()).await;
    let dialer = Dialer::new(config);
    let port = listener.local_addr().port();
    let (client, server) = tokio::join!(dialer.dial("127.0.0.1", port), listener.next());
    let (client, server) = (client.unwrap(), server.unwrap());
    assert_eq!(client.info().verdict(), Verdict::Rdma, "{}", client.info().reason());
    assert_eq!(server.info().verdict(), Verdict::Rdma, "{}", server.info().reason());
    (client, server)
}

/// Content that depends on a seed and on its own place in the stream, so that nothing lost, doubled, moved or stale
/// goes unnoticed.
#[derive(Clone, Debug)]
pub(crate) struct Content {
    seed: u64,
    position: u64,
}

impl Content {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, position: 0 }
    }

    fn byte(&self, position: u64) -> u8 {
        let word = (position / 8).wrapping_add(self.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let word = (word ^ (word >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (word >> (8 * (position % 8))) as u8
    }

    /// The next `length` bytes of the stream.
    pub(crate) fn take(&mut self, length: usize) -> Vec<u8> {
        let start = self.position;
        self.position += length as u64;
        (start..self.position).map(|position| self.byte(position)).collect()
    }

    /// Checks that `bytes` come next.
    pub(crate) fn check(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            assert_eq!(byte, self.byte(self.position), "wrong byte at {} of the stream", self.position);
            self.position += 1;
        }
    }

    pub(crate) fn position(&self) -> u64 {
        self.position
    }
}

/// A small generator of numbers, the same for the same seed.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    /// A length from 0 to `most` whose magnitude is evenly spread.
    pub(crate) fn length(&mut self, most: usize) -> usize {
        let bits = u64::from(usize::BITS - most.leading_zeros());
        let magnitude = 1_u64 << self.below(bits + 1);
        (self.below(magnitude) as usize).min(most)
    }
}

/// Open descriptors and memory mappings of this process.
pub(crate) fn descriptors_and_mappings() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let shared = std::fs::read_to_string("/proc/self/maps").unwrap();
    (descriptors, shared.lines().filter(|line| line.contains("memfd:")).count())
}

/// Waits until this process has no more descriptors and mappings than `before`, or fails. For tests that have the
/// process to themselves.
pub(crate) async fn settled(before: (usize, usize)) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    loop {
        let now = descriptors_and_mappings();
        if now.0 <= before.0 && now.1 <= before.1 {
            return;
        }
        assert!(
            tokio::time::Instant::now() < deadline,
            "descriptors, mappings: {before:?} before, {now:?} after"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
