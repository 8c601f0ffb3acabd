//! Clients that speak the frames themselves, against a server over the software device. What the process holds
//! for them has a bound: by what is allocated, and by what lies in memory that peers read or write.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

use std::collections::VecDeque;
use std::io::IoSlice;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http::Response;
use http_body::Frame;
use support::{Runtime, held_by_this_process, is_alone};
use tower::Service;

use super::*;
use crate::endpoint::{
    ConnectionFault, Deferred, Dialer, HeldBudget, Kept, LandedContent, MessageHandler, MessageSettings,
    Policy, Provider, Sender, Wire as _,
};
use crate::grpc::core::{Core, Role};
use crate::grpc::frame::{END, FrameHeader, Kind};
use tonic_rdma_verbs::memory::Pool;

/// What a connection may make the process hold beside twice its limit: its rings and tables, tasks of handlers,
/// and one reply.
const FIXED: u64 = 3 << 20;
/// A hang is a failure after this time. A busy machine may need much of it.
const LONG: Duration = Duration::from_secs(60);

/// A client whose messages are all its own, but for its SETTINGS. It takes no notice of what it receives.
#[derive(Debug)]
struct Raw {
    core: Core<Kept>,
    messages: VecDeque<Vec<u8>>,
    /// Why the connection has ended, if it has.
    end: Option<String>,
    after: Deferred,
}

impl MessageHandler for Raw {
    fn receive(&mut self, _: Bytes) -> Result<bool, ConnectionFault> {
        Ok(!self.messages.is_empty())
    }

    fn landed(&mut self, _: u64, _: Option<LandedContent>) {}

    fn transmit(&mut self, sender: &mut Sender<'_>) -> Result<(), ConnectionFault> {
        self.core.transmit(sender)?;
        while sender.room() > 0
            && let Some(message) = self.messages.pop_front()
        {
            sender.send(&[IoSlice::new(&message)])?;
        }
        Ok(())
    }

    fn peer_finished(&mut self) {
        self.end.get_or_insert("the server closed it".into());
    }

    fn ended(&mut self, fault: &ConnectionFault) {
        self.end.get_or_insert(fault.to_string());
    }

    fn after(&mut self) -> &mut Deferred {
        &mut self.after
    }
}

/// A service that a client may abuse.
#[derive(Clone)]
struct Abused {
    pool: Pool,
    reply: usize,
    /// Calls whose reply was made, or that wait for ever.
    begun: Arc<AtomicU64>,
}

impl tonic::server::NamedService for Abused {
    const NAME: &'static str = "test.Abused";
}

impl Service<Request<Body>> for Abused {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let reply = Reply { from: self.clone(), is_sent: false };
        Box::pin(async move {
            match request.uri().path() {
                "/test.Abused/Reply" => Ok(Response::new(Body::new(reply))),
                // The request is not read.
                _ => {
                    reply.from.begun.fetch_add(1, Ordering::Relaxed);
                    pending().await
                }
            }
        })
    }
}

/// A reply that is made when the server asks for it, in memory of the pool, or of the allocator if the pool has
/// none.
struct Reply {
    from: Abused,
    is_sent: bool,
}

impl http_body::Body for Reply {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if std::mem::replace(&mut self.is_sent, true) {
            return Poll::Ready(None);
        }
        let Abused { pool, reply, begun } = &self.from;
        begun.fetch_add(1, Ordering::Relaxed);
        let data = pool.allocate(*reply).map_or_else(|_| vec![1; *reply].into(), |buffer| buffer.freeze());
        Poll::Ready(Some(Ok(Frame::data(data))))
    }
}

/// What clients do to a server.
struct Abuse {
    connections: u32,
    /// The limit of a connection, in bytes.
    limit: u64,
    /// The window of SETTINGS, in bytes.
    window: usize,
    /// The memory that replies are made in, and their length, in bytes.
    pool: u64,
    reply: usize,
    calls: u32,
}

