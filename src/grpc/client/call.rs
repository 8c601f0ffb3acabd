//! A call, from the request to the end of its response.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http::{HeaderMap, Response, Version};
use http_body::Frame;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tonic::Status;
use tonic::body::Body;

use super::deadline::{Deadline, is_timeout};
use super::request::{PendingRequest, Progress, Pump, SentFrames, advance};
use super::{Connection, Endpoints};
use crate::endpoint::CallInFlight;
use crate::error::{RdmaError, RdmaErrorKind};
use crate::grpc::fault::CallFault;
use crate::grpc::outgoing::Outgoing;
use crate::grpc::session::{Part, ResetCode, Stream};
use crate::grpc::times::CallTimer;
use crate::transport::balance::connection::Reservation;
use crate::transport::gather::landed::{Landing, LandingTarget as _, NativeFlag, Presenter};
use tonic_rdma_verbs::unstable::lock;

/// A call without HTTP/2.
///
/// The first poll queues what the request has, and lets other tasks run, so that calls which are made
/// together go out together. Each later poll also polls the completion queue for a short time before the call
/// waits.
pub(super) struct NativeCall {
    endpoints: Arc<Endpoints>,
    connection: Arc<Connection>,
    deadline: Deadline,
    /// The request until it is under way, and then as long as it can be sent again.
    request: Option<PendingRequest>,
    /// The call, while its request is under way.
    active: Option<ActiveCall>,
}

/// The end of a call without a response.
pub(super) enum CallEnd {
    Failed(Status),
    /// The server has not seen the call: it can be sent on another connection.
    Retry(Box<RetryableCall>),
}

/// A call that can be sent on another connection.
pub(super) struct RetryableCall {
    endpoints: Arc<Endpoints>,
    request: PendingRequest,
    deadline: Deadline,
    /// The status of the call if it is not sent again.
    status: Status,
    /// The server was given the call, and refused it.
    refused: bool,
}

impl From<Status> for CallEnd {
    fn from(status: Status) -> Self {
        Self::Failed(status)
    }
}

