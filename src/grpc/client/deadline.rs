//! The deadline of a call.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use http::HeaderMap;
use tonic::Status;

use super::probe::EndpointTimeout;
use crate::transport::fields::grpc_timeout;

/// The deadline of a call: the time in its field `grpc-timeout`, which holds until the end of the response, and the endpoint's time-out,
/// which holds until the head of the response, as tonic has it. No timer runs until [`poll_passed`](Self::poll_passed).
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

    /// Takes the deadline. What is left never passes.
    pub(super) fn take(&mut self) -> Self {
        Self {
            begun: self.begun,
            own: self.own.take(),
            endpoint: self.endpoint.take(),
            timer: self.timer.take(),
            is_over: self.is_over,
        }
    }

    /// Returns the time when the call began: now, at the first request for it.
    pub(super) fn begun(&mut self) -> Instant {
        *self.begun.get_or_insert_with(Instant::now)
    }

    /// Notes the time-out of the endpoint that the call goes to.
    pub(super) fn goes_to(&mut self, endpoint: &Arc<EndpointTimeout>) {
        self.endpoint = Some(Arc::clone(endpoint));
        (self.timer, self.is_over) = (None, false);
    }

    /// Notes that the head of the response has come: only the call's own time is left.
    pub(super) fn head_has_come(&mut self) {
        self.endpoint = None;
        (self.timer, self.is_over) = (None, false);
    }

    /// Returns whether the deadline has passed, by the clock.
    pub(super) fn has_passed(&self) -> bool {
        self.next().is_some_and(|at| at <= Instant::now())
    }

    /// Waits for the deadline. Never ready if there is none.
    pub(super) fn poll_passed(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.own.is_none() && self.endpoint.is_none() {
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

    /// Waits for the deadline of a call that is under way. Its session wakes it when the endpoint's time-out becomes known, so most calls
    /// need no timer.
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
    let own = async {
        match own {
            Some(at) => tokio::time::sleep_until(at.into()).await,
            None => std::future::pending().await,
        }
    };
    let endpoint = async {
        match endpoint {
            Some(endpoint) => tokio::time::sleep_until((begun + endpoint.known().await).into()).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = own => {}
        () = endpoint => {}
    }
}