impl Abuse {
    /// Opens calls on all connections. `call` makes the messages of a call. Finds that the process holds no more
    /// than it may.
    fn run(self, call: impl Fn(u32) -> Vec<Vec<u8>>) {
        Runtime::MultiThread.run_for_ever(self.abuse(call));
    }

    async fn abuse(self, call: impl Fn(u32) -> Vec<Vec<u8>>) {
        let config = || {
            Config::default()
                .policy(Policy::Require)
                .provider(Provider::Soft)
                .handshake_timeout(LONG)
                .ping_timeout(LONG)
        };
        let (pool, begun, connections) = (Pool::for_sending(self.pool), Arc::default(), self.connections);
        let incoming = RdmaIncoming::builder().config(config()).bind("127.0.0.1:0").await.unwrap();
        let port = incoming.local_addr().port();
        let server = RdmaServer::new()
            .calls(CallConfig::default().connection_limit(self.limit))
            .add_service(Abused { pool: pool.clone(), reply: self.reply, begun: Arc::clone(&begun) });
        tokio::spawn(server.serve_with_incoming(incoming));
        let mut clients = Vec::new();
        for _ in 0..self.connections {
            clients.push(self.connect(config(), port).await);
        }
        let before = Held::now(&pool);
        let most = u64::from(self.connections) * (2 * self.limit + FIXED);
        let mut found = Held::default();
        let mut numbers = 1..=self.calls;
        let mut is_stuck = false;
        while let Some(number) = numbers.next() {
            // A server that takes no more calls gets the others at once.
            let more = if is_stuck { numbers.by_ref().last() } else { None };
            let last = more.unwrap_or(number);
            for client in &clients {
                let messages = (number..=last).flat_map(&call);
                client.update(|raw: &mut Raw| (raw.messages.extend(messages), true));
            }
            let mut look = |queued: u64| {
                let now = Held::now(&pool);
                found.allocated =
                    found.allocated.max(now.allocated.saturating_sub(before.allocated + queued));
                found.registered = found.registered.max(now.registered.saturating_sub(before.registered));
                assert!(
                    found.allocated <= most && found.registered <= most,
                    "{connections} connections, call {last}: {found:?}, and {most} bytes of each may be held"
                );
            };
            is_stuck = !self.look(&clients, (last * connections).into(), &begun, &mut look).await;
        }
        let ends: Vec<_> = clients
            .iter()
            .filter_map(|client| client.update(|raw: &mut Raw| (raw.end.clone(), false)))
            .collect();
        println!(
            "{} connections, {} calls each: {found:?} of {most}; {} ended {:?}",
            connections,
            self.calls,
            ends.len(),
            ends.first()
        );
    }