impl NativeCall {
    pub(super) fn new(
        endpoints: Arc<Endpoints>,
        connection: Arc<Connection>,
        mut deadline: Deadline,
        request: PendingRequest,
    ) -> Self {
        if let Some(defaults) = connection.defaults() {
            deadline.set_endpoint(Some(&defaults.timeout));
        }
        Self { endpoints, connection, deadline, request: Some(request), active: None }
    }

    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Response<Body>, CallEnd>> {
        // A call and its request are large, so they stay where they are.
        if let Some(call) = &mut self.active {
            if !call.stream().is_local() {
                call.stream().session.drive_abandoned();
            }
            let again = self.request.is_some();
            let answered = ready!(poll_headers(call, &mut self.deadline, again, context));
            return Poll::Ready(self.end(answered));
        }
        let has_sender = self.send(context).inspect_err(|_| self.request = None)?;
        if !(has_sender && self.waits(context)) {
            // Calls that are made together go out before this one checks for its response.
            context.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// Registers the task for the response. Returns false if the call has come to an end already.
    fn waits(&mut self, context: &mut Context<'_>) -> bool {
        let Some(call) = &self.active else { return false };
        call.stream().wait(context.waker()) && self.deadline.poll_passed_under_way(context).is_pending()
    }

    /// Ends the wait for the headers of the response.
    fn end(&mut self, answered: Result<HeaderMap, Unanswered>) -> Result<Response<Body>, CallEnd> {
        let (begun, request) = (self.active.take(), self.request.take());
        match (answered, request) {
            (Ok(head), _) => {
                let call = begun.ok_or_else(polled_again)?;
                Ok(self.response(call, head))
            }
            (Err(Unanswered { status, unprocessed: true }), Some(request)) => {
                Err(self.again(request, status, true))
            }
            (Err(Unanswered { status, .. }), _) => Err(CallEnd::Failed(status)),
        }
    }

    /// Queues the request as far as it is there, and sends it: at once if no other call is under way, and
    /// otherwise later, with those of calls that are made together. Returns whether a task of the session
    /// does that; otherwise it is the next poll of one of these calls.
    fn send(&mut self, context: &mut Context<'_>) -> Result<bool, CallEnd> {
        let Some(request) = &mut self.request else { return Err(polled_again().into()) };
        let Connection::Native(native) = &*self.connection else {
            return Err(Status::internal("a native call on another connection").into());
        };
        if self.deadline.has_passed() {
            return Err(Deadline::status().into());
        }
        // For a body that gathers large fields.
        if let Some(flag) = request.extensions.get::<NativeFlag>() {
            flag.set();
        }
        request.body.take_first(context)?;
        let session = &native.session;
        let whole = request.body.whole(context);
        let head = request.head(&native.defaults);
        let landing = request.extensions.get::<Landing>().copied();
        let mut outgoing = Outgoing::recorded(session.times.clone());
        let is_whole = whole.is_some();
        let recorded = session.times.is_some().then(|| whole.clone()).flatten();
        let opened = match whole {
            Some(body) => session.send_whole(head, body, landing),
            None => session.open(head).map(|stream| (stream, false)),
        };
        let (stream, has_sender) = match opened {
            Ok((stream, has_sender)) => (Arc::new(stream), has_sender),
            Err(error) => {
                let request = self.request.take().ok_or_else(polled_again)?;
                return Err(self.again(request, super::not_opened(error), false));
            }
        };
        // A try that is not sent has no messages.
        recorded.iter().for_each(|body| outgoing.record(body));
        if is_whole {
            if stream.is_with_handler() {
                // The call can't be sent again, so the server takes the headers without a copy.
                self.request = None;
            }
            let call = self.active.insert(ActiveCall::new(stream));
            // The request is on its way, so reading the clock now delays no peer.
            self.deadline.begun();
            call.time(&mut self.deadline);
            return Ok(has_sender);
        }
        if let Some(landing) = landing {
            stream.land(landing);
        }
        let call = self.active.insert(ActiveCall::new(Arc::clone(&stream)));
        let mut sent = SentFrames::default();
        match advance(&mut request.body, &mut outgoing, &stream, Some(&mut sent), context) {
            Progress::Failed(status) => {
                self.active = None;
                return Err(status.into());
            }
            Progress::Finished => match sent.into_body() {
                Some(body) => request.body = body,
                None => self.request = None,
            },
            Progress::Waits => {
                let (failed, body) = (Arc::default(), std::mem::take(&mut request.body));
                let pump = Pump { body, outgoing, stream, failed: Arc::clone(&failed) };
                let runtime = Handle::try_current();
                let task = runtime.as_ref().unwrap_or(&self.endpoints.runtime).spawn(pump);
                call.pump = Some((task.abort_handle(), failed));
                self.request = None;
            }
        }
        let has_sender = call.stream().is_local() || session.drive_if(session.active_streams() <= 1);
        self.deadline.begun();
        call.time(&mut self.deadline);
        Ok(has_sender)
    }

    fn response(&mut self, mut call: ActiveCall, head: HeaderMap) -> Response<Body> {
        // Such a response has headers alone.
        if call.timer.is_some() && head.contains_key(Status::GRPC_STATUS) {
            call.note_status_in(&head);
        }
        let mut deadline = self.deadline.take();
        deadline.set_endpoint(None);
        let mut response = Response::new(Body::new(ResponseBody::new(call, deadline)));
        *response.version_mut() = Version::HTTP_2;
        *response.headers_mut() = head;
        response
    }

    fn again(&mut self, request: PendingRequest, status: Status, refused: bool) -> CallEnd {
        let deadline = self.deadline.take();
        let endpoints = Arc::clone(&self.endpoints);
        CallEnd::Retry(Box::new(RetryableCall { endpoints, request, deadline, status, refused }))
    }
}

pub(super) fn polled_again() -> Status {
    Status::internal("the call was polled after its end")
}

/// Waits for the headers of the response. The call keeps parts of the body that have arrived. `again`: the
/// call can be sent again.
fn poll_headers(
    call: &mut ActiveCall,
    deadline: &mut Deadline,
    again: bool,
    context: &mut Context<'_>,
) -> Poll<Result<HeaderMap, Unanswered>> {
    let fault = match call.poll_headers(deadline, context) {
        // Either only trailers follow, or the headers have no fields, or the next part has not arrived yet.
        Poll::Ready(Ok(head)) if head.is_empty() && call.first.is_none() => {
            match call.stream().poll_part(context) {
                Poll::Ready(Some(Ok(Part::Trailers(trailers)))) => {
                    call.has_ended_with(&trailers);
                    return Poll::Ready(Ok(trailers));
                }
                Poll::Ready(Some(Ok(part))) => {
                    call.first = Some(part);
                    return Poll::Ready(Ok(head));
                }
                Poll::Ready(Some(Err(fault))) => fault,
                Poll::Ready(None) | Poll::Pending => return Poll::Ready(Ok(head)),
            }
        }
        Poll::Ready(Ok(head)) => return Poll::Ready(Ok(head)),
        Poll::Ready(Err(fault)) => fault,
        Poll::Pending => {
            ready!(deadline.poll_passed_under_way(context));
            return Poll::Ready(Err(Unanswered { status: call.is_late(), unprocessed: false }));
        }
    };
    let unprocessed = again && fault.is_unprocessed();
    Poll::Ready(Err(Unanswered { status: call.status(fault), unprocessed }))
}

/// A call that has no response.
struct Unanswered {
    status: Status,
    /// The server has not begun with the call.
    unprocessed: bool,
}

impl RetryableCall {
    /// Sends the call again. gRPC sends a call that a server refused once more.
    pub(super) async fn send(self) -> Result<Response<Body>, Status> {
        wait_and_call(self.endpoints, self.request, self.deadline, u32::from(self.refused)).await
    }
}

/// Waits for a connection, and makes the call. `refusals`: how often the server has refused it.
pub(super) async fn wait_and_call(
    endpoints: Arc<Endpoints>,
    mut request: PendingRequest,
    mut deadline: Deadline,
    mut refusals: u32,
) -> Result<Response<Body>, Status> {
    /// The most refusals.
    const REFUSALS: u32 = 1;
    /// The most connections that end as soon as the call has one.
    const CONNECTIONS: u32 = 8;
    let mut connections = 0;
    loop {
        connections += 1;
        let connection = {
            let begun = deadline.begun();
            within(&mut deadline, endpoints.members.connection(begun)).await??
        };
        match &*connection {
            Connection::Native(_) => {
                let mut call =
                    NativeCall::new(Arc::clone(&endpoints), Arc::clone(&connection), deadline, request);
                let again = match poll_fn(|context| call.poll(context)).await {
                    Ok(response) => return Ok(response),
                    Err(CallEnd::Failed(status)) => return Err(status),
                    Err(CallEnd::Retry(again)) => again,
                };
                if (again.refused && refusals >= REFUSALS) || connections >= CONNECTIONS {
                    return Err(again.status);
                }
                refusals += u32::from(again.refused);
                (request, deadline) = (again.request, again.deadline);
            }
            Connection::Http2(http2) => {
                let reserve = Reservation::of(http2);
                let reserved = within(&mut deadline, reserve).await?;
                let status = |error: tonic::transport::Error| match is_timeout(&error) {
                    true => Deadline::status(),
                    false => Status::from_error(error.into()),
                };
                if deadline.has_passed() {
                    return Err(Deadline::status());
                }
                if let Some(reservation) = reserved.map_err(status)? {
                    let call = reservation.call(request.into_request());
                    let response = within(&mut deadline, call).await?.map_err(status)?;
                    // tonic's server ends a late call itself, with CANCELLED.
                    let cancelled = response.headers().get(Status::GRPC_STATUS).is_some_and(|it| it == "1");
                    if cancelled && deadline.has_passed() {
                        return Err(Deadline::status());
                    }
                    return Ok(response.map(|body| LimitedBody::limit(body, deadline)));
                }
                if connections >= CONNECTIONS {
                    let reason = "each of several connections ended as soon as it was made";
                    let error = RdmaError::of_unsent(RdmaErrorKind::Closed, reason.to_owned(), None);
                    let mut status = Status::unavailable(reason);
                    status.set_source(Arc::new(error));
                    return Err(status);
                }
            }
        }
    }
}

/// Waits for `future` until the deadline.
async fn within<F: Future>(deadline: &mut Deadline, future: F) -> Result<F::Output, Status> {
    let mut future = pin!(future);
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Ok(output)),
        Poll::Pending => deadline.poll_passed(context).map(|()| Err(Deadline::status())),
    })
    .await
}

