//! The processes of bad neighbours.

use std::io::ErrorKind;
use std::net::TcpStream;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic::transport::Channel;
use tonic_rdma::Policy;
use tonic_rdma::unstable::wire::hello::{Answer, Message};
use tonic_rdma_commands::process::end_with_stdin;
use tonic_rdma_proto::transfer::PutRequest;
use tonic_rdma_proto::transfer::transfer_client::TransferClient;

use super::cell::{Caller, Level, Transport};
use super::honest::connect;
use super::hostile::{self, Scribble};
use super::server::{payload, print_line};
use super::system;

/// Connections that a half-open neighbour holds.
const HALF_OPEN: usize = 1000;
/// Calls that a flooding neighbour has in flight.
const CALLS: usize = 64;
/// Loops of a paced neighbour, and the time between the starts of two calls of a loop: 800 calls a second.
const PACED: usize = 8;
const PAUSE: Duration = Duration::from_millis(10);
/// Time between the starts of two calls of a loop, in a busy neighbour with [`CALLS`] loops: 16 000 calls a
/// second.
const BUSY_PAUSE: Duration = Duration::from_millis(4);
/// Loops of a stopped neighbour, and the time between the starts of two calls of a loop: 200 calls a second.
const STOPPED: usize = 4;
const STOPPED_PAUSE: Duration = Duration::from_millis(20);
/// Time from the start of a neighbour's loops until it stops itself. Each loop has started calls by then, and
/// one loop a moment before.
const LIFE: Duration = Duration::from_micros(61_000);
/// Bytes of a large call.
const LARGE: usize = 4 << 20;

/// What a neighbour says when it has done harm.
pub(crate) const READY: &str = "ready";
/// Processes, and connections of each, that hold connections to the server's device.
const HOLDERS: (usize, usize) = (96, 32);
/// Connections that are dialled at once, and how long each of them may take.
const DIALS: usize = 64;
const DIAL: Duration = Duration::from_secs(1);

/// Says, once, that this process has done harm.
fn harmed() {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, SeqCst) {
        print_line(READY);
    }
}

/// Does harm until the parent process ends.
pub(crate) fn run(caller: &Caller) -> ! {
    let Caller { transport, ref address, ref names, .. } = *caller;
    if caller.level == Level::Stranger {
        system::become_user(system::OTHER_USER);
    }
    end_with_stdin(|| {}).unwrap();
    let kind = caller.neighbour.name();
    // The device of this process, before its connections use it.
    let _device = tonic_rdma_verbs::soft::open();
    caller.runtime.build().unwrap().block_on(async {
        // Makes large calls without a pause, and begins to do harm with the first of them.
        let beside = |begun: fn()| calls(transport, address, 4, 256 << 10, None, begun);
        match kind {
            "flooding" => calls(transport, address, CALLS, 64 << 10, None, harmed).await,
            "paced" => calls(transport, address, PACED, 64 << 10, Some(PAUSE), harmed).await,
            "busy" => calls(transport, address, CALLS, 64 << 10, Some(BUSY_PAUSE), harmed).await,
            "stopped" => {
                let stops = || end_after(LIFE, Signal::STOP);
                calls(transport, address, STOPPED, LARGE, Some(STOPPED_PAUSE), stops).await;
            }
            "dying" => {
                beside(|| end_after(Duration::from_micros(fastrand::u64(..200_000)), Signal::KILL)).await
            }
            "half-open" => hold_connections(address),
            "reconnecting" => dial(transport, address, 4, harmed).await,
            "scribbling" => {
                const PATTERNS: [Scribble; 4] =
                    [Scribble::Zeros, Scribble::Ones, Scribble::Counters, Scribble::Random];
                beside(|| spawn(|| hostile::scribble(PATTERNS[fastrand::usize(..4)], harmed))).await;
            }
            "deaf" => {
                let deafen = || {
                    hostile::block_service_thread();
                    harmed();
                };
                beside(deafen).await;
            }
            "forking" => {
                fn fork() {
                    loop {
                        system::fork_and_run(|| std::thread::sleep(Duration::from_millis(10)));
                        harmed();
                    }
                }
                beside(|| spawn(fork)).await;
            }
            "blocking" => beside(|| spawn(|| hostile::make_everything_blocking(harmed))).await,
            "knocking" | "lingering" => hostile::knock(names, kind == "lingering", |_, _| harmed()),
            "replies" | "full-pipe" | "pipe-without-reader" | "tcp" | "locked-tcp" => {
                hostile::stand_between(kind, harmed);
                dial(transport, address, 4, || {}).await;
            }
            "truncated" | "huge-pages" | "device" => {
                std::thread::spawn(move || {
                    loop {
                        hostile::swap_memory(kind, 1 << 20, harmed);
                        std::thread::sleep(Duration::from_micros(fastrand::u64(..500)));
                    }
                });
                dial(transport, address, 4, || {}).await;
            }
            "unanswering" | "full-backlog" => {
                hostile::block_service_thread();
                let _held = if kind == "full-backlog" { hostile::fill_backlog() } else { Vec::new() };
                harmed();
                dial(transport, address, DIALS, || {}).await;
            }
            "offering" | "proven" => {
                let (_channel, queue_pair) = queue_pair_of(address).await;
                if kind == "offering" {
                    hostile::offer_memory("device", &queue_pair, harmed);
                } else {
                    hostile::hold_connections(HOLDERS.0, HOLDERS.1, &queue_pair);
                    harmed();
                }
                std::future::pending::<()>().await;
            }
            other => panic!("{other} does nothing"),
        }
    });
    unreachable!("a neighbour goes on forever")
}

