//! The honest client: calls the server in a loop, while a thread keeps the bad neighbour going and watches
//! the server.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use tonic::transport::{Channel, Endpoint};
use tonic_rdma::{Config, Policy, RdmaConnector};
use tonic_rdma_commands::process::{Child, end_with_stdin};
use tonic_rdma_commands::{Flavour, Named as _, chain, one_line, statistics};
use tonic_rdma_proto::transfer::PutRequest;
use tonic_rdma_proto::transfer::transfer_client::TransferClient;

use super::bad::READY;
use super::cell::{Caller, Cell, Level, Neighbour, Options, Transport};
use super::server::{self, Resources, payload, print_line, start};
use super::{hostile, system};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Calls before the neighbour starts.
const WARM: u64 = 50;
/// Time after which a call has failed.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two readings of the server's resources, and of whether the neighbour still runs.
const READ_INTERVAL: Duration = Duration::from_millis(100);
/// Time between two visits of another honest client.
const VISITS: Duration = Duration::from_secs(5);
/// Number of stopped clients that are there at once.
const STOPPED: usize = 2;

/// The result of one measurement.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measured {
    /// Microseconds of each call.
    pub(crate) micros: Vec<f64>,
    pub(crate) failed: u64,
    pub(crate) held: Resources,
    /// A fault other than failed calls.
    pub(crate) fault: Option<String>,
    /// Calls of the neighbour that the server served, each second.
    pub(crate) others_each_second: f64,
}

impl Measured {
    fn fail(&mut self, cell: Cell, error: &Failure) {
        eprintln!("{cell:?}: {error}");
        self.failed += 1;
    }

    /// Returns the latency that `share` of the calls do not exceed, in microseconds.
    pub(crate) fn quantile(&self, share: f64) -> f64 {
        statistics::quantile(self.micros.iter().copied(), share)
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (calls, failed) = (self.micros.len(), self.failed);
        let (half, most) = (self.quantile(0.5), self.quantile(0.99));
        write!(
            formatter,
            "{calls} calls, {failed} failed, p50 {half:.0} µs, p99 {most:.0} µs, others {:.0}/s, {:?}",
            self.others_each_second, self.held
        )
    }
}

pub(crate) fn measure(cell: Cell, options: &Options) -> Measured {
    let runtime = options.runtime.to_string();
    let (mut server, address) = start(&["server", cell.transport.name(), &runtime]);
    let server_id = server.id().expect("a process of this host");
    let (mut measured, elapsed) = options.runtime.build().unwrap().block_on(async {
        let channel = connect(cell.transport, &address, Policy::Require).await.expect("the first connection");
        let mut client = TransferClient::new(channel);
        for seed in 0..WARM {
            call(&mut client, cell.bytes, seed).await.expect("a call without a neighbour");
        }
        let before = Resources::by(server_id);
        let mut bad = BadNeighbours::start(cell, options.runtime, &address, server_id);
        let ended = Arc::new(AtomicBool::new(false));
        let watched = Arc::clone(&ended);
        let watch = std::thread::spawn(move || {
            let mut held = before;
            while !watched.load(SeqCst) {
                std::thread::sleep(READ_INTERVAL);
                held = held.max(Resources::by(server_id));
                bad.keep_going();
            }
            (held, bad.harmless)
        });
        let mut measured = Measured::default();
        let (begun, mut visits) = (Instant::now(), 0);
        let pause = VISITS.min(options.duration() / 2);
        let mut seed = WARM;
        while begun.elapsed() < options.duration() {
            let begin = Instant::now();
            match call(&mut client, cell.bytes, seed).await {
                Ok(()) => measured.micros.push(begin.elapsed().as_secs_f64() * 1e6),
                Err(error) => measured.fail(cell, &error),
            }
            seed += 1;
            // Now and then, another honest client connects beside the neighbour.
            if begun.elapsed() > pause * (visits + 1) {
                visits += 1;
                let word = start(&caller("visit", cell, &runtime, &address, "")).1;
                if word != SERVED {
                    measured.fail(cell, &format!("another client: {word}").into());
                }
            }
        }
        ended.store(true, SeqCst);
        let (held, harmless) = watch.join().unwrap();
        measured.held = held;
        measured.fault = held.above(before, cell.neighbour.bound());
        if harmless {
            measured.fault = Some("a neighbour did no harm".into());
        }
        (measured, begun.elapsed())
    });
    server.close();
    let served: u64 = server.line(server::TIMEOUT).unwrap().parse().expect("the number of calls served");
    let others = served.saturating_sub(measured.micros.len() as u64 + measured.failed + WARM);
    measured.others_each_second = others as f64 / elapsed.as_secs_f64();
    measured
}

