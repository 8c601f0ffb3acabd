//! Counts the threads that wake for a unary call, and the wake-ups that both ends of it issue.
//!
//! Client and server are two processes. Each step of a call begins when all threads of both processes sleep,
//! so that every message finds a peer that sleeps, however fast the threads run.

use std::collections::BTreeMap;
use std::io::BufRead as _;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::Builder;
use tokio::sync::mpsc;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Endpoint, Server};
use tonic_rdma::{RdmaChannel, RdmaConnector, RdmaIncoming, RdmaServer, Verdict};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;

use support::{Child, ScriptedGreeter, announce, say};

use crate::alone;
use crate::system_calls::{EPOLL, FUTEX_WAKE, SUPERVISOR, SystemCalls};

const CALLS: usize = 60;
const FIRST_CALLS: usize = 10;
/// The thread of the software device. It looks after connections some 30 times a second while there is
/// traffic, whatever the number of calls.
const DEVICE: &str = "rdma-soft";

/// What carries the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    /// tonic over TCP.
    Tcp,
    /// tonic over RDMA.
    Http2,
    /// Calls without HTTP/2.
    Native,
}

impl Path {
    const ALL: [Self; 3] = [Self::Tcp, Self::Http2, Self::Native];

    fn named(name: &str) -> Self {
        Self::ALL.into_iter().find(|path| format!("{path:?}") == name).expect("the name of a path")
    }

    async fn serve(self, greeter: ScriptedGreeter) {
        let service = GreeterServer::new(greeter);
        if self == Self::Tcp {
            let incoming =
                TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap().with_nodelay(Some(true));
            announce(incoming.local_addr().unwrap());
            return Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
        }
        let incoming = RdmaIncoming::builder().config(config()).bind("127.0.0.1:0").await.unwrap();
        announce(incoming.local_addr());
        if self == Self::Native {
            return RdmaServer::new().add_service(service).serve_with_incoming(incoming).await.unwrap();
        }
        Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
    }

    /// Makes a call for each order, and announces its end.
    async fn call(self, address: &str, orders: mpsc::UnboundedReceiver<()>) {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        match self {
            Self::Tcp => calls(GreeterClient::new(endpoint.connect().await.unwrap()), orders).await,
            Self::Http2 => {
                let connector = RdmaConnector::new().config(config());
                let channel = endpoint.connect_with_connector(connector.clone()).await.unwrap();
                let info = connector.last_connection().unwrap();
                assert_eq!(info.verdict(), Verdict::Rdma, "{}", info.reason());
                calls(GreeterClient::new(channel), orders).await;
            }
            Self::Native => {
                let channel = RdmaChannel::builder(endpoint).config(config()).connect().await.unwrap();
                let info = channel.last_connection().unwrap();
                assert!(info.is_native(), "{}", info.reason());
                calls(GreeterClient::new(channel), orders).await;
            }
        }
    }
}

/// Settings with which no pings wake anything.
fn config() -> tonic_rdma::Config {
    const NEVER: Duration = Duration::from_secs(3600);
    support::config().ping_interval(NEVER).ping_timeout(NEVER)
}

async fn calls<T>(mut client: GreeterClient<T>, mut orders: mpsc::UnboundedReceiver<()>)
where
    T: tonic::client::GrpcService<tonic::body::Body>,
    T::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    T::ResponseBody: http_body::Body<Data = bytes::Bytes> + Send + 'static,
    <T::ResponseBody as http_body::Body>::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send,
{
    announce("connected");
    while orders.recv().await.is_some() {
        assert_eq!(say(&mut client, "hold").await.unwrap(), "held");
        announce("answered");
    }
}

