//! A native connection of the server: it takes calls, and ends for age, idleness or shutdown.

use std::fmt;
use std::future::pending;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use http::uri::Scheme;
use http::{Extensions, Method, Request, Uri, Version};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::watch;
use tonic::body::Body;
use tonic::transport::server::TcpConnectInfo;

use super::call::Call;
use super::call::RequestBody;
use super::in_place::{InPlace, Paths};
use super::routes::GrpcService;
use crate::endpoint::{MessageEndpoint, RdmaConnectInfo};
use crate::grpc::calls::CallConfig;
use crate::grpc::landed::{LandingSwitch, LandingTarget};
use crate::grpc::session::{Accept, RequestHead, Session, Stream};
use crate::transport::request::grpc_timeout;
use tonic_rdma_verbs::internal::{lock, run_foreign};

/// The replies of calls that took longer than this do not wait for those of other calls, to share a message with them.
const SHARED: Duration = Duration::from_micros(2);

/// What all native connections of a server share.
#[derive(Debug)]
pub(super) struct Shared {
    limits: CallConfig,
    runtime: Handle,
    /// The runtime has one thread.
    alone: bool,
    paths: Paths,
}

impl Shared {
    /// Makes it for the runtime of the current thread.
    pub(super) fn new(limits: CallConfig) -> Self {
        let runtime = Handle::current();
        let alone =
            runtime.runtime_flavor() == RuntimeFlavor::CurrentThread || runtime.metrics().num_workers() == 1;
        Self { limits, runtime, alone, paths: Paths::default() }
    }
}

/// Serves a native connection in tasks of its own. `stop` changes when the server shuts down. A server without graceful shutdown has
/// no `stop`.
pub(super) fn serve(
    endpoint: MessageEndpoint,
    service: impl GrpcService,
    shared: &Arc<Shared>,
    stop: Option<watch::Receiver<()>>,
) {
    let info = endpoint.info().clone();
    let addresses =
        TcpConnectInfo { local_addr: Some(info.local_addr()), remote_addr: Some(info.peer_addr()) };
    let acceptor = Arc::new(Acceptor {
        shared: Arc::clone(shared),
        prepared: Mutex::new(Prepared { service, next: None }),
        info,
        addresses,
        accepted: AtomicU64::new(0),
    });
    let session = Session::server(endpoint, &shared.limits, Arc::clone(&acceptor) as Arc<dyn Accept>);
    shared.runtime.spawn(watch_over(session, acceptor, stop));
}

/// Takes the calls of one connection.
struct Acceptor<S> {
    shared: Arc<Shared>,
    prepared: Mutex<Prepared<S>>,
    info: RdmaConnectInfo,
    addresses: TcpConnectInfo,
    /// The number of calls so far.
    accepted: AtomicU64,
}

/// The service, and what the next call gets.
struct Prepared<S> {
    service: S,
    /// A clone of the service, and what services see of the connection. It is made when a reply was sent, so that no client waits for it.
    next: Option<(S, Extensions)>,
}

impl<S> fmt::Debug for Acceptor<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acceptor").field("info", &self.info).finish_non_exhaustive()
    }
}

impl<S: GrpcService> Accept for Acceptor<S> {
    fn accept(&self, stream: Stream, head: RequestHead, is_last: bool) {
        self.accepted.fetch_add(1, Ordering::Relaxed);
        let _context = self.shared.runtime.enter();
        let mut drives = is_last.then(|| Arc::clone(stream.session()));
        // Calls catch the panics of handlers themselves. This is for a service that panics when it is cloned or dropped: the stream is
        // dropped then, which resets the call, and the thread that polls for others goes on.
        run_foreign("a service that begins or ends a call", || self.begin(stream, head, &mut drives));
        if let Some(session) = drives {
            session.drive();
        }
    }
}

impl<S: GrpcService> Acceptor<S> {
    /// Begins a call. Drives the session that is in `drives`, and takes it out, if the call was polled here.
    fn begin(&self, stream: Stream, head: RequestHead, drives: &mut Option<Arc<Session>>) {
        let Shared { limits, runtime, alone, paths } = &*self.shared;
        let stream = Arc::new(stream);
        let path = head.path.clone();
        let timeout = match (grpc_timeout(&head.headers), limits.timeout) {
            (Some(client), Some(server)) => Some(client.min(server)),
            (client, server) => client.or(server),
        };
        // The last call drives anyway.
        let session = drives.is_none().then(|| Arc::clone(stream.session()));
        let (service, extensions) = self.prepared();
        let request = request(Arc::clone(&stream), head, extensions);
        let mut call = Call::new(stream, service, request, timeout);
        let may_run = limits.poll_in_place && paths.is_quick(path.path());
        let turn = if may_run { InPlace::begin(paths.have_slow(), *alone) } else { None };
        let Some(turn) = turn else {
            runtime.spawn(call);
            return;
        };
        let (waits, looked) = call.poll_in_place();
        let took = turn.end().map(|took| took.saturating_sub(looked));
        if waits {
            // Before the session drives, because that may take other calls, and this one has to be polled when it can go on.
            runtime.spawn(call);
        }
        // The client waits for the reply, and for nothing of what follows.
        let is_last = drives.take().map(|session| session.drive()).is_some();
        if let Some(session) = session
            && took.is_some_and(|took| took > SHARED)
        {
            session.drive();
        }
        if let Some(took) = took {
            paths.took(path.path(), took);
        }
        if is_last {
            self.prepare();
        }
    }

