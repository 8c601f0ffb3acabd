//! The task that keeps an endpoint connected, and the delays between its dials.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::Uri;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::connection::DialError;
use super::table::{Connection, State, Table};
use tonic_rdma_verbs::internal::Throttle;

/// The longest time that a call waits for the back-off of an endpoint. A server may have ended its connection for its age.
const SHORT_WAIT: Duration = Duration::from_millis(100);

/// An endpoint of a table. Dropping it removes it from the table, and ends its task.
#[derive(Debug)]
pub(crate) struct Kept<C: Connection> {
    id: u64,
    task: AbortHandle,
    table: Arc<Table<C>>,
}

impl<C: Connection> Kept<C> {
    /// Adds an endpoint to `table`. A task on `runtime` dials it by `dial`, unless it has a `first` connection already, and whenever its
    /// connection has ended.
    pub(crate) fn new<D, F>(
        table: &Arc<Table<C>>,
        runtime: &Handle,
        uri: Uri,
        first: Option<Arc<C>>,
        dial: D,
    ) -> Self
    where
        D: FnMut() -> F + Send + 'static,
        F: Future<Output = Result<C, DialError>> + Send + 'static,
    {
        let (id, table) = (table.add(uri.clone(), first.clone()), Arc::clone(table));
        let abandons = Abandons { table: Arc::clone(&table), id };
        let task = runtime.spawn(keep(abandons, uri, first, dial)).abort_handle();
        Self { id, task, table }
    }
}

impl<C: Connection> Drop for Kept<C> {
    fn drop(&mut self) {
        self.task.abort();
        self.table.remove(self.id);
    }
}

/// An endpoint of a task. If the runtime drops the task, calls must not wait for it.
struct Abandons<C: Connection> {
    table: Arc<Table<C>>,
    id: u64,
}

impl<C: Connection> Drop for Abandons<C> {
    fn drop(&mut self) {
        self.table.abandon(self.id);
    }
}

/// Keeps an endpoint connected, and its entry in the table up to date, until the task is aborted.
async fn keep<C, D, F>(of: Abandons<C>, uri: Uri, mut first: Option<Arc<C>>, mut dial: D)
where
    C: Connection,
    D: FnMut() -> F,
    F: Future<Output = Result<C, DialError>>,
{
    let Abandons { table, id } = &of;
    let (id, mut backoff) = (*id, Backoff::new());
    // Each endpoint limits its own log lines, so an endpoint that comes and goes does not hide the lines of the others.
    let [up, ended, down] = [const { Throttle::new(Throttle::BURST) }; 3];
    loop {
        let connected = match first.take() {
            Some(connection) => {
                backoff.begin();
                Ok(connection)
            }
            None => {
                let mut delay = backoff.remaining();
                if table.on_demand {
                    table.until(id, |state| matches!(state, State::Connecting)).await;
                    delay = backoff.remaining().min(SHORT_WAIT);
                }
                if !delay.is_zero() {
                    tokio::time::sleep(delay).await;
                }
                backoff.begin();
                dial().await.map(Arc::new)
            }
        };
        match connected {
            Ok(connection) => {
                if let Some(suppressed) = up.admit(Instant::now()) {
                    let (verdict, native) = (connection.info().verdict(), connection.info().is_native());
                    tracing::info!(%uri, %verdict, native, suppressed, "endpoint is up");
                }
                table.up(id, &connection);
                tokio::select! {
                    () = connection.ended() => {}
                    // A call has found that the connection takes no further calls.
                    () = table.until(id, |state| !matches!(state, State::Up(_))) => {}
                }
                drop(connection);
                backoff.ended();
                // The endpoint is dialled again at once, and calls wait for that dial. After a short connection the back-off delays the
                // dial, and no call waits.
                table.ended(id, backoff.remaining() > SHORT_WAIT);
                if let Some(suppressed) = ended.admit(Instant::now()) {
                    tracing::info!(%uri, suppressed, "endpoint's connection ended");
                }
            }
            Err(error) => {
                backoff.failed();
                let reason = error.reason();
                table.down(id, error);
                if let Some(suppressed) = down.admit(Instant::now()) {
                    tracing::warn!(%uri, reason, retry_in = ?backoff.remaining(), suppressed, "endpoint is down");
                }
            }
        }
    }
}

/// The delay from the start of one dial to the start of the next. It is short at first, and grows with each failure.
#[derive(Debug)]
pub(super) struct Backoff {
    delay: Duration,
    due: Instant,
}

impl Backoff {
    /// The first delay.
    const FIRST: Duration = Duration::from_millis(100);
    /// The longest delay.
    const MOST: Duration = Duration::from_secs(10);
    /// The factor by which each failure makes the delay longer.
    const GROWTH: f64 = 1.6;
    /// The part of a delay that is added or taken away at random. Without it all clients of a server that came back would dial at once.
    const JITTER: f64 = 0.2;

    pub(super) fn new() -> Self {
        Self { delay: Self::FIRST, due: Instant::now() }
    }

    /// Notes that a dial begins.
    pub(super) fn begin(&mut self) {
        let jitter = 1.0 + Self::JITTER * (2.0 * fastrand::f64() - 1.0);
        self.due = Instant::now() + self.delay.mul_f64(jitter);
    }

    /// Notes that the dial failed.
    pub(super) fn failed(&mut self) {
        self.delay = self.delay.mul_f64(Self::GROWTH).min(Self::MOST);
    }

    /// Notes that the connection ended. A connection that ends before the next dial is due counts as a failed dial, so a server that
    /// takes connections and drops them is not dialled more often than a server that refuses them.
    pub(super) fn ended(&mut self) {
        match self.remaining() {
            Duration::ZERO => self.delay = Self::FIRST,
            _ => self.failed(),
        }
    }

    /// Returns the time until the next dial is due.
    pub(super) fn remaining(&self) -> Duration {
        self.due.saturating_duration_since(Instant::now())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod backoff_tests {
    use super::*;

    #[test]
    fn delays_grow_to_a_limit_and_scatter() {
        let mut backoff = Backoff::new();
        let mut delays = Vec::new();
        for _ in 0..20 {
            backoff.begin();
            delays.push(backoff.delay);
            assert!(backoff.remaining() <= backoff.delay.mul_f64(1.0 + Backoff::JITTER));
            backoff.failed();
        }
        assert_eq!(delays[..2], [Backoff::FIRST, Duration::from_millis(160)]);
        assert!(delays.is_sorted());
        assert_eq!(*delays.last().unwrap(), Backoff::MOST);
    }

    #[test]
    fn a_connection_that_lasts_longer_than_the_delay_resets_the_delay() {
        let mut backoff = Backoff::new();
        backoff.delay = Backoff::MOST;
        backoff.begin();
        backoff.ended();
        assert_eq!(backoff.delay, Backoff::MOST, "it ended at once");
        backoff.due = Instant::now();
        backoff.ended();
        assert_eq!(backoff.delay, Backoff::FIRST, "it ended after the delay");
    }
}