/// The body of a response over HTTP/2, which ends with the call's own deadline, as that of a native call does.
struct LimitedBody {
    body: Body,
    deadline: Deadline,
}

impl LimitedBody {
    fn limit(body: Body, mut deadline: Deadline) -> Body {
        deadline.set_endpoint(None);
        if deadline.is_endless() { body } else { Body::new(Self { body, deadline }) }
    }
}

impl http_body::Body for LimitedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if frame.is_pending() && self.deadline.poll_passed(context).is_ready() {
            // The server gets a reset, because the client does not read the rest.
            self.body = Body::empty();
            return Poll::Ready(Some(Err(Deadline::status())));
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}

/// The future of a response.
pub(super) type Boxed = Pin<Box<dyn Future<Output = Result<Response<Body>, Status>> + Send>>;

/// A call that has begun. Dropping this before [`has_ended`](Self::has_ended) cancels the call at the server.
#[derive(Debug)]
pub(super) struct ActiveCall {
    stream: Arc<Stream>,
    /// The task that sends the rest of the request, and the reason why it failed.
    pub(super) pump: Option<(AbortHandle, Arc<Mutex<Option<Status>>>)>,
    ended: bool,
    /// A part that came with the headers, and trailers behind it.
    pub(super) first: Option<Part>,
    trailers: Option<HeaderMap>,
    /// The time of the call, if it is to be known.
    timer: Option<CallTimer>,
    _in_flight: Option<CallInFlight>,
}