/// Serves or calls, in a runtime with some workers. This thread, which is not one of the runtime, takes orders
/// from stdin: to call, to release a call, or to tell the system calls of the runtime so far.
pub(crate) fn play(role: &str) {
    let words: Vec<String> = role.split(' ').map(str::to_owned).collect();
    let [action, path, workers, counting, address] = &words[..] else { panic!("unknown role {role}") };
    let (path, workers) = (Path::named(path), workers.parse().unwrap());
    let (action, counting, address) = (action.clone(), counting == "counting", address.clone());
    announce(rustix::thread::gettid().as_raw_nonzero());
    let counts = Arc::new(OnceLock::new());
    let greeter = ScriptedGreeter::new();
    let (order, orders) = mpsc::unbounded_channel();
    thread::spawn({
        let (greeter, counts, action) = (greeter.clone(), Arc::clone(&counts), action.clone());
        move || {
            if counting {
                // The threads of the runtime are counted, too.
                let _ = counts.set(SystemCalls::count_but(EPOLL));
            }
            let runtime = Builder::new_multi_thread().worker_threads(workers).enable_all().build().unwrap();
            let work = match &*action {
                "serve" => runtime.spawn(path.serve(greeter)),
                _ => runtime.spawn(async move { path.call(&address, orders).await }),
            };
            runtime.block_on(work).unwrap();
        }
    });
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match &*line {
            "call" => order.send(()).unwrap(),
            "release" => greeter.release(1),
            _ => match counts.get() {
                Some(Ok(counts)) => {
                    let calls = counts.so_far();
                    let count = |number| calls.get(&number).copied().unwrap_or(0);
                    let [events, writes, futexes, requests] =
                        [libc::SYS_sendto, libc::SYS_write, FUTEX_WAKE, libc::SYS_sendmsg].map(count);
                    announce(format!("{events} {writes} {futexes} {requests}"));
                }
                _ => announce("not permitted"),
            },
        }
    }
}

/// The voluntary context switches of threads that all sleep, by the number of the thread.
type Switches = BTreeMap<String, u64>;

/// Returns how often threads went to sleep between the counts.
fn between(before: &Switches, after: &Switches) -> u64 {
    after.iter().map(|(thread, count)| count - before.get(thread).unwrap_or(&0)).sum()
}

/// A process that serves or calls.
struct End {
    child: Child,
    /// The thread that takes the orders.
    driver: String,
}

impl End {
    fn start(spin: &str, role: String) -> Self {
        let mut child = Child::start(&["env", &format!("RDMA_SPIN_LIMIT={spin}")], &role);
        let driver = std::mem::take(&mut child.word);
        child.word = child.next_word();
        Self { child, driver }
    }

    /// Returns the switches of all threads but the one that takes the orders, and the device's; `None` unless
    /// they all sleep.
    fn switches(&self) -> Option<Switches> {
        let tasks = format!("/proc/{}/task", self.child.process.id());
        let mut switches = Switches::new();
        for entry in std::fs::read_dir(tasks).unwrap() {
            let entry = entry.unwrap();
            // A thread may have ended meanwhile.
            let Ok(status) = std::fs::read_to_string(entry.path().join("status")) else { return None };
            let value = |name: &str| {
                let line = status.lines().find_map(|line| line.strip_prefix(name));
                line.and_then(|line| line.split_whitespace().next()).unwrap_or_default()
            };
            if [DEVICE, SUPERVISOR].contains(&value("Name:")) {
                continue;
            }
            if value("State:") != "S" {
                return None;
            }
            let thread = entry.file_name().into_string().unwrap();
            if thread != self.driver {
                switches.insert(thread, value("voluntary_ctxt_switches:").parse().unwrap());
            }
        }
        Some(switches)
    }

    /// Returns the wake-ups so far; `None` if they can't be counted here.
    fn wakes(&mut self) -> Option<Wakes> {
        self.child.tell("count");
        let word = self.child.next_word();
        let mut counts = word.split(' ').map_while(|count| count.parse().ok());
        let mut next = || counts.next();
        Some(Wakes { events: next()?, writes: next()?, futexes: next()?, requests: next()? })
    }
}

