//! The processes of bad neighbours.

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::net::TcpStream;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use tonic::transport::{Channel, Endpoint};
use tonic_rdma::RdmaConnector;
use tonic_rdma_proto::transfer::PutRequest;
use tonic_rdma_proto::transfer::transfer_client::TransferClient;

use super::cell::{Neighbour, Transport};
use super::process::end_with_parent;
use super::runtimes::Flavour;
use super::server::{payload, print_line};

/// Connections that a half-open neighbour holds.
const HALF_OPEN: usize = 1000;
/// Calls that a flooding neighbour has in flight.
const CALLS: usize = 64;
/// Loops of a paced neighbour, and the time from the begin of a call to the next one of its loop: 800 calls a second.
const PACED: usize = 8;
const PAUSE: Duration = Duration::from_millis(10);
/// Time from the begin of a call to the next one of its loop, of a busy neighbour with [`CALLS`] loops: 16 000 calls a second.
const BUSY_PAUSE: Duration = Duration::from_millis(4);
/// Loops of a stopped neighbour, and the time from the begin of a call to the next one of its loop: 200 calls a second.
const STOPPED: usize = 4;
const STOPPED_PAUSE: Duration = Duration::from_millis(20);
/// How long a neighbour makes calls before it is stopped: until a moment after all its loops have begun a call.
const LIFE: Duration = Duration::from_micros(61_000);
/// Bytes of a large call.
const LARGE: usize = 4 << 20;

/// Does harm until the parent process ends.
pub(crate) fn run(arguments: &[String]) -> ! {
    let [transport, runtime, neighbour, address] = arguments else {
        panic!("bad TRANSPORT RUNTIME NEIGHBOUR ADDRESS, not {arguments:?}")
    };
    end_with_parent(|| {});
    let transport = Transport::from_name(transport);
    Flavour::from_name(runtime).run(async {
        match Neighbour::from_name(neighbour) {
            Neighbour::None => panic!("no neighbour does nothing"),
            Neighbour::Flooding => calls(transport, address, CALLS, 64 << 10, None, || {}).await,
            Neighbour::Paced => calls(transport, address, PACED, 64 << 10, Some(PAUSE), || {}).await,
            Neighbour::Busy => calls(transport, address, CALLS, 64 << 10, Some(BUSY_PAUSE), || {}).await,
            Neighbour::Stopped => {
                let dies = || drop(std::thread::spawn(stop));
                calls(transport, address, STOPPED, LARGE, Some(STOPPED_PAUSE), dies).await;
            }
            Neighbour::HalfOpen => hold_connections(address),
            Neighbour::Scribbling => {
                std::thread::spawn(overwrite_shared_memory);
                calls(transport, address, 4, 256 << 10, None, || {}).await;
            }
        }
    });
    unreachable!("a neighbour goes on for ever")
}

/// Keeps `count` calls in flight, of 64 bytes and of `bytes` bytes; with a `pause`, each of them begins that long after the last, and
/// their begins are spread over the pause. Connects again when the connection has ended. Calls `begun` with the first calls.
async fn calls(
    transport: Transport,
    address: &str,
    count: usize,
    bytes: usize,
    pause: Option<Duration>,
    begun: impl Fn(),
) {
    let mut announce = true;
    loop {
        if let Ok(channel) = connect(transport, address).await {
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
                print_line("ready");
                begun();
            }
            for call in calls {
                let _ = call.await;
            }
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn connect(transport: Transport, address: &str) -> Result<Channel, tonic::transport::Error> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
    match transport {
        Transport::Tcp => endpoint.connect().await,
        Transport::Rdma => endpoint.connect_with_connector(RdmaConnector::new()).await,
    }
}

/// Holds connections on which nothing is sent. Replaces those that the server closed.
fn hold_connections(address: &str) {
    let mut held: Vec<TcpStream> = Vec::new();
    let mut announced = false;
    loop {
        let open = |stream: &TcpStream| matches!(stream.peek(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
        held.retain(open);
        while held.len() < HALF_OPEN {
            let Ok(stream) = TcpStream::connect(address) else { break };
            stream.set_nonblocking(true).unwrap();
            held.push(stream);
        }
        if !std::mem::replace(&mut announced, true) {
            print_line("ready");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Stops this process after its [`LIFE`].
fn stop() {
    std::thread::sleep(LIFE);
    kill_process(getpid(), Signal::STOP).unwrap();
}

/// Overwrites all memory of this process that other processes share, again and again. The kernel writes it, and refuses to write to
/// mappings that are only for reading.
fn overwrite_shared_memory() {
    let memory = OpenOptions::new().read(true).write(true).open("/proc/self/mem").unwrap();
    for round in 0_u64.. {
        std::thread::sleep(Duration::from_millis(fastrand::u64(..20)));
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        for line in maps.lines().filter(|line| line.contains("/memfd:")) {
            let Some((range, _)) = line.split_once(' ') else { continue };
            let Some((start, end)) = range.split_once('-') else { continue };
            let number = |hex| u64::from_str_radix(hex, 16).unwrap_or_default();
            let (start, end) = (number(start), number(end));
            // What the device keeps is in small mappings, and at the starts of large ones.
            let length = (end - start).min(64 << 10) as usize;
            let word = match round % 4 {
                0 => 0,
                1 => u64::MAX,
                2 => round,
                _ => fastrand::u64(..),
            };
            let _ = memory.write_at(&payload(length, word), start);
        }
    }
}