/// Connects and makes a call of 64 KiB, again and again, `count` times at once.
async fn dial(transport: Transport, address: &str, count: usize, begun: fn()) {
    let dials: Vec<_> = (0..count)
        .map(|_| {
            let address = address.to_owned();
            tokio::spawn(async move {
                for seed in 0.. {
                    let payload = payload(64 << 10, seed).into();
                    let request = PutRequest { seed, payload, ..Default::default() };
                    let call = async {
                        let channel = connect(transport, &address, Policy::Prefer).await.ok()?;
                        begun();
                        TransferClient::new(channel).put(request).await.ok()
                    };
                    let _ = tokio::time::timeout(DIAL, call).await;
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            })
        })
        .collect();
    for dial in dials {
        let _ = dial.await;
    }
}

/// Connects to the server. Returns the connection, and the address of the server's queue pair, which it tells
/// in the negotiation.
async fn queue_pair_of(address: &str) -> (Channel, Vec<u8>) {
    let relay = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let here = relay.local_addr().unwrap().to_string();
    let channel = tokio::spawn(async move { connect(Transport::Rdma, &here, Policy::Prefer).await.unwrap() });
    let mut from = relay.accept().await.unwrap().0;
    let mut to = tokio::net::TcpStream::connect(address).await.unwrap();
    to.write_all(&message(&mut from).await.0).await.unwrap();
    let (bytes, answer) = message(&mut to).await;
    let Message::ServerHello(Answer::Accept { queue_pair, .. }) = answer else { panic!("{answer:?}") };
    from.write_all(&bytes).await.unwrap();
    tokio::spawn(async move { tokio::io::copy_bidirectional(&mut from, &mut to).await });
    (channel.await.unwrap(), queue_pair)
}

/// Reads one message of the negotiation.
async fn message(tcp: &mut tokio::net::TcpStream) -> (Vec<u8>, Message) {
    let mut received = Vec::new();
    loop {
        if let Ok(Some((message, _))) = Message::decode(&received) {
            return (received, message);
        }
        assert_ne!(tcp.read_buf(&mut received).await.unwrap(), 0, "closed after {received:?}");
    }
}

/// Makes calls in `count` loops, half of them with 64 bytes and half with `bytes` bytes. A call starts when
/// the last one of its loop has ended, and with a `pause` at least that long after the start of the last one.
/// The starts of the loops are spread over the pause. Connects again when the connection has ended. Calls
/// `begun` once, when the loops have started.
async fn calls(
    transport: Transport,
    address: &str,
    count: usize,
    bytes: usize,
    pause: Option<Duration>,
    begun: fn(),
) {
    let mut announce = true;
    loop {
        if let Ok(channel) = connect(transport, address, Policy::Prefer).await {
            let calls: Vec<_> = (0..count)
                .map(|index| {
                    let mut client = TransferClient::new(channel.clone());
                    let bytes = if index % 2 == 0 { bytes } else { 64 };
                    tokio::spawn(async move {
                        let first = tokio::time::Instant::now()
                            + pause.unwrap_or_default() * index as u32 / count as u32;
                        let mut ticks = tokio::time::interval_at(first, pause.unwrap_or(Duration::MAX / 4));
                        for seed in 0.. {
                            if pause.is_some() {
                                ticks.tick().await;
                            }
                            let payload = payload(bytes, seed).into();
                            let request = PutRequest { seed, payload, ..Default::default() };
                            if client.put(request).await.is_err() {
                                return;
                            }
                        }
                    })
                })
                .collect();
            if std::mem::take(&mut announce) {
                begun();
            }
            for call in calls {
                let _ = call.await;
            }
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Holds connections on which nothing is sent. Replaces those that the server closed.
fn hold_connections(address: &str) {
    let mut held: Vec<TcpStream> = Vec::new();
    loop {
        let open = |stream: &TcpStream| matches!(stream.peek(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
        held.retain(open);
        while held.len() < HALF_OPEN {
            let Ok(stream) = TcpStream::connect(address) else { break };
            stream.set_nonblocking(true).unwrap();
            held.push(stream);
        }
        harmed();
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Stops or kills this process after `life`.
fn end_after(life: Duration, signal: Signal) {
    harmed();
    spawn(move || {
        std::thread::sleep(life);
        kill_process(getpid(), signal).unwrap();
    });
}

/// Runs `work` beside the calls.
fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) {
    std::thread::spawn(work);
}