/// The system calls of a process by which it wakes threads.
#[derive(Clone, Copy, Debug)]
struct Wakes {
    /// Events of completion queues of the peer.
    events: u64,
    /// Events within the process, and lines for stdout.
    writes: u64,
    futexes: u64,
    /// Requests to the peer's device.
    requests: u64,
}

impl Wakes {
    fn since(self, before: Self) -> Self {
        Self {
            events: self.events - before.events,
            writes: self.writes - before.writes,
            futexes: self.futexes - before.futexes,
            requests: self.requests - before.requests,
        }
    }
}

/// A client and its server.
struct Ends {
    server: End,
    client: End,
}

/// How often threads went to sleep in one step of a call.
#[derive(Clone, Copy, Debug, Default)]
struct Step {
    client: u64,
    server: u64,
}

impl Ends {
    /// Longest time of a step.
    const LONGEST: Duration = Duration::from_secs(60);

    fn start(path: Path, workers: usize, spin: &str, counting: bool) -> Self {
        let counting = if counting { "counting" } else { "uncounted" };
        let server = End::start(spin, format!("serve {path:?} {workers} {counting} -"));
        let address = &server.child.word;
        let client = End::start(spin, format!("call {path:?} {workers} {counting} {address}"));
        let mut ends = Self { server, client };
        (0..FIRST_CALLS).for_each(|_| _ = ends.call());
        ends
    }