impl ActiveCall {
    pub(super) fn new(stream: Arc<Stream>) -> Self {
        let under_way = stream.begin_call();
        let (first, trailers) = (None, None);
        Self { stream, pump: None, ended: false, first, trailers, timer: None, _in_flight: under_way }
    }

    /// Begins the time of the call, if it is to be known.
    fn time(&mut self, deadline: &mut Deadline) {
        if let Some(times) = &self.stream.session.times {
            self.timer = Some(times.time(deadline.begun(), self.stream.is_local()));
        }
    }

    /// Ends the time of a call whose status is in `trailers`.
    fn note_status_in(&mut self, trailers: &HeaderMap) {
        if let Some(mut timer) = self.timer.take() {
            timer.set_code_of(trailers);
        }
    }

    /// Notes that the response has ended, and that its status is in `trailers`.
    fn has_ended_with(&mut self, trailers: &HeaderMap) {
        self.note_status_in(trailers);
        self.has_ended();
    }

    /// Notes that the response has ended with `status`.
    fn has_failed(&mut self, status: Status) -> Status {
        if let Some(mut timer) = self.timer.take() {
            timer.set_code(status.code());
        }
        self.has_ended();
        status
    }

    pub(super) fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// Returns the status of a call with this fault. If the request's body failed, its status counts.
    pub(super) fn status(&mut self, fault: CallFault) -> Status {
        let failed = self.pump.as_ref().and_then(|(_, failed)| lock(failed).take());
        self.has_failed(failed.unwrap_or_else(|| fault.into()))
    }

    /// Ends the call for its deadline.
    pub(super) fn is_late(&mut self) -> Status {
        self.stream.reset(ResetCode::DeadlineExceeded);
        self.has_failed(Deadline::status())
    }

    /// Notes that the response has ended. The rest of the request is not needed.
    pub(super) fn has_ended(&mut self) {
        self.ended = true;
        if let Some((pump, _)) = &self.pump {
            pump.abort();
        }
    }

