//! One endpoint of a channel, and its connection.
//!
//! ```text
//!        a call, or a channel over several endpoints
//!  idle ────────────▶ connecting ── connected ──▶ up ── ended ──▶ idle, or down if it ended soon
//!                      ▲      └── failed ──▶ down ─┐
//!                      └──── the back-off is over ─┘
//! ```

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tonic::transport::Endpoint;

use super::connection::{Connection, Dialling, SHORT_WAIT, Terms};
use super::error::Failure;
use crate::transport::balance::backoff::Backoff;
use crate::transport::balance::error::DialError;
use crate::transport::balance::{EndpointState, EndpointStatus};
use tonic_rdma_verbs::internal::{Throttle, lock};

/// One endpoint of a channel.
#[derive(Debug)]
pub(super) struct Member {
    endpoint: Endpoint,
    dialling: Arc<Dialling>,
    state: Mutex<State>,
    /// Announces each change of a member's state.
    changes: watch::Sender<()>,
    runtime: Handle,
    /// The channel has other endpoints, so calls need not wait for this one's back-off.
    has_others: bool,
    lines: [Throttle; 3],
}

#[derive(Debug)]
struct State {
    phase: Phase,
    backoff: Backoff,
    /// The terms of native calls, once a connection has had some.
    terms: Option<Arc<Terms>>,
    task: Option<AbortHandle>,
    /// The number of the last dial.
    dials: u64,
}

#[derive(Debug)]
enum Phase {
    Idle,
    Connecting,
    Up(Arc<Connection>),
    Down(Instant, Arc<Failure>),
}

/// What a call finds.
#[derive(Debug)]
pub(super) enum Look {
    Up(Arc<Connection>),
    /// A dial is under way.
    Wait,
    /// The endpoint has been down for this reason since this time.
    Down(Instant, Arc<Failure>),
}