    /// Waits until all threads of both processes sleep, and nothing is due soon. Returns the switches of the
    /// client and of the server.
    fn settled(&self) -> [Switches; 2] {
        const READINGS: usize = 4;
        let start = Instant::now();
        let (mut last, mut readings) = (None, 0);
        loop {
            let now = self.client.switches().zip(self.server.switches());
            readings = if now.is_some() && now == last { readings + 1 } else { 0 };
            if readings == READINGS
                && let Some((client, server)) = now
            {
                return [client, server];
            }
            assert!(
                start.elapsed() < Self::LONGEST,
                "the threads do not come to rest: {last:?}, then {now:?}"
            );
            last = now;
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns the wake-ups of the client and of the server so far; `None` if they can't be counted here.
    fn wakes(&mut self) -> Option<[Wakes; 2]> {
        self.settled();
        Some([self.client.wakes()?, self.server.wakes()?])
    }

    /// Makes a call. Returns the switches of the request and of the answer.
    fn call(&mut self) -> [Step; 2] {
        let before = self.settled();
        self.client.child.tell("call");
        // The server has woken for the request, and sleeps again.
        let start = Instant::now();
        let asked = loop {
            let now = self.settled();
            if between(&before[1], &now[1]) > 0 {
                break now;
            }
            assert!(start.elapsed() < Self::LONGEST, "the request does not arrive: {before:?}, then {now:?}");
        };
        self.server.child.tell("release");
        assert_eq!(self.client.child.next_word(), "answered");
        let answered = self.settled();
        [(before, &asked), (asked.clone(), &answered)].map(|(before, after)| Step {
            client: between(&before[0], &after[0]),
            server: between(&before[1], &after[1]),
        })
    }
}

/// Returns the value that one in `part` calls does not exceed.
fn quantile(mut values: Vec<u64>, part: usize) -> u64 {
    values.sort_unstable();
    values[values.len() / part]
}

/// How often threads go to sleep in a call that nothing disturbs.
#[derive(Clone, Copy, Debug)]
struct Undisturbed {
    /// At the server for the request, and at the client for the answer.
    arrivals: [u64; 2],
    /// With those of the client's begin, and of the server's answer.
    all: u64,
}

/// Returns what one in ten calls does not exceed. On a busy machine most calls may have more: a thread that gets
/// no core for some milliseconds makes the device's thread of the peer look after it, and a timer may run out.
fn undisturbed(path: Path, workers: usize, spin: &str) -> Undisturbed {
    let mut ends = Ends::start(path, workers, spin, false);
    let calls: Vec<_> = (0..CALLS).map(|_| ends.call()).collect();
    let of = |part: fn(&[Step; 2]) -> u64| quantile(calls.iter().map(part).collect(), 10);
    let found = Undisturbed {
        arrivals: [of(|call| call[0].server), of(|call| call[1].client)],
        all: of(|call| call.iter().map(|step| step.client + step.server).sum()),
    };
    println!("{path:?}, {workers} workers, spin limit {spin} µs: {found:?}");
    found
}

/// Each message wakes one thread of its receiver. The client begins, and the server answers, by an order of the
/// test, which wakes a thread, too. With several workers tokio then wakes another one for some of the tasks that
/// become ready, so that this part differs a little from run to run.
fn check_switches(workers: usize) {
    let _alone = alone();
    let margin = workers as u64 - 1;
    // Without spins, and with those of the default settings.
    for spin in ["0", "120"] {
        let [tcp, http2, native] = Path::ALL.map(|path| undisturbed(path, workers, spin));
        assert!(tcp.all >= 4, "not all threads slept before a step");
        for (path, found) in [(Path::Http2, http2), (Path::Native, native)] {
            assert_eq!(found.arrivals, [1, 1], "{path:?}: threads that a message wakes");
            assert!(found.all <= tcp.all + margin, "{path:?}: {found:?}; over TCP: {tcp:?}");
        }
    }
}

#[test]
fn a_message_wakes_one_thread_of_a_runtime_with_one_worker() {
    check_switches(1);
}

#[test]
fn a_message_wakes_one_thread_of_a_runtime_with_two_workers() {
    check_switches(2);
}

/// The events that both ends make for each call.
#[test]
fn each_message_of_a_call_makes_one_event() {
    /// One in so many calls is not disturbed by the machine.
    const UNDISTURBED: usize = 4;
    let _alone = alone();
    for workers in [1, 2] {
        for path in [Path::Http2, Path::Native] {
            let mut ends = Ends::start(path, workers, "0", true);
            let Some(mut before) = ends.wakes() else { return };
            let mut calls = Vec::new();
            for _ in 0..CALLS {
                ends.call();
                let after = ends.wakes().unwrap();
                calls.push([0, 1].map(|end| after[end].since(before[end])));
                before = after;
            }
            // A device that asks the other to look after a connection wakes threads, too. It does so after some
            // milliseconds in which the other end's thread got no core.
            calls.retain(|ends| ends.iter().all(|wakes| wakes.requests == 0));
            assert!(!calls.is_empty(), "in every call a device had to look after the peer");
            let of = |end: usize, part: fn(&Wakes) -> u64| {
                quantile(calls.iter().map(|ends| part(&ends[end])).collect(), UNDISTURBED)
            };
            let events = [0, 1].map(|end| of(end, |wakes| wakes.events));
            let writes = [0, 1].map(|end| of(end, |wakes| wakes.writes));
            let futexes = [0, 1].map(|end| of(end, |wakes| wakes.futexes));
            println!(
                "{path:?}, {workers} workers: events {events:?}, writes {writes:?}, futexes {futexes:?}"
            );
            // In HTTP/2 the call and the connection are two tasks at each end. If they run on two workers,
            // headers, message and trailers may be flushed one after the other, and the peer may wake and wait
            // again in between. The sender of a message looks once more whether the peer wants to be woken,
            // before it sleeps. If other threads of its end had the core meanwhile, the peer may have taken the
            // message and wait again: then it gets one event more.
            let most = match (workers, path) {
                (1, _) => [1, 1],
                (_, Path::Http2) => [2, 3],
                _ => [2, 2],
            };
            for (count, most) in events.iter().zip(most) {
                assert!((1..=most).contains(count), "{path:?}: events of client and server {events:?}");
            }
            if workers == 1 {
                // The client announces the end of the call.
                assert_eq!((writes, futexes), ([1, 0], [0, 0]), "{path:?}: other threads were woken");
            }
        }
    }
}