/// Returns the arguments of a process that calls the server.
fn caller<'a>(role: &'a str, cell: Cell, runtime: &'a str, address: &'a str, names: &'a str) -> [&'a str; 7] {
    [role, cell.transport.name(), runtime, cell.neighbour.name(), cell.level.name(), address, names]
}

/// What a process of [`visit`] says after its call.
const SERVED: &str = "served";

/// Makes one call to the server, and says how it went: as a third user, if the neighbour is a stranger.
pub(crate) fn visit(caller: &Caller) {
    if caller.level == Level::Stranger {
        system::become_user(system::OTHER_USER - 1);
    }
    end_with_stdin(|| {}).unwrap();
    let visit = async {
        let channel = connect(caller.transport, &caller.address, Policy::Require).await?;
        call(&mut TransferClient::new(channel), 64, 0).await
    };
    let result = caller.runtime.build().unwrap().block_on(visit);
    print_line(result.map_or_else(|error: Failure| one_line(&chain(&*error)), |()| SERVED.to_owned()));
}

/// Connects to the server, over RDMA by this policy.
pub(crate) async fn connect(transport: Transport, address: &str, policy: Policy) -> Result<Channel, Failure> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
    if transport == Transport::Tcp {
        return Ok(endpoint.connect().await?);
    }
    let config = Config::from_env()?.policy(policy);
    Ok(endpoint.connect_with_connector(RdmaConnector::new().config(config)).await?)
}

async fn call(client: &mut TransferClient<Channel>, bytes: usize, seed: u64) -> Result<(), Failure> {
    let request = PutRequest { seed, payload: payload(bytes, seed).into(), ..Default::default() };
    let reply = tokio::time::timeout(TIMEOUT, client.put(request)).await??;
    if reply.into_inner().bytes == bytes as u64 { Ok(()) } else { Err("another number of bytes".into()) }
}

/// The bad neighbours of a cell, which are processes.
#[derive(Debug)]
struct BadNeighbours {
    cell: Cell,
    runtime: String,
    address: String,
    /// The names of the server's sockets.
    names: String,
    processes: VecDeque<Child>,
    /// Whether any neighbour did no harm.
    harmless: bool,
}

impl BadNeighbours {
    fn start(cell: Cell, runtime: Flavour, address: &str, server: u32) -> Self {
        let (address, runtime) = (address.to_owned(), runtime.to_string());
        let names = hostile::listening_sockets(server).join(" ");
        let mut neighbours =
            Self { cell, runtime, address, names, processes: VecDeque::new(), harmless: false };
        if cell.neighbour != Neighbour::NONE {
            neighbours.add();
        }
        neighbours
    }

    /// Starts a neighbour, and waits until it does harm.
    fn add(&mut self) {
        let (process, line) = start(&caller("bad", self.cell, &self.runtime, &self.address, &self.names));
        self.harmless |= line != READY;
        self.processes.push_back(process);
    }

    /// Starts the next neighbour that stops itself, if that is its kind, and replaces those that have ended.
    fn keep_going(&mut self) {
        if self.cell.neighbour.name() == "stopped" {
            // The oldest is killed while it is stopped.
            while self.processes.len() > STOPPED {
                self.processes.pop_front();
            }
            self.add();
        }
        let before = self.processes.len();
        self.processes.retain(|process| process.wait(Duration::ZERO).is_none());
        for _ in self.processes.len()..before {
            self.add();
        }
    }
}