    /// Waits for the headers of the response. Polls for them on this thread for a short time, then registers
    /// the task.
    pub(super) fn poll_headers(
        &mut self,
        deadline: &mut Deadline,
        context: &mut Context<'_>,
    ) -> Poll<Result<HeaderMap, CallFault>> {
        let mut head = Poll::Pending;
        let (begun, first, trailers) = (deadline.begun(), &mut self.first, &mut self.trailers);
        self.stream.spin(Some(begun), || {
            head = self.stream.take_answer(first, trailers);
            head.is_ready() || deadline.has_passed()
        });
        if head.is_ready() { head } else { self.stream.poll_headers(context) }
    }

    /// Waits for the next part of the response, in the same way. Most parts come together with the headers,
    /// so this checks for a part first.
    fn poll_part(
        &self,
        deadline: &Deadline,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Part, CallFault>>> {
        let part = self.stream.poll_part(&mut Context::from_waker(Waker::noop()));
        if part.is_ready() {
            return part;
        }
        self.spin(deadline);
        self.stream.poll_part(context)
    }

    fn spin(&self, deadline: &Deadline) {
        self.stream.spin(None, || self.stream.has_arrived() || deadline.has_passed());
    }
}

impl Drop for ActiveCall {
    fn drop(&mut self) {
        // The response may have come, and its reader did not want the end.
        if let Some(trailers) = self.trailers.take() {
            self.note_status_in(&trailers);
        }
        if let Some((pump, _)) = &self.pump {
            pump.abort();
            // The task may hold the stream for a moment.
            if !self.ended {
                self.stream.reset(ResetCode::Cancel);
            }
        }
    }
}

/// The body of a response.
pub(super) struct ResponseBody {
    call: ActiveCall,
    deadline: Deadline,
    presenter: Presenter,
}

impl ResponseBody {
    pub(super) fn new(call: ActiveCall, deadline: Deadline) -> Self {
        Self { call, deadline, presenter: Presenter::default() }
    }

    fn poll_part(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Part, Status>>> {
        if let Some(part) = self.call.first.take() {
            return Poll::Ready(Some(Ok(part)));
        }
        if let Some(trailers) = self.call.trailers.take() {
            return Poll::Ready(Some(Ok(Part::Trailers(trailers))));
        }
        if self.call.ended {
            return Poll::Ready(None);
        }
        let polled = self.call.poll_part(&self.deadline, context);
        match polled {
            Poll::Ready(None) => self.call.has_ended_with(&HeaderMap::new()),
            Poll::Pending if self.deadline.poll_passed(context).is_ready() => {
                return Poll::Ready(Some(Err(self.call.is_late())));
            }
            _ => {}
        }
        polled.map_err(|fault| self.call.status(fault))
    }
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let polled = self.poll_part(context);
        polled.map(|part| {
            part.map(|part| match part? {
                Part::Data(data) => Ok(Frame::data(data)),
                Part::Message(message) => Ok(Frame::data(self.presenter.present(message))),
                Part::Trailers(trailers) => {
                    self.call.has_ended_with(&trailers);
                    Ok(Frame::trailers(trailers))
                }
            })
        })
    }

