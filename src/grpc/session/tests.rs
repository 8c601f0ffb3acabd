//! Two sessions in one process, over the software device.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod accepting;

use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tonic::Code;

use super::{Accept, LocalCall, OpenError, Part, RequestHeaders, ResetCode, Session, Sink as _, Stream};
use crate::endpoint::{Config, Dialer, Listener, MessageEndpoint, Negotiated, Policy, Provider};
use crate::grpc::CallConfig;
use crate::grpc::fault::CallFault;
use tonic_rdma_verbs::memory::Pool;

/// A hang is a failure after this time.
const LONG: Duration = Duration::from_secs(60);

/// Gives calls to a channel.
#[derive(Debug)]
struct Calls(mpsc::UnboundedSender<(Stream, RequestHeaders)>);

impl Accept for Calls {
    fn accept(&self, stream: Stream, head: RequestHeaders, is_last: bool) {
        let session = Arc::clone(&stream.session);
        // A test that no longer accepts has ended.
        let _ = self.0.send((stream, head));
        if is_last {
            session.drive();
        }
    }
}

/// A client, a server, and the calls that arrive.
pub(super) struct SessionPair {
    pub(super) client: Arc<Session>,
    pub(super) server: Arc<Session>,
    calls: mpsc::UnboundedReceiver<(Stream, RequestHeaders)>,
}

impl SessionPair {
    async fn new(client: CallConfig, server: CallConfig) -> Self {
        let (sender, calls) = mpsc::unbounded_channel();
        Self { calls, ..Self::with(client, server, Arc::new(Calls(sender))).await }
    }

    /// Makes a pair whose calls `acceptor` gets.
    async fn with(client: CallConfig, server: CallConfig, acceptor: Arc<dyn Accept>) -> Self {
        // A ping would also send what was left queued, and so hide that it was.
        let config = Config::default()
            .policy(Policy::Require)
            .provider(Provider::Soft)
            .handshake_timeout(LONG)
            .ping_interval(10 * LONG)
            .ping_timeout(LONG);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut listener = Listener::new(listener, config.clone()).unwrap();
        let port = listener.local_addr().port();
        listener.take_native_calls(true);
        let dialer = Dialer::new(config);
        let dial = dialer.dial_for_calls("127.0.0.1", port, None);
        let (dialled, accepted) = tokio::join!(dial, listener.next_negotiated());
        Self {
            client: Session::client(messages(dialled.unwrap()), &client, None),
            server: Session::server(messages(accepted.unwrap()), &server, acceptor),
            calls: mpsc::unbounded_channel().1,
        }
    }

    pub(super) async fn alike() -> Self {
        Self::new(CallConfig::default(), CallConfig::default()).await
    }

    fn open(&self, path: &'static str) -> Stream {
        self.client.open(head(path)).unwrap()
    }

    async fn accept(&mut self) -> (Stream, RequestHeaders) {
        soon(self.calls.recv()).await.unwrap()
    }
}

fn messages(negotiated: Negotiated) -> MessageEndpoint {
    match negotiated {
        Negotiated::Messages(endpoint) => endpoint,
        Negotiated::Stream(stream) => panic!("no native calls: {:?}", stream.info().reason()),
    }
}

fn head(path: &'static str) -> RequestHeaders {
    let mut headers = HeaderMap::new();
    headers.insert("content-type", HeaderValue::from_static("application/grpc"));
    headers.append("many", HeaderValue::from_static("1"));
    headers.append("many", HeaderValue::from_static("2"));
    let authority = Some("host:1".parse().unwrap());
    RequestHeaders { path: PathAndQuery::from_static(path), authority, headers }
}

fn fields(name: &'static str, value: &'static str) -> HeaderMap {
    HeaderMap::from_iter([(name.parse().unwrap(), HeaderValue::from_static(value))])
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(LONG, future).await.unwrap()
}

async fn next(stream: &Stream) -> Option<Result<Part, CallFault>> {
    soon(poll_fn(|context| stream.poll_part(context))).await
}

async fn response_head(stream: &Stream) -> Result<HeaderMap, CallFault> {
    soon(poll_fn(|context| stream.poll_headers(context))).await
}

/// Reads bytes until trailers or the end.
async fn read(stream: &Stream) -> (Vec<u8>, Option<HeaderMap>) {
    let mut bytes = Vec::new();
    loop {
        match next(stream).await {
            Some(Ok(Part::Data(data) | Part::Message(data))) => bytes.extend_from_slice(&data),
            Some(Ok(Part::Trailers(trailers))) => return (bytes, Some(trailers)),
            Some(Err(fault)) => panic!("{fault}"),
            None => return (bytes, None),
        }
    }
}