impl Member {
    pub(super) fn new(
        endpoint: Endpoint,
        dialling: &Arc<Dialling>,
        changes: &watch::Sender<()>,
        has_others: bool,
        runtime: &Handle,
    ) -> Self {
        let state = State { phase: Phase::Idle, backoff: Backoff::new(), terms: None, task: None, dials: 0 };
        Self {
            endpoint,
            dialling: Arc::clone(dialling),
            state: Mutex::new(state),
            changes: changes.clone(),
            runtime: runtime.clone(),
            has_others,
            // Each endpoint limits its own log lines, so an endpoint that comes and goes does not hide the lines of the others.
            lines: [const { Throttle::new(Throttle::BURST) }; 3],
        }
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns the native connection if there is one. It may take no calls any more: a call that it refuses can be sent again.
    pub(super) fn native_connection(&self) -> Option<Arc<Connection>> {
        match &lock(&self.state).phase {
            Phase::Up(connection) if connection.is_native() => Some(Arc::clone(connection)),
            _ => None,
        }
    }

    /// Returns the connection if there is one that takes calls. Otherwise begins to dial, unless the back-off forbids that. The
    /// only endpoint of a channel is dialled for each call that needs it, as tonic does, though not more often than each
    /// [`SHORT_WAIT`]: the failure of a dial ends the calls that `begun` before.
    pub(super) fn look(self: &Arc<Self>, begun: Instant) -> Look {
        let mut state = lock(&self.state);
        if let Phase::Up(connection) = &state.phase {
            if connection.is_usable() {
                return Look::Up(Arc::clone(connection));
            }
            self.note_end(&mut state);
        }
        match &state.phase {
            Phase::Connecting => Look::Wait,
            Phase::Down(since, failure)
                if *since >= begun || (self.has_others && !state.backoff.remaining().is_zero()) =>
            {
                Look::Down(*since, Arc::clone(failure))
            }
            _ => {
                let delay = state.backoff.remaining().min(SHORT_WAIT);
                self.dial(&mut state, delay);
                Look::Wait
            }
        }
    }

    /// Connects now, on the task of the caller.
    pub(super) async fn connect(self: &Arc<Self>) -> Result<(), Failure> {
        lock(&self.state).backoff.begin();
        let connection = Arc::new(Connection::connect(&self.endpoint, &self.dialling, None).await?);
        let mut state = lock(&self.state);
        self.set_up(&mut state, &connection);
        let task = self.runtime.spawn(watch_end(Arc::downgrade(self), connection));
        state.task = Some(task.abort_handle());
        Ok(())
    }

    /// Returns the state for users.
    pub(super) fn status(&self) -> EndpointStatus {
        let state = lock(&self.state);
        let (state, calls) = match &state.phase {
            Phase::Idle | Phase::Connecting => (EndpointState::Connecting, 0),
            Phase::Up(connection) => (EndpointState::Up(connection.info().clone()), connection.load()),
            Phase::Down(_, failure) => (EndpointState::Down(failure.reason().into()), 0),
        };
        EndpointStatus { uri: self.endpoint.uri().clone(), state, calls }
    }

    /// Starts the task that dials after `delay`, and then watches the connection.
    fn dial(self: &Arc<Self>, state: &mut State, delay: Duration) {
        state.phase = Phase::Connecting;
        state.dials += 1;
        let attempt = Attempt { member: Arc::downgrade(self), number: state.dials, delay };
        let (endpoint, dialling, terms) =
            (self.endpoint.clone(), Arc::clone(&self.dialling), state.terms.clone());
        let task = self.runtime.spawn(attempt.carry_out(endpoint, dialling, terms));
        // A task before it watched a connection that takes no more calls.
        if let Some(earlier) = state.task.replace(task.abort_handle()) {
            earlier.abort();
        }
    }

    fn set_up(&self, state: &mut State, connection: &Arc<Connection>) {
        if let Some(suppressed) = self.lines[0].admit(Instant::now()) {
            let (uri, info) = (self.endpoint.uri(), connection.info());
            tracing::info!(%uri, verdict = %info.verdict(), native = info.is_native(), suppressed, "endpoint is up");
        }
        if let Some(terms) = connection.terms() {
            state.terms = Some(Arc::clone(terms));
        }
        state.phase = Phase::Up(Arc::clone(connection));
        self.changes.send_replace(());
    }

    fn set_down(self: &Arc<Self>, failure: Failure) {
        let mut state = lock(&self.state);
        state.backoff.failed();
        if let Some(suppressed) = self.lines[1].admit(Instant::now()) {
            let (uri, reason, retry_in) = (self.endpoint.uri(), failure.reason(), state.backoff.remaining());
            tracing::warn!(%uri, reason, ?retry_in, suppressed, "endpoint is down");
        }
        state.phase = Phase::Down(Instant::now(), Arc::new(failure));
        self.changes.send_replace(());
    }

    /// Notes that the connection takes no more calls. The next dial is due at once, unless the connection ended soon after its own dial.
    fn note_end(self: &Arc<Self>, state: &mut State) {
        state.backoff.ended();
        if let Some(suppressed) = self.lines[2].admit(Instant::now()) {
            tracing::info!(uri = %self.endpoint.uri(), suppressed, "endpoint's connection ended");
        }
        // The server may have ended it for its age: calls wait for a moment.
        state.phase = if self.has_others && state.backoff.remaining() > SHORT_WAIT {
            Phase::Down(Instant::now(), Arc::new(Failure::Http2(DialError::EndedAtOnce)))
        } else {
            Phase::Idle
        };
        self.changes.send_replace(());
    }

    /// Notes that `connection` has ended, if a call has not noted it before.
    fn has_ended(self: &Arc<Self>, connection: &Arc<Connection>) {
        let mut state = lock(&self.state);
        if matches!(&state.phase, Phase::Up(current) if Arc::ptr_eq(current, connection)) {
            self.note_end(&mut state);
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Some(task) = lock(&self.state).task.take() {
            task.abort();
        }
    }
}

/// A dial. It does not keep its member.
struct Attempt {
    member: Weak<Member>,
    number: u64,
    delay: Duration,
}

impl Attempt {
    async fn carry_out(self, endpoint: Endpoint, dialling: Arc<Dialling>, terms: Option<Arc<Terms>>) {
        // If the runtime drops this task, calls must not wait for the dial.
        let unfinished = Unfinished { member: self.member.clone(), number: self.number };
        tokio::time::sleep(self.delay).await;
        if let Some(member) = self.member.upgrade() {
            lock(&member.state).backoff.begin();
        }
        let connected = Connection::connect(&endpoint, &dialling, terms).await;
        let Some(member) = self.member.upgrade() else { return };
        match connected {
            Ok(connection) => {
                let connection = Arc::new(connection);
                member.set_up(&mut lock(&member.state), &connection);
                drop((member, unfinished));
                watch_end(self.member, connection).await;
            }
            Err(failure) => member.set_down(failure),
        }
    }
}

/// Waits until the connection has ended, and notes it.
async fn watch_end(member: Weak<Member>, connection: Arc<Connection>) {
    connection.ended().await;
    if let Some(member) = member.upgrade() {
        member.has_ended(&connection);
    }
}

/// Notes a dial that was dropped before its end.
struct Unfinished {
    member: Weak<Member>,
    number: u64,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let Some(member) = self.member.upgrade() else { return };
        let is_current = {
            let state = lock(&member.state);
            state.dials == self.number && matches!(state.phase, Phase::Connecting)
        };
        if is_current {
            member.set_down(Failure::Interrupted);
        }
    }
}

/// Keeps the endpoints of a channel connected while no calls are made.
pub(super) async fn keep(member: Weak<Member>) {
    let Some(mut changes) = member.upgrade().map(|member| member.changes.subscribe()) else { return };
    loop {
        changes.mark_unchanged();
        let Some(look) = member.upgrade().map(|member| member.look(Instant::now())) else { return };
        let retry = match look {
            Look::Down(..) => member.upgrade().map(|member| lock(&member.state).backoff.remaining()),
            // A connection must not be kept here.
            Look::Up(_) | Look::Wait => None,
        };
        let due = async {
            match retry {
                Some(delay) => tokio::time::sleep(delay).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = due => {}
        }
    }
}
