//! The deadline of a call, and the settings of tonic's `Endpoint` that have no getters, such as its time-out.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http::uri::Authority;
use http::{HeaderMap, HeaderValue, Request, Uri, header};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::sync::{oneshot, watch};
use tonic::body::Body;
use tonic::transport::Endpoint;
use tonic::{Status, TimeoutExpired};
use tower_service::Service;

use crate::endpoint::OwnedTask;
use crate::transport::request::grpc_timeout;
use tonic_rdma_verbs::unstable::lock;

/// The deadline of a call: the time in its field `grpc-timeout`, which holds until the end of the response,
/// and the endpoint's time-out, which holds until the headers of the response, as tonic has it. No timer runs
/// until [`poll_passed`](Self::poll_passed).
pub(super) struct Deadline {
    /// The time when the call began, once somebody has asked for it. Most calls are sent before that.
    begun: Option<Instant>,
    /// The end of the call's own time.
    own: Option<Instant>,
    endpoint: Option<Arc<EndpointTimeout>>,
    timer: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    /// The timer has ended, so it must not be polled again.
    is_over: bool,
}

impl Deadline {
    /// Begins the time of a call with these metadata.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let time = grpc_timeout(headers);
        let begun = time.map(|_| Instant::now());
        // A time too far away to be represented is none.
        let own = time.and_then(|time| begun?.checked_add(time));
        Self { begun, own, endpoint: None, timer: None, is_over: false }
    }

    /// Takes the deadline, and leaves one that never passes.
    pub(super) fn take(&mut self) -> Self {
        Self { own: self.own.take(), endpoint: self.endpoint.take(), timer: self.timer.take(), ..*self }
    }

    /// Returns the time when the call began: now, at the first request for it.
    pub(super) fn begun(&mut self) -> Instant {
        *self.begun.get_or_insert_with(Instant::now)
    }

    /// Sets the time-out of the endpoint that the call goes to. `None`: the headers of the response have
    /// come, so only the call's own time is left.
    pub(super) fn set_endpoint(&mut self, endpoint: Option<&Arc<EndpointTimeout>>) {
        (self.endpoint, self.timer, self.is_over) = (endpoint.cloned(), None, false);
    }

    /// Returns whether the deadline has passed, by the clock.
    pub(super) fn has_passed(&self) -> bool {
        self.next().is_some_and(|at| at <= Instant::now())
    }

    /// Returns whether the call has no deadline, and its endpoint is not known or has no time-out.
    pub(super) fn is_endless(&self) -> bool {
        self.own.is_none() && self.endpoint.is_none()
    }

    /// Waits for the deadline. Never ready if there is none.
    pub(super) fn poll_passed(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.is_endless() {
            return Poll::Pending;
        }
        if self.is_over {
            return Poll::Ready(());
        }
        let begun = self.begun();
        let timer = self.timer.get_or_insert_with(|| {
            Box::pin(wait(begun, self.own, self.endpoint.clone())) as Pin<Box<dyn Future<Output = ()> + Send>>
        });
        let passed = timer.as_mut().poll(context);
        self.is_over = passed.is_ready();
        passed
    }

    /// Waits for the deadline of a call that is under way. Its session wakes it when the endpoint's time-out
    /// becomes known, so most calls need no timer.
    pub(super) fn poll_passed_under_way(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let is_endless = self.own.is_none() && self.endpoint.as_ref().is_none_or(|it| it.get().is_none());
        if is_endless { Poll::Pending } else { self.poll_passed(context) }
    }

    /// Returns the earliest end that is known.
    fn next(&self) -> Option<Instant> {
        let endpoint = self.endpoint.as_ref().and_then(|endpoint| self.begun?.checked_add(endpoint.get()?));
        [self.own, endpoint].into_iter().flatten().min()
    }

    /// Returns the status of a call whose deadline has passed.
    pub(super) fn status() -> Status {
        let mut status = Status::deadline_exceeded("Timeout expired");
        status.set_source(Arc::new(tonic::TimeoutExpired(())));
        status
    }
}

async fn wait(begun: Instant, own: Option<Instant>, endpoint: Option<Arc<EndpointTimeout>>) {
    let until = |at: Instant| tokio::time::sleep_until(at.into());
    tokio::select! {
        () = async { until(own.unwrap_or(begun)).await }, if own.is_some() => {}
        Some(()) = async {
            let timeout = endpoint?.known().await;
            until(begun + timeout).await;
            Some(())
        } => {}
        else => std::future::pending().await,
    }
}

/// What tonic adds to the calls of an endpoint.
#[derive(Clone, Debug)]
pub(super) struct Origin {
    pub(super) authority: Option<Authority>,
    pub(super) user_agent: Option<HeaderValue>,
}

/// The time-out of an endpoint. It is known once the probe's call has failed, and never if the endpoint has
/// none.
#[derive(Debug)]
pub(super) struct EndpointTimeout {
    /// It does not keep the probe.
    pub(super) known: watch::Receiver<Option<Duration>>,
    /// The same in nanoseconds, for calls, which read it often; 0 as long as it is not known.
    nanoseconds: Arc<AtomicU64>,
    _probe: OwnedTask,
}

/// Longest time that the probe waits for the end of its call. A longer time-out has no effect on native
/// calls.
const LONGEST: Duration = Duration::from_secs(3600);
/// Measurements of a time-out. The shortest one counts, because a busy runtime makes a measurement longer and
/// never shorter.
const MEASUREMENTS: u32 = 3;
/// Bytes that the pipe holds.
const PIPE: usize = 4096;

