//! A connection holds two descriptors and up to 1.6 MiB of receive buffers, which take memory only after
//! their first use.

use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_stream::StreamExt as _;
use tonic_rdma::{Dialer, EndpointStream, Verdict};

use support::{Child, Runtime, config, listen, until};

/// The descriptors of this process, and the memory behind them that this process shares with peers: its size,
/// and the part that this process or a peer has touched, in bytes.
#[derive(Clone, Copy, Debug)]
struct Held {
    descriptors: i64,
    shared: i64,
    touched: i64,
}

impl Held {
    fn now() -> Self {
        let mut held = Self { descriptors: 0, shared: 0, touched: 0 };
        for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
            let path = entry.unwrap().path();
            // The descriptor of this directory is closed by now.
            let Ok(target) = std::fs::read_link(&path) else { continue };
            held.descriptors += 1;
            if target.to_str().is_some_and(|target| target.starts_with("/memfd:tonic-rdma "))
                && let Ok(memory) = std::fs::metadata(&path)
            {
                held.shared += memory.len().cast_signed();
                held.touched += 512 * memory.blocks().cast_signed();
            }
        }
        held
    }

    /// Returns what this process holds beyond `before`, with `expected` descriptors. The device's threads close a
    /// few sockets, and copies of descriptors that they have sent, after a connection is there: now, and `before`.
    async fn beyond(before: Self, expected: i64) -> Self {
        const FEW: i64 = 8;
        until(|| Self::now().descriptors <= before.descriptors + expected).await;
        let now = Self::now();
        let held = Self {
            descriptors: now.descriptors - before.descriptors,
            shared: now.shared - before.shared,
            touched: now.touched - before.touched,
        };
        assert!(held.descriptors > expected - FEW, "{held:?}, not {expected} descriptors");
        held
    }
}

async fn dial(peer: &Child) -> EndpointStream {
    let dialer = Dialer::new(config());
    let stream = dialer.dial("127.0.0.1", peer.word.parse().unwrap()).await.unwrap();
    assert_eq!(stream.info().verdict(), Verdict::Rdma, "{}", stream.info().reason());
    stream
}

async fn round_trip(stream: &mut EndpointStream) {
    stream.write_all(&[5; 1000]).await.unwrap();
    stream.flush().await.unwrap();
    stream.read_exact(&mut [0; 1000]).await.unwrap();
}

#[test]
fn a_connection_holds_two_descriptors_and_its_receive_buffers() {
    const CONNECTIONS: i64 = 16;
    /// 1.6 MiB.
    const MOST: i64 = (16 << 20) / 10;
    super::alone(Runtime::Idle, async {
        let peer = Child::start(&[], "echo");
        // The first connection also opens the device, and the connection to the peer's process.
        let mut streams = vec![dial(&peer).await];
        round_trip(&mut streams[0]).await;
        let before = Held::now();
        for _ in 0..CONNECTIONS {
            let mut stream = dial(&peer).await;
            round_trip(&mut stream).await;
            streams.push(stream);
        }
        let held = Held::beyond(before, 2 * CONNECTIONS).await;
        println!("{CONNECTIONS} connections: {held:?}");
        let each = held.shared / CONNECTIONS;
        assert!(each <= MOST && each > MOST / 2, "{each} bytes of receive buffers a connection");
        assert!(held.touched <= held.shared / 4, "touched before they were used: {held:?}");
    });
}

/// Returns how often threads of this process have slept so far.
fn sleeps() -> u64 {
    let status = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("status"));
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    // A thread may end meanwhile.
    let texts = threads.filter_map(|task| status(task.unwrap()).ok());
    let count = |text: String| {
        text.split_once("\nvoluntary_ctxt_switches:").unwrap().1.lines().next().map(str::to_owned)
    };
    texts.map(|text| count(text).unwrap().trim().parse::<u64>().unwrap()).sum()
}

/// In a runtime with workers, each of the first 32 byte streams has a completion queue of its own: two
/// descriptors, and one for each end of the socket that wakes it. Their supervisors wake together.
#[test]
fn idle_connections_wake_together() {
    const PAIRS: i64 = 20;
    const QUEUES: i64 = 32;
    const NEVER: Duration = Duration::from_secs(3600);
    super::alone(Runtime::MultiThread, async {
        let config = config().ping_interval(NEVER).ping_timeout(NEVER);
        let mut listener = listen(config.clone()).await;
        let (dialer, port) = (Dialer::new(config), listener.local_addr().port());
        let (mut pairs, mut first) = (Vec::new(), None);
        for _ in 0..=PAIRS {
            let (client, server) = tokio::join!(dialer.dial("127.0.0.1", port), listener.next());
            let (mut client, mut server) = (client.unwrap(), server.unwrap());
            assert_eq!(client.info().verdict(), Verdict::Rdma, "{}", client.info().reason());
            client.write_all(&[5; 1000]).await.unwrap();
            client.flush().await.unwrap();
            server.read_exact(&mut [0; 1000]).await.unwrap();
            pairs.push((client, server));
            // The first ones also open the device, and the connection to this process.
            first.get_or_insert_with(Held::now);
        }
        // The other connections share a queue, which has such a socket, too.
        Held::beyond(first.unwrap(), 2 * 2 * PAIRS + 4 * (QUEUES - 2) + 2).await;
        // The device's thread has done its last checks.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (start, before) = (Instant::now(), sleeps());
        tokio::time::sleep(Duration::from_secs(4)).await;
        let rounds = start.elapsed().as_millis() / 500 + 1;
        // A thread that has ended takes its count along.
        let sleeps = sleeps().saturating_sub(before);
        println!("{sleeps} sleeps in {rounds} rounds");
        assert!(u128::from(sleeps) <= 10 * rounds, "{sleeps} sleeps in {rounds} rounds");
        drop(pairs);
    });
}