    /// Returns a clone of the service, and what services see of the connection.
    fn prepared(&self) -> (S, Extensions) {
        let mut prepared = lock(&self.prepared);
        prepared.next.take().unwrap_or_else(|| self.next(&prepared.service))
    }

    /// Makes what the next call gets, unless it is there.
    fn prepare(&self) {
        let mut prepared = lock(&self.prepared);
        if prepared.next.is_none() {
            prepared.next = Some(self.next(&prepared.service));
        }
    }

    fn next(&self, service: &S) -> (S, Extensions) {
        let mut extensions = Extensions::new();
        extensions.insert(self.info.clone());
        extensions.insert(self.addresses.clone());
        (service.clone(), extensions)
    }
}

/// Makes the request that services see. It is that which tonic makes of the same call over HTTP/2.
fn request(stream: Arc<Stream>, head: RequestHead, mut extensions: Extensions) -> Request<Body> {
    let RequestHead { path, authority, headers } = head;
    let mut uri = http::uri::Parts::default();
    uri.path_and_query = Some(path);
    if authority.is_some() {
        uri.scheme = Some(Scheme::HTTP);
        uri.authority = authority;
    }
    extensions.insert(LandingSwitch::new(Arc::downgrade(&stream) as Weak<dyn LandingTarget>));
    let mut request = Request::new(Body::new(RequestBody::new(stream)));
    *request.method_mut() = Method::POST;
    // A path alone, and a path with scheme and authority, are URIs.
    *request.uri_mut() = Uri::from_parts(uri).unwrap_or_default();
    *request.version_mut() = Version::HTTP_2;
    *request.headers_mut() = headers;
    *request.extensions_mut() = extensions;
    request
}

/// Lets a connection end: because of its age, because it is idle, or because the server shuts down.
async fn watch_over<S>(
    session: Arc<Session>,
    acceptor: Arc<Acceptor<S>>,
    mut stop: Option<watch::Receiver<()>>,
) {
    let limits = &acceptor.shared.limits;
    let old = limits.max_connection_age.map(jittered);
    let (reason, grace) = tokio::select! {
        _ = session.closed() => return,
        () = stopped(stop.as_mut()) => ("the server shuts down", Some(limits.shutdown_grace)),
        () = after(old) => ("the connection has reached its age", limits.max_connection_age_grace),
        () = idle(&session, &acceptor.accepted, limits.max_connection_idle) => {
            ("the connection was idle", Some(limits.shutdown_grace))
        }
    };
    session.go_away(reason);
    let ended = tokio::select! {
        _ = session.closed() => true,
        () = after(grace) => false,
        () = async {
            stopped(stop.as_mut()).await;
            after(Some(limits.shutdown_grace)).await;
        } => false,
    };
    if !ended {
        tracing::debug!(peer = %acceptor.info.peer_addr(), reason, "calls were in flight longer than their grace");
        session.abort();
    }
}

/// Waits for the server's shutdown. Stays pending without graceful shutdown.
async fn stopped(stop: Option<&mut watch::Receiver<()>>) {
    match stop {
        // An error means that the server's future was dropped, which is a shutdown, too.
        Some(stop) => drop(stop.changed().await),
        None => pending().await,
    }
}

async fn after(time: Option<Duration>) {
    match time {
        Some(time) => tokio::time::sleep(time).await,
        None => pending().await,
    }
}

/// Waits until there was no call for `limit`.
async fn idle(session: &Session, accepted: &AtomicU64, limit: Option<Duration>) {
    /// Looks in that time.
    const LOOKS: u32 = 4;
    let Some(limit) = limit else { return pending().await };
    let (mut last, mut quiet) = (accepted.load(Ordering::Relaxed), 0);
    while quiet < LOOKS {
        tokio::time::sleep(limit / LOOKS).await;
        let now = accepted.load(Ordering::Relaxed);
        quiet = if now == last && session.active_streams() == 0 { quiet + 1 } else { 0 };
        last = now;
    }
}

/// Returns `age`, up to a tenth more or less, so that connections that were made together do not all end together.
fn jittered(age: Duration) -> Duration {
    age.mul_f64(0.9 + 0.2 * fastrand::f64())
}