    fn is_end_stream(&self) -> bool {
        self.call.first.is_none() && self.call.ended
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

    use std::time::{Duration, Instant};

    use tokio::sync::mpsc::{self, UnboundedReceiver};
    use tokio::time::timeout;
    use tonic::Request;
    use tonic::service::interceptor::InterceptedService;
    use tonic::transport::Endpoint as Target;
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_client::HealthClient;

    use super::*;
    use crate::endpoint::Listener;
    use crate::{Config, Policy, Provider, RdmaChannel, RdmaIncoming, RdmaServer};

    /// A hang is a failure after this time.
    const LONG: Duration = Duration::from_secs(60);

    /// Serves the health service. Returns a channel to it, its native connection, and the calls that the
    /// server sees.
    async fn served() -> (RdmaChannel, Arc<Connection>, UnboundedReceiver<()>) {
        // A ping would also send what was left queued, and so hide that it was.
        let config = Config::default()
            .policy(Policy::Require)
            .provider(Provider::Soft)
            .handshake_timeout(LONG)
            .ping_interval(10 * LONG)
            .ping_timeout(LONG);
        let incoming = RdmaIncoming::builder().config(config.clone()).bind("127.0.0.1:0").await.unwrap();
        let target = Target::from_shared(format!("http://{}", incoming.local_addr())).unwrap();
        let (sender, seen) = mpsc::unbounded_channel();
        let (_, health) = tonic_health::server::health_reporter();
        let noted = InterceptedService::new(health, move |request: Request<()>| {
            let _ = sender.send(());
            Ok(request)
        });
        tokio::spawn(RdmaServer::new().add_service(noted).serve_with_incoming(incoming));
        let channel = RdmaChannel::builder(target).config(config).connect().await.unwrap();
        let connection = channel.endpoints.members.connection(Instant::now()).await.unwrap();
        (channel, connection, seen)
    }

    fn session(connection: &Connection) -> &Arc<crate::grpc::session::Session> {
        let Connection::Native(native) = connection else { panic!("no native calls") };
        &native.session
    }

    fn check() -> HealthCheckRequest {
        HealthCheckRequest::default()
    }

    #[tokio::test]
    async fn calls_beyond_the_last_number_of_a_connection_go_over_another() {
        let (channel, first, mut seen) = served().await;
        let mut client = HealthClient::new(channel.clone());
        session(&first).skip_numbers(u32::MAX - 2);
        // Another call is under way, so those that follow go out together. There is a number for one of them.
        let mut watched = timeout(LONG, client.watch(check())).await.unwrap().unwrap().into_inner();
        let mut calls = tokio::task::JoinSet::new();
        for _ in 0..32 {
            let mut client = client.clone();
            calls.spawn(async move { client.check(check()).await });
        }
        while let Some(answer) = timeout(LONG, calls.join_next()).await.unwrap() {
            answer.unwrap().unwrap();
        }
        let second = channel.endpoints.members.connection(Instant::now()).await.unwrap();
        assert!(!Arc::ptr_eq(&first, &second));
        assert!(session(&second).is_usable() && !session(&first).is_usable());
        // The call that has a number goes on.
        assert!(timeout(LONG, watched.message()).await.unwrap().unwrap().is_some());
        assert_eq!(session(&first).active_streams(), 1);
        for _ in 0..33 {
            timeout(LONG, seen.recv()).await.unwrap().unwrap();
        }
    }

    #[tokio::test]
    async fn a_server_of_this_process_that_never_serves_costs_no_more_than_the_connect_timeout() {
        let config = Config::default().policy(Policy::Require).in_process(true).handshake_timeout(LONG);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = Target::from_shared(format!("http://{}", listener.local_addr().unwrap())).unwrap();
        let mut listener = Listener::new(listener, config.clone()).unwrap();
        listener.take_native_calls(true);
        let connect =
            RdmaChannel::builder(target.connect_timeout(Duration::from_secs(2))).config(config).connect();
        let (connected, _accepted) = tokio::join!(timeout(LONG / 2, connect), listener.next_negotiated());
        connected.unwrap().unwrap_err();
    }

    /// Other calls go on, or wait for the server, and the task that has made the call does something else.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_call_that_is_polled_once_beside_others_is_sent() {
        let (channel, _connection, mut seen) = served().await;
        let mut client = HealthClient::new(channel);
        let _watched = timeout(LONG, client.watch(check())).await.unwrap().unwrap();
        timeout(LONG, seen.recv()).await.unwrap();
        let mut call = pin!(client.check(check()));
        let polled = poll_fn(|context| Poll::Ready(call.as_mut().poll(context))).await;
        assert!(polled.is_pending(), "{polled:?}");
        timeout(LONG, seen.recv()).await.unwrap().unwrap();
        timeout(LONG, call).await.unwrap().unwrap();
    }
}