    /// Looks at what is held until the server has begun so many calls, or has ended the connections. Returns false
    /// if it does neither for some time; on a busy machine this is too early, and finds less. `look` gets the bytes
    /// of messages that the clients have not sent.
    async fn look(
        &self,
        clients: &[MessageEndpoint],
        calls: u64,
        begun: &AtomicU64,
        look: &mut dyn FnMut(u64),
    ) -> bool {
        let queued = || {
            let of = |raw: &mut Raw| {
                (raw.messages.iter().map(|message| message.len() as u64 + 32).sum::<u64>(), true)
            };
            clients.iter().map(|client| client.update(of)).sum::<u64>()
        };
        let is_over = |client: &MessageEndpoint| client.update(|raw: &mut Raw| (raw.end.is_some(), true));
        let (mut last, mut moved) = ((0, 0), Instant::now());
        loop {
            let now = (queued(), begun.load(Ordering::Relaxed));
            look(now.0);
            if (now.1 >= calls && now.0 == 0) || clients.iter().all(is_over) {
                return true;
            }
            if now != last {
                (last, moved) = (now, Instant::now());
            } else if moved.elapsed() > Duration::from_secs(2) {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    async fn connect(&self, config: Config, port: u16) -> MessageEndpoint {
        let dialled = Dialer::new(config).dial_for_calls("127.0.0.1", port, None).await.unwrap();
        let Negotiated::Messages(endpoint) = dialled else { panic!("no native calls") };
        let limits = CallConfig::default().stream_window(self.window);
        let core = Core::new(Role::Client, &limits, 256 << 20, true, HeldBudget::new(u64::MAX).share());
        let raw = Raw { core, messages: VecDeque::new(), end: None, after: Deferred::default() };
        endpoint.start(raw, &MessageSettings { landing_budget: 1 << 20, expose: false });
        endpoint
    }
}

/// What the process holds, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    allocated: u64,
    /// Memory that peers read or write: what is leased of the pool, or what has pages of shared memory.
    registered: u64,
}

impl Held {
    fn now(pool: &Pool) -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let shared = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
        let shared: u64 = shared.trim().trim_end_matches(" kB").parse().unwrap();
        let allocated = u64::try_from(held_by_this_process().bytes).unwrap_or(0);
        Self { allocated, registered: (shared << 10).max(pool.statistics().leased_send) }
    }
}

fn frame(kind: Kind, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let header = FrameHeader { flags, ..FrameHeader::new(kind, stream, payload.len()) };
    [&header.encode(), payload].concat()
}

fn open(stream: u32, path: &str) -> Vec<u8> {
    let mut block = vec![1, path.len() as u8, 0];
    block.extend_from_slice(path.as_bytes());
    frame(Kind::Headers, 0, stream, &block)
}

/// A call whose reply may be `credit` longer than the window.
fn reply(stream: u32, credit: u64) -> Vec<Vec<u8>> {
    let credit = frame(Kind::Credit, 0, stream, &credit.to_le_bytes());
    vec![[open(stream, "/test.Abused/Reply"), frame(Kind::Data, END, stream, &[]), credit].concat()]
}

/// Offers of one-byte pieces, in calls whose requests are not read.
#[test]
fn offers_of_one_byte_pieces_have_a_bound() {
    if !is_alone(concat!(module_path!(), "::offers_of_one_byte_pieces_have_a_bound")) {
        return;
    }
    const PIECES: usize = 255;
    for (connections, limit, calls, offers) in [(1, 8 << 20, 200, 20), (100, 1 << 20, 20, 20)] {
        let abuse = Abuse { connections, limit, window: 64 << 10, pool: 1 << 20, reply: 0, calls };
        abuse.run(|stream| {
            let offer = |id: u64| {
                let numbers = [id, PIECES as u64, 0].map(u64::to_le_bytes).concat();
                frame(Kind::Offer, 0, stream, &[numbers, [0, 1, 0, 7].repeat(PIECES)].concat())
            };
            let first = u64::from(stream - 1) * offers;
            let offers = (first..first + offers).map(offer);
            std::iter::once(open(stream, "/test.Abused/Hold")).chain(offers).collect()
        });
    }
}

/// Replies of 64 MiB in a pool of 1 GiB, which the client never gives back.
#[test]
fn replies_that_are_never_given_back_leave_memory_to_others() {
    if !is_alone(concat!(module_path!(), "::replies_that_are_never_given_back_leave_memory_to_others")) {
        return;
    }
    for (connections, limit, reply_length, calls) in
        [(1, 256 << 20, 64 << 20, 24), (100, 2 << 20, 1 << 20, 10)]
    {
        let pool = u64::from(connections) << 30;
        let abuse = Abuse { connections, limit, window: 64 << 10, pool, reply: reply_length, calls };
        abuse.run(|stream| reply(stream, 1 << 40));
    }
}

/// SETTINGS with a window of 0: no reply may be sent.
#[test]
fn replies_without_a_window_have_a_bound() {
    if !is_alone(concat!(module_path!(), "::replies_without_a_window_have_a_bound")) {
        return;
    }
    for (connections, limit, calls) in [(1, 16 << 20, 2000), (100, 2 << 20, 10)] {
        let abuse = Abuse { connections, limit, window: 0, pool: 1 << 10, reply: 1 << 20, calls };
        abuse.run(|stream| reply(stream, 0));
    }
}