async fn send(stream: &Stream, data: &Bytes, piece: usize) {
    for start in (0..data.len()).step_by(piece) {
        soon(poll_fn(|context| stream.poll_send_ready(context))).await.unwrap();
        stream.send_data(data.slice(start..data.len().min(start + piece)), false);
        stream.session.drive();
    }
}

fn noise(length: usize) -> Bytes {
    (0..length as u64)
        .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) as u8)
        .collect::<Vec<_>>()
        .into()
}

#[tokio::test]
async fn a_unary_call_is_one_message_each_way() {
    let mut pair = SessionPair::alike().await;
    for round in 0..20 {
        let call = pair.open("/a.B/C");
        call.send_data(Bytes::from_static(b"request"), true);
        pair.client.drive();
        let (accepted, request) = pair.accept().await;
        assert_eq!(request, head("/a.B/C"));
        assert_eq!(read(&accepted).await, (b"request".to_vec(), None));
        accepted.send_headers(fields("content-type", "application/grpc"));
        accepted.send_data(Bytes::from_static(b"reply"), false);
        accepted.send_trailers(fields("grpc-status", "0"));
        pair.server.drive();
        assert_eq!(response_head(&call).await.unwrap(), fields("content-type", "application/grpc"));
        assert_eq!(read(&call).await, (b"reply".to_vec(), Some(fields("grpc-status", "0"))));
        assert!(call.is_end(), "round {round}");
        drop((call, accepted));
        assert_eq!((pair.client.active_streams(), pair.server.active_streams()), (0, 0));
    }
    // Each end sent its settings, too.
    let sent = |session: &Session| session.endpoint.counters().snapshot().eager_sent;
    assert_eq!((sent(&pair.client), sent(&pair.server)), (21, 21));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_of_any_length_arrive_in_both_directions() {
    let mut pair = SessionPair::alike().await;
    for (length, piece) in
        [(1, 1), (3000, 7), (20_000, 5000), (40_000, 40_000), (3 << 20, 3 << 20), (5 << 20, 100_000)]
    {
        let data = noise(length);
        let call = pair.open("/a.B/Echo");
        let (to_send, to_echo) = (data.clone(), data.clone());
        pair.client.drive();
        let (accepted, _) = pair.accept().await;
        let server = tokio::spawn(async move {
            let (bytes, trailers) = read(&accepted).await;
            assert!(bytes == to_echo && trailers.is_none());
            accepted.send_headers(HeaderMap::new());
            send(&accepted, &to_echo, piece).await;
            accepted.send_trailers(HeaderMap::new());
            accepted.session.drive();
        });
        send(&call, &to_send, piece).await;
        call.end();
        pair.client.drive();
        response_head(&call).await.unwrap();
        let (bytes, trailers) = read(&call).await;
        assert!(bytes == data && trailers.is_some(), "{length} bytes in pieces of {piece}");
        soon(server).await.unwrap();
    }
}

#[tokio::test]
async fn a_message_lands_in_one_piece_at_its_place() {
    let mut pair = SessionPair::alike().await;
    let large = noise(300_000);
    let pool = Pool::for_sending(64 << 20);
    let mut registered = pool.allocate(large.len()).unwrap();
    registered.copy_from_slice(&large);
    let registered = registered.freeze();
    for part in [large.clone(), registered] {
        let parts = vec![Bytes::from_static(b"\0\0\0\0\0small fields"), part, Bytes::from_static(b"tail")];
        let whole = parts.concat();
        for landed in [true, false] {
            let call = pair.open("/a.B/C");
            call.send_message(parts.clone(), parts[0].len(), true);
            pair.client.drive();
            let (accepted, _) = pair.accept().await;
            if !landed {
                assert!(read(&accepted).await.0 == whole);
                continue;
            }
            accepted.deliver_landed(1 << 20);
            let Some(Ok(Part::Message(message))) = next(&accepted).await else { panic!() };
            assert!(message == whole);
            assert_eq!(message[parts[0].len()..].as_ptr().addr() % 64, 0);
            assert!(next(&accepted).await.is_none());
        }
    }
    let call = pair.open("/a.B/C");
    call.send_message(vec![large.clone()], 0, true);
    pair.client.drive();
    let (accepted, _) = pair.accept().await;
    accepted.deliver_landed(1000);
    let fault = next(&accepted).await.unwrap().unwrap_err();
    assert!(matches!(fault, CallFault::MessageTooLarge { length: 299_995, limit: 1000 }), "{fault}");
    assert_eq!(fault.code(), Code::OutOfRange);
}

/// The CPU reads from the client's memory, so a message of moderate length needs no completion.
#[tokio::test]
async fn a_message_of_moderate_length_lands_in_the_poll_that_asks_for_it() {
    let mut pair = SessionPair::alike().await;
    let mut at_once = 0;
    for _ in 0..100 {
        let call = pair.open("/a.B/C");
        call.send_message(vec![noise(65_536)], 5, true);
        pair.client.drive();
        let (accepted, _) = pair.accept().await;
        accepted.deliver_landed(1 << 20);
        let part = poll_fn(|context| Poll::Ready(accepted.poll_part(context))).await;
        at_once += usize::from(matches!(part, Poll::Ready(Some(Ok(Part::Message(_))))));
        // The message is there when the client drops the call.
        if part.is_pending() {
            assert!(matches!(next(&accepted).await, Some(Ok(Part::Message(_)))));
        }
    }
    // The first ones, until the memory is mapped, come with completions.
    assert!(at_once > 0);
}

#[tokio::test]
async fn dropping_a_call_cancels_it_at_the_peer() {
    let mut pair = SessionPair::alike().await;
    let call = pair.open("/a.B/C");
    call.send_data(noise(1 << 20), false);
    pair.client.drive();
    let (accepted, _) = pair.accept().await;
    drop(call);
    let fault = soon(poll_fn(|context| accepted.poll_reset(context))).await;
    assert!(matches!(fault, CallFault::Reset(ResetCode::Cancel)), "{fault}");
    let call = pair.open("/a.B/C");
    pair.client.drive();
    drop(pair.accept().await);
    let fault = response_head(&call).await.unwrap_err();
    assert!(matches!(fault, CallFault::Reset(ResetCode::Cancel)), "{fault}");
    assert_eq!(pair.client.active_streams(), 0);
}

/// A handler may leave the request to a task, and answer before the request has ended. The client sends no
/// more then, so the task gets what has arrived, and then the reason.
#[tokio::test]
async fn the_end_of_a_response_ends_a_task_that_still_reads_the_request() {
    let mut pair = SessionPair::alike().await;
    let call = pair.open("/a.B/C");
    call.send_data(Bytes::from_static(b"first"), false);
    pair.client.drive();
    let (stream, _) = pair.accept().await;
    let stream = Arc::new(stream);
    let reader = {
        let stream = Arc::clone(&stream);
        tokio::spawn(async move { (next(&stream).await, next(&stream).await) })
    };
    tokio::time::sleep(Duration::from_millis(20)).await;
    stream.send_headers(HeaderMap::new());
    stream.send_trailers(fields("grpc-status", "0"));
    pair.server.drive();
    let (first, second) = soon(reader).await.unwrap();
    assert!(matches!(first, Some(Ok(Part::Data(data))) if data == "first"));
    let fault = second.unwrap().unwrap_err();
    assert!(matches!(fault, CallFault::Ended), "{fault}");
    response_head(&call).await.unwrap();
    assert_eq!(read(&call).await, (vec![], Some(fields("grpc-status", "0"))));
}

#[tokio::test]
async fn going_away_lets_calls_finish_and_closes() {
    let mut pair = SessionPair::alike().await;
    let call = pair.open("/a.B/C");
    pair.client.drive();
    let (accepted, _) = pair.accept().await;
    pair.server.go_away("the server stops");
    let refused = async {
        while pair.client.is_usable() {
            tokio::task::yield_now().await;
        }
    };
    soon(refused).await;
    assert!(pair.client.open(head("/a.B/C")).unwrap_err().to_string().contains("the server stops"));
    accepted.send_headers(HeaderMap::new());
    accepted.send_trailers(fields("grpc-status", "0"));
    drop(accepted);
    pair.server.drive();
    response_head(&call).await.unwrap();
    assert_eq!(read(&call).await.1, Some(fields("grpc-status", "0")));
    drop(call);
    soon(pair.client.closed()).await.unwrap();
    soon(pair.server.closed()).await.unwrap();
}

#[tokio::test]
async fn calls_beyond_the_limit_wait() {
    let mut pair =
        SessionPair::new(CallConfig::default(), CallConfig::default().max_concurrent_streams(1)).await;
    let (first, second) = (pair.open("/a.B/First"), pair.open("/a.B/Second"));
    pair.client.drive();
    let (accepted, _) = pair.accept().await;
    assert!(timeout(Duration::from_millis(50), pair.calls.recv()).await.is_err());
    drop(accepted);
    assert!(response_head(&first).await.is_err());
    let (_accepted, request) = pair.accept().await;
    assert_eq!(request.path, "/a.B/Second");
    drop(second);
}

#[tokio::test]
async fn the_end_of_a_connection_ends_its_calls() {
    let mut pair = SessionPair::alike().await;
    let call = pair.open("/a.B/C");
    pair.client.drive();
    let (accepted, _) = pair.accept().await;
    pair.server.abort();
    let fault = response_head(&call).await.unwrap_err();
    assert!(matches!(fault, CallFault::Connection(_)), "{fault}");
    assert_eq!(fault.code(), Code::Unavailable);
    assert!(soon(pair.client.closed()).await.is_err());
    assert!(pair.client.open(head("/a.B/C")).is_err());
    soon(poll_fn(|context| accepted.poll_reset(context))).await;
}

/// Holds calls of this process.
#[derive(Debug, Default)]
struct Holds(Mutex<Vec<(Stream, LocalCall)>>);

impl Accept for Holds {
    fn accept(&self, _: Stream, _: RequestHeaders, _: bool) {}

    fn accept_local(self: Arc<Self>, stream: Stream, _: Arc<RequestHeaders>, call: LocalCall) {
        self.0.lock().unwrap().push((stream, call));
    }
}

#[tokio::test]
async fn the_end_of_a_connection_lets_calls_that_wait_be_sent_again() {
    let limits = CallConfig::default().max_concurrent_streams(1);
    let pair = SessionPair::with(CallConfig::default(), limits, Arc::new(Holds::default())).await;
    let server = Arc::downgrade(&pair.server);
    let [begun, waiting] =
        [(); 2].map(|()| pair.client.open_local(&server, head("/a.B/C").into(), None, None).unwrap());
    pair.server.abort();
    assert!(!response_head(&begun).await.unwrap_err().is_unprocessed());
    assert!(response_head(&waiting).await.unwrap_err().is_unprocessed());
}

/// The end of the server's runtime drops the tasks of calls.
#[tokio::test]
async fn a_server_whose_calls_are_dropped_before_they_begin_takes_no_more_of_this_process() {
    let pair = SessionPair::alike().await;
    let server = Arc::downgrade(&pair.server);
    let open = || pair.client.open_local(&server, head("/a.B/C").into(), None, None);
    assert!(open().is_ok());
    assert!(matches!(open(), Err(OpenError::GoingAway(_))));
}

#[tokio::test]
async fn a_head_of_many_messages_arrives_and_a_longer_one_is_refused() {
    let mut pair =
        SessionPair::new(CallConfig::default(), CallConfig::default().max_header_list_size(100_000)).await;
    let mut long = head("/a.B/C");
    for index in 0..8 {
        let name: http::HeaderName = format!("x-{index}").parse().unwrap();
        long.headers.insert(name, HeaderValue::from_str(&"v".repeat(10_000)).unwrap());
    }
    let call = pair.client.open(long.clone()).unwrap();
    pair.client.drive();
    let (accepted, request) = pair.accept().await;
    assert_eq!(request, long);
    // The reply's headers are longer than the client takes.
    accepted.send_headers(long.headers.clone());
    pair.server.drive();
    let fault = response_head(&call).await.unwrap_err();
    assert!(matches!(fault, CallFault::Reset(ResetCode::ResourceExhausted)), "{fault}");
    long.headers.insert("x-more", HeaderValue::from_str(&"v".repeat(20_000)).unwrap());
    let call = pair.client.open(long).unwrap();
    pair.client.drive();
    let fault = response_head(&call).await.unwrap_err();
    assert!(matches!(fault, CallFault::HeadersTooLarge { limit: 100_000, .. }), "{fault}");
    assert_eq!(fault.code(), Code::ResourceExhausted);
}

/// Drops each call at once, and notes how deep `accept` calls itself.
#[derive(Debug, Default)]
struct Refusing {
    depth: AtomicUsize,
    deepest: AtomicUsize,
    accepted: AtomicUsize,
}

impl Accept for Refusing {
    fn accept(&self, stream: Stream, _: RequestHeaders, is_last: bool) {
        let depth = self.depth.fetch_add(1, Ordering::SeqCst) + 1;
        self.deepest.fetch_max(depth, Ordering::SeqCst);
        self.accepted.fetch_add(1, Ordering::SeqCst);
        let session = Arc::clone(&stream.session);
        // This resets the call, which drives.
        drop(stream);
        if is_last {
            session.drive();
        }
        self.depth.fetch_sub(1, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn many_calls_at_once_do_not_nest_in_each_other() {
    const CALLS: usize = 100;
    let acceptor = Arc::new(Refusing::default());
    let pair = SessionPair::with(CallConfig::default(), CallConfig::default(), acceptor.clone()).await;
    let streams: Vec<_> = (0..CALLS).map(|_| pair.open("/a.B/C")).collect();
    pair.client.drive();
    for stream in &streams {
        assert_eq!(response_head(stream).await.unwrap_err().code(), Code::Cancelled);
    }
    assert_eq!(acceptor.accepted.load(Ordering::SeqCst), CALLS);
    let deepest = acceptor.deepest.load(Ordering::SeqCst);
    assert!(deepest <= 2, "accept called itself {deepest} times");
}

/// Answers the first call only after it has driven, which takes the second call.
#[derive(Debug, Default)]
struct Driving(std::sync::Mutex<Vec<Stream>>);

impl Accept for Driving {
    fn accept(&self, stream: Stream, _: RequestHeaders, is_last: bool) {
        let session = Arc::clone(&stream.session);
        if !is_last {
            session.drive();
        }
        stream.send_headers(HeaderMap::new());
        if is_last {
            session.drive();
        }
        self.0.lock().unwrap().push(stream);
    }
}

#[tokio::test]
async fn a_reply_goes_out_if_the_last_call_was_taken_meanwhile() {
    let pair =
        SessionPair::with(CallConfig::default(), CallConfig::default(), Arc::new(Driving::default())).await;
    let streams = [pair.open("/a.B/C"), pair.open("/a.B/D")];
    pair.client.drive();
    for stream in &streams {
        response_head(stream).await.unwrap();
    }
}

/// Memory whose owner makes a call on the same connection when it is dropped.
struct Calling {
    bytes: Vec<u8>,
    session: Arc<Session>,
    dropped: Arc<AtomicUsize>,
}

impl AsRef<[u8]> for Calling {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Calling {
    fn drop(&mut self) {
        drop(self.session.open(head("/a.B/Dropped")));
        self.session.drive();
        self.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn memory_whose_owner_makes_calls_is_dropped_without_a_lock() {
    let (done, ended) = std::sync::mpsc::channel();
    // In a thread of its own, because a deadlock blocks the thread.
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut pair = SessionPair::alike().await;
            let dropped = Arc::new(AtomicUsize::new(0));
            let owner = |length| {
                let (session, dropped) = (Arc::clone(&pair.client), Arc::clone(&dropped));
                Bytes::from_owner(Calling { bytes: vec![1; length], session, dropped })
            };
            // Copied into a message, sent from where it lies, and copied for the peer: as bytes and as parts.
            let parts = [10, 3000, 100_000, 10, 100_000, 700].map(owner);
            let rests = [10, 100_000, 100_000].map(owner);
            let call = pair.open("/a.B/C");
            let [a, b, c, d, e, f] = parts;
            [a, b, c].into_iter().for_each(|part| call.send_data(part, false));
            call.send_message(vec![d, e, f], 10, false);
            call.send_message(vec![Bytes::from_static(b"x"), Bytes::from_static(b"y")], 0, true);
            pair.client.drive();
            let (accepted, _) = pair.accept().await;
            assert_eq!(read(&accepted).await.0.len(), 203_722);
            assert_eq!(dropped.load(Ordering::SeqCst), 6);
            // A call that is dropped, and one that has ended.
            let other = pair.open("/a.B/C");
            let [a, b, c] = rests;
            other.send_data(a, false);
            other.send_message(vec![b], 0, false);
            other.reset(ResetCode::Cancel);
            other.send_data(c, false);
            assert_eq!(dropped.load(Ordering::SeqCst), 9);
        });
        done.send(()).unwrap();
    });
    ended.recv_timeout(LONG).unwrap();
}

#[tokio::test]
async fn a_panic_does_not_keep_the_clients_memory() {
    let mut pair = SessionPair::alike().await;
    let _call = pair.open("/a.B/C");
    pair.client.drive();
    let (served, _) = pair.accept().await;
    assert!(!served.keeps_taken_after_a_panic());
}

impl Session {
    /// Gives the next call of this client this number.
    pub(in crate::grpc) fn skip_numbers(&self, next: u32) {
        self.with(|state| state.core.skip_numbers(next));
    }
}