/// Learns the settings of `endpoint`. Falls back to the endpoint's URI if the probe fails.
///
/// tonic's own channel adds the origin and the user agent of its endpoint to each call, and ends calls after
/// the endpoint's time-out. Native calls pass by that channel, and the endpoint does not tell these values.
/// So a probe learns them: it makes a channel of tonic's over a pipe in memory, and sends one call that is
/// never answered. The headers that arrive have the origin and the user agent. The time after which the call
/// fails is the time-out. A call that has begun meanwhile began no earlier than the probe, so its own
/// time-out is learned in time.
pub(super) async fn learn(endpoint: &Endpoint) -> (Origin, EndpointTimeout) {
    let (head, seen) = oneshot::channel();
    let (found, known) = watch::channel(None);
    let nanoseconds = Arc::<AtomicU64>::default();
    let probe = tokio::spawn(measure(endpoint.clone(), head, found, Arc::clone(&nanoseconds)));
    let probe = OwnedTask(probe.abort_handle());
    let origin = seen
        .await
        .unwrap_or_else(|_| Origin { authority: endpoint.uri().authority().cloned(), user_agent: None });
    (origin, EndpointTimeout { known, nanoseconds, _probe: probe })
}

impl EndpointTimeout {
    /// Returns the time-out, if it is known already.
    pub(super) fn get(&self) -> Option<Duration> {
        // SYNC: a call that saw 0 after it had registered its waker is woken by the change of `known`, which
        // comes later.
        match self.nanoseconds.load(Ordering::SeqCst) {
            0 => None,
            nanoseconds => Some(Duration::from_nanos(nanoseconds)),
        }
    }

    /// Waits until the time-out is known. Never ready for an endpoint without one.
    pub(super) async fn known(&self) -> Duration {
        let mut known = self.known.clone();
        loop {
            if let Some(timeout) = self.get() {
                return timeout;
            }
            // An error says that the probe has ended without a result.
            if known.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }
}

/// Measures the time-out, sends the first call's headers to `head`, and tells what it has found.
async fn measure(
    endpoint: Endpoint,
    head: oneshot::Sender<Origin>,
    known: watch::Sender<Option<Duration>>,
    nanoseconds: Arc<AtomicU64>,
) {
    let (mut head, mut shortest) = (Some(head), Duration::MAX);
    for _ in 0..MEASUREMENTS {
        let Some(measured) = silent_call(&endpoint, head.take()).await else { return };
        shortest = shortest.min(measured);
        let least = u64::try_from(shortest.as_nanos()).unwrap_or(u64::MAX);
        nanoseconds.store(least.max(1), Ordering::SeqCst);
        known.send_replace(Some(shortest));
    }
}

/// Makes a call that is not answered. Returns the time after which it failed for its time-out.
async fn silent_call(endpoint: &Endpoint, head: Option<oneshot::Sender<Origin>>) -> Option<Duration> {
    let (ours, theirs) = tokio::io::duplex(PIPE);
    let mut pipe = Some(TokioIo::new(ours));
    let connector = tower::service_fn(move |_: Uri| {
        let pipe = pipe.take().ok_or_else(|| std::io::Error::other("the pipe is used once"));
        async move { pipe }
    });
    let head = Arc::new(Mutex::new(head));
    let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new()).serve_connection(
        TokioIo::new(theirs),
        service_fn(move |request: Request<hyper::body::Incoming>| {
            if let Some(head) = lock(&head).take() {
                let user_agent = request.headers().get(header::USER_AGENT).cloned();
                // The result does not matter: the channel may be gone.
                let _ = head.send(Origin { authority: request.uri().authority().cloned(), user_agent });
            }
            std::future::pending::<Result<http::Response<Body>, Infallible>>()
        }),
    );
    let call = async {
        let mut channel = endpoint.connect_with_connector(connector).await.ok()?;
        std::future::poll_fn(|context| channel.poll_ready(context)).await.ok()?;
        let mut request = Request::new(Body::empty());
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = Uri::from_static("/tonic_rdma.Probe/Settings");
        let begun = Instant::now();
        let error = tokio::time::timeout(LONGEST, channel.call(request)).await.ok()?.err()?;
        is_timeout(&error).then(|| begun.elapsed())
    };
    tokio::select! {
        measured = call => measured,
        _ = server => None,
    }
}

/// Returns whether an error of tonic's channel says that the time of a call is over.
pub(super) fn is_timeout(error: &(dyn std::error::Error + 'static)) -> bool {
    error.is::<TimeoutExpired>() || error.source().is_some_and(is_timeout)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod probe_tests {
    use super::*;

    #[tokio::test]
    async fn the_probe_learns_origin_user_agent_and_time_out() {
        let endpoint = Endpoint::from_static("http://ps0:50051")
            .origin(Uri::from_static("http://service.example"))
            .user_agent("trainer/7")
            .unwrap()
            .timeout(Duration::from_millis(30));
        let (origin, timeout) = learn(&endpoint).await;
        assert_eq!(origin.authority.unwrap(), "service.example");
        let user_agent = origin.user_agent.unwrap();
        assert!(user_agent.to_str().unwrap().starts_with("trainer/7 tonic/"), "{user_agent:?}");
        assert!(timeout.known().await >= Duration::from_millis(30));
    }

    #[tokio::test]
    async fn an_endpoint_without_settings_has_its_authority_and_tonics_user_agent() {
        let (origin, timeout) = learn(&Endpoint::from_static("http://ps0:50051")).await;
        assert_eq!(origin.authority.unwrap(), "ps0:50051");
        assert!(origin.user_agent.unwrap().to_str().unwrap().starts_with("tonic/"));
        assert_eq!(timeout.get(), None);
    }
}
