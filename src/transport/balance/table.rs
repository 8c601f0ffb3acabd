//! The table of a channel's endpoints: which of them are up, and which one a call goes to. It does no IO. The
//! tasks that keep the endpoints connected write it, with delays between their dials, and calls pick a
//! connection from it.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{fmt, mem};

use http::Uri;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tonic::Status;

use super::connection::{DialError, unavailable};
use crate::endpoint::RdmaConnectInfo;
use tonic_rdma_verbs::unstable::{Throttle, lock};

/// The state of an endpoint of an [`RdmaChannel`](crate::RdmaChannel) or a
/// [`BalancedChannel`](super::BalancedChannel).
///
/// ```
/// use tonic_rdma::EndpointState;
///
/// fn is_up(state: &EndpointState) -> bool {
///     matches!(state, EndpointState::Up(_))
/// }
/// # assert!(!is_up(&EndpointState::Connecting));
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum EndpointState {
    /// The first dial is under way, or the first dial after the connection ended.
    Connecting,
    /// The endpoint takes calls over this connection.
    Up(RdmaConnectInfo),
    /// The endpoint takes no calls for this reason, and is dialled again by back-off.
    Down(Arc<str>),
}

/// An endpoint of a channel, as [`RdmaChannel::endpoints`](crate::RdmaChannel::endpoints) and
/// [`BalancedChannel::endpoints`](super::BalancedChannel::endpoints) return it.
///
/// ```
/// use tonic_rdma::{BalancedChannel, EndpointStatus};
///
/// fn busiest(channel: &BalancedChannel) -> Option<EndpointStatus> {
///     channel.endpoints().into_iter().max_by_key(|endpoint| endpoint.calls)
/// }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EndpointStatus {
    /// The URI of the endpoint.
    pub uri: Uri,
    /// The state of the endpoint.
    pub state: EndpointState,
    /// The number of calls in flight on the endpoint.
    pub calls: usize,
}

/// A connection that calls go over.
pub(crate) trait Connection: fmt::Debug + Send + Sync + 'static {
    /// Returns what was negotiated.
    fn info(&self) -> &RdmaConnectInfo;

    /// Returns whether the connection takes further calls. One that takes no more never takes some again.
    fn is_usable(&self) -> bool;

    /// Returns the number of calls in flight.
    fn load(&self) -> usize;

    /// Waits until the connection has ended. It may be unusable earlier.
    fn ended(&self) -> impl Future<Output = ()> + Send;
}

/// The endpoints of a channel.
#[derive(Debug)]
pub(crate) struct Table<C> {
    entries: Mutex<Entries<C>>,
    /// Announces each change of the entries.
    pub(super) changes: watch::Sender<()>,
    /// An endpoint is dialled when a call needs it. Otherwise it is dialled as soon as it is in the table,
    /// and again when it is down.
    on_demand: bool,
    /// The channel's maker gets the error of a dial that fails, so the log has no line of it.
    pub(crate) is_connecting: AtomicBool,
}

#[derive(Debug)]
struct Entries<C> {
    by_id: BTreeMap<u64, Entry<C>>,
    /// The connections of the entries that are up.
    up: Vec<Arc<C>>,
    next: u64,
}

#[derive(Debug)]
struct Entry<C> {
    uri: Uri,
    state: ConnectionState<C>,
    /// No task dials the endpoint any more.
    is_abandoned: bool,
}

/// The state of an endpoint.
#[derive(Debug)]
enum ConnectionState<C> {
    /// No call needs the endpoint, which is dialled on demand.
    Idle,
    /// Calls wait for the dial that is under way, or about to begin.
    Connecting,
    Up(Arc<C>),
    Down(Instant, Arc<DialError>),
}

impl<C: Connection> Table<C> {
    /// Makes a table without endpoints. With `on_demand`, endpoints are dialled when a call needs them.
    pub(crate) fn new(on_demand: bool) -> Arc<Self> {
        let entries = Entries { by_id: BTreeMap::new(), up: Vec::new(), next: 0 };
        let (changes, is_connecting) = (watch::Sender::new(()), AtomicBool::new(false));
        Arc::new(Self { entries: Mutex::new(entries), changes, on_demand, is_connecting })
    }

    /// Returns the connection of the only endpoint of the table, if there is one. It may accept no further
    /// calls.
    pub(crate) fn only(&self) -> Option<Arc<C>> {
        let entries = lock(&self.entries);
        match &entries.up[..] {
            [only] if entries.by_id.len() == 1 => Some(Arc::clone(only)),
            _ => None,
        }
    }

    /// Returns the connection for a call that began at `begun`, or `None` if the call waits for a change of
    /// the table. An endpoint on demand is dialled for each call that needs it: the failure of a dial ends
    /// the calls that began before it.
    ///
    /// # Errors
    /// The call fails with UNAVAILABLE, because all endpoints are down.
    pub(crate) fn pick(&self, begun: Instant) -> Result<Option<Arc<C>>, Status> {
        // Connections are dropped without the lock.
        let mut old = Vec::new();
        let mut entries = lock(&self.entries);
        let pick = loop {
            if let Some(connection) = entries.pick() {
                break Ok(Some(connection));
            }
            let before = old.len();
            entries.dial_again(self.on_demand.then_some(begun), &mut old);
            if old.len() == before {
                break entries.without_connection();
            }
        };
        drop(entries);
        if !old.is_empty() {
            self.changes.send_replace(());
        }
        pick
    }

    /// Returns the state of each endpoint, in the order in which they were added.
    pub(crate) fn status(&self) -> Vec<EndpointStatus> {
        lock(&self.entries).by_id.values().map(Entry::status).collect()
    }

    /// Adds an endpoint. Returns its number.
    fn add(&self, uri: Uri) -> u64 {
        let state = if self.on_demand { ConnectionState::Idle } else { ConnectionState::Connecting };
        self.change(|entries| {
            let id = entries.next;
            entries.next += 1;
            entries.by_id.insert(id, Entry { uri, state, is_abandoned: false });
            id
        })
    }

    fn remove(&self, id: u64) {
        drop(self.change(|entries| entries.by_id.remove(&id)));
    }

    fn up(&self, id: u64, connection: &Arc<C>) {
        self.set(id, |_| Some(ConnectionState::Up(Arc::clone(connection))));
    }

    fn down(&self, id: u64, error: DialError) {
        self.set(id, |_| Some(ConnectionState::down(error)));
    }

    /// Notes that the connection of an endpoint accepts no further calls. If it ended too soon after its
    /// dial, the endpoint is down.
    fn ended(&self, id: u64, too_soon: bool) {
        self.set(id, |entry| match (&entry.state, self.on_demand) {
            // A call waits for the next dial.
            (ConnectionState::Connecting, true) => None,
            (_, true) => Some(ConnectionState::Idle),
            (_, false) if too_soon => Some(ConnectionState::down(DialError::EndedAtOnce)),
            (_, false) => Some(ConnectionState::Connecting),
        });
    }

    /// Notes that no task dials the endpoint any more.
    fn abandon(&self, id: u64) {
        self.set(id, |entry| {
            entry.is_abandoned = true;
            matches!(entry.state, ConnectionState::Idle | ConnectionState::Connecting).then(|| entry.needed())
        });
    }

    /// Waits until `is_such` holds for the state of an endpoint, or the endpoint is removed.
    async fn until(&self, id: u64, is_such: impl Fn(&ConnectionState<C>) -> bool) {
        let is_such = |(): &()| lock(&self.entries).by_id.get(&id).is_none_or(|entry| is_such(&entry.state));
        // This fails only if the sender is gone, which `self` holds.
        drop(self.changes.subscribe().wait_for(is_such).await);
    }

    /// Sets the state of an endpoint, if `next` returns one, and unless the endpoint was removed meanwhile.
    fn set(&self, id: u64, next: impl FnOnce(&mut Entry<C>) -> Option<ConnectionState<C>>) {
        drop(self.change(|entries| {
            let entry = entries.by_id.get_mut(&id)?;
            next(entry).map(|next| mem::replace(&mut entry.state, next))
        }));
    }

    /// Changes the entries. What `change` returns, and the list of connections before, can be dropped without
    /// the lock.
    fn change<R>(&self, change: impl FnOnce(&mut Entries<C>) -> R) -> R {
        let (changed, _before) = {
            let mut entries = lock(&self.entries);
            (change(&mut entries), entries.list_up())
        };
        self.changes.send_replace(());
        changed
    }
}

impl<C: Connection> Entries<C> {
    /// Lists the connections again. Returns the list before.
    fn list_up(&mut self) -> Vec<Arc<C>> {
        let up = self.by_id.values().filter_map(|entry| match &entry.state {
            ConnectionState::Up(connection) => Some(Arc::clone(connection)),
            _ => None,
        });
        mem::replace(&mut self.up, up.collect())
    }

    /// Takes two connections at random, and returns the connection with fewer calls in flight. It is nearly
    /// as good as the least busy connection of all, and concurrent calls do not all choose one connection.
    /// `None` if one of the two accepts no further calls.
    fn pick(&self) -> Option<Arc<C>> {
        let count = self.up.len();
        if count == 0 {
            return None;
        }
        let first = fastrand::usize(..count);
        // Another connection than the first, if there is more than one.
        let second = (first + fastrand::usize(1..count.max(2))) % count;
        let (one, other) = (&self.up[first], &self.up[second]);
        if !one.is_usable() || (count > 1 && !other.is_usable()) {
            return None;
        }
        Some(Arc::clone(if count > 1 && other.load() < one.load() { other } else { one }))
    }

    /// Lets tasks dial again whose endpoint has a connection that accepts no further calls. With `begun`,
    /// also those of endpoints on demand that are idle, or have been down since before that time. Adds what
    /// is to be dropped to `old`, if there is a change.
    fn dial_again(&mut self, begun: Option<Instant>, old: &mut Vec<ConnectionState<C>>) {
        let before = old.len();
        for entry in self.by_id.values_mut() {
            let is_due = match &entry.state {
                ConnectionState::Idle => true,
                ConnectionState::Connecting => false,
                ConnectionState::Up(connection) => !connection.is_usable(),
                ConnectionState::Down(since, _) => begun.is_some_and(|begun| *since < begun),
            };
            if is_due {
                let needed = entry.needed();
                old.push(mem::replace(&mut entry.state, needed));
            }
        }
        if old.len() > before {
            old.extend(self.list_up().into_iter().map(ConnectionState::Up));
        }
    }

    /// Returns the answer to a call while no endpoint is up.
    fn without_connection(&self) -> Result<Option<Arc<C>>, Status> {
        let mut last: Option<(Instant, &Uri, &Arc<DialError>)> = None;
        for entry in self.by_id.values() {
            let ConnectionState::Down(since, error) = &entry.state else { return Ok(None) };
            if last.is_none_or(|(latest, ..)| latest < *since) {
                last = Some((*since, &entry.uri, error));
            }
        }
        Err(unavailable(self.by_id.len(), last.map(|(_, uri, error)| (uri, error))))
    }
}

impl<C: Connection> Entry<C> {
    /// Returns the state of an endpoint that is to be dialled.
    fn needed(&self) -> ConnectionState<C> {
        if self.is_abandoned {
            ConnectionState::down(DialError::Interrupted)
        } else {
            ConnectionState::Connecting
        }
    }

    fn status(&self) -> EndpointStatus {
        let (state, calls) = match &self.state {
            ConnectionState::Idle | ConnectionState::Connecting => (EndpointState::Connecting, 0),
            ConnectionState::Up(connection) => {
                (EndpointState::Up(connection.info().clone()), connection.load())
            }
            ConnectionState::Down(_, error) => (EndpointState::Down(error.reason().into()), 0),
        };
        EndpointStatus { uri: self.uri.clone(), state, calls }
    }
}

impl<C> ConnectionState<C> {
    fn down(error: DialError) -> Self {
        Self::Down(Instant::now(), Arc::new(error))
    }
}

/// The longest time that a call waits for the back-off of an endpoint. A server may have ended its connection
/// for its age.
const SHORT_WAIT: Duration = Duration::from_millis(100);

/// An endpoint of a table. Dropping it removes it from the table, and ends its task.
#[derive(Debug)]
pub(crate) struct KeptEndpoint<C: Connection> {
    id: u64,
    task: AbortHandle,
    table: Arc<Table<C>>,
}

impl<C: Connection> KeptEndpoint<C> {
    /// Adds an endpoint to `table`. A task on `runtime` dials it by `dial`, at first and whenever its connection
    /// has ended.
    pub(crate) fn new<D, F>(table: &Arc<Table<C>>, runtime: &Handle, uri: Uri, dial: D) -> Self
    where
        D: FnMut() -> F + Send + 'static,
        F: Future<Output = Result<C, DialError>> + Send + 'static,
    {
        let (id, table) = (table.add(uri.clone()), Arc::clone(table));
        let abandons = Abandons { table: Arc::clone(&table), id };
        let task = runtime.spawn(keep(abandons, uri, dial)).abort_handle();
        Self { id, task, table }
    }
}

impl<C: Connection> Drop for KeptEndpoint<C> {
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
async fn keep<C, D, F>(of: Abandons<C>, uri: Uri, mut dial: D)
where
    C: Connection,
    D: FnMut() -> F,
    F: Future<Output = Result<C, DialError>>,
{
    let Abandons { table, id } = &of;
    let (id, mut backoff) = (*id, Backoff::new());
    // Each endpoint limits its own log lines, so an endpoint that comes and goes does not hide the lines of
    // the others.
    let [up, ended, down] = [const { Throttle::new(Throttle::BURST) }; 3];
    loop {
        let mut delay = backoff.remaining();
        if table.on_demand {
            table.until(id, |state| matches!(state, ConnectionState::Connecting)).await;
            delay = backoff.remaining().min(SHORT_WAIT);
        }
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        backoff.begin();
        match dial().await.map(Arc::new) {
            Ok(connection) => {
                if let Some(suppressed) = up.admit(Instant::now()) {
                    let (verdict, native) = (connection.info().verdict(), connection.info().is_native());
                    tracing::info!(%uri, %verdict, native, suppressed, "endpoint is up");
                }
                table.up(id, &connection);
                tokio::select! {
                    () = connection.ended() => {}
                    // A call has found that the connection accepts no further calls.
                    () = table.until(id, |state| !matches!(state, ConnectionState::Up(_))) => {}
                }
                drop(connection);
                backoff.ended();
                // The endpoint is dialled again at once, and calls wait for that dial. After a short
                // connection the back-off delays the dial, and no call waits.
                table.ended(id, backoff.remaining() > SHORT_WAIT);
                if let Some(suppressed) = ended.admit(Instant::now()) {
                    tracing::info!(%uri, suppressed, "endpoint's connection ended");
                }
            }
            Err(error) => {
                backoff.failed();
                let reason = error.reason();
                table.down(id, error);
                if !table.is_connecting.load(Ordering::Relaxed)
                    && let Some(suppressed) = down.admit(Instant::now())
                {
                    tracing::warn!(%uri, reason, retry_in = ?backoff.remaining(), suppressed, "endpoint is down");
                }
            }
        }
    }
}

/// The delay from the start of one dial to the start of the next. It is short at first, and grows with each
/// failure.
#[derive(Debug)]
struct Backoff {
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
    /// The part of a delay that is added or taken away at random. Without it all clients of a server that
    /// came back would dial at once.
    const JITTER: f64 = 0.2;

    fn new() -> Self {
        Self { delay: Self::FIRST, due: Instant::now() }
    }

    /// Notes that a dial begins.
    fn begin(&mut self) {
        let jitter = 1.0 + Self::JITTER * (2.0 * fastrand::f64() - 1.0);
        self.due = Instant::now() + self.delay.mul_f64(jitter);
    }

    /// Notes that the dial failed.
    fn failed(&mut self) {
        self.delay = self.delay.mul_f64(Self::GROWTH).min(Self::MOST);
    }

    /// Notes that the connection ended. A connection that ends before the next dial is due counts as a failed
    /// dial, so a server that takes connections and drops them is not dialled more often than a server that
    /// refuses them.
    fn ended(&mut self) {
        match self.remaining() {
            Duration::ZERO => self.delay = Self::FIRST,
            _ => self.failed(),
        }
    }

    /// Returns the time until the next dial is due.
    fn remaining(&self) -> Duration {
        self.due.saturating_duration_since(Instant::now())
    }
}

#[cfg(test)]
#[allow(clippy::panic, reason = "tests")]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};
    use std::pin::pin;
    use std::sync::atomic::AtomicUsize;
    use std::task::{Context, Waker};

    use tokio::sync::mpsc;
    use tonic::transport::Endpoint;
    use tonic::transport::channel::Change;

    use super::super::members::Members;
    use super::*;
    use crate::endpoint::RdmaUnavailable;

    #[derive(Debug)]
    struct Fake {
        info: RdmaConnectInfo,
        is_ended: AtomicBool,
        load: AtomicUsize,
    }

    impl Connection for Fake {
        fn info(&self) -> &RdmaConnectInfo {
            &self.info
        }

        fn is_usable(&self) -> bool {
            !self.is_ended.load(Ordering::SeqCst)
        }

        fn load(&self) -> usize {
            self.load.load(Ordering::SeqCst)
        }

        async fn ended(&self) {
            std::future::pending().await
        }
    }

    fn connection(load: usize) -> Arc<Fake> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let info = RdmaConnectInfo::tcp(address, address, &RdmaUnavailable::other("a test"));
        Arc::new(Fake { info, is_ended: AtomicBool::new(false), load: AtomicUsize::new(load) })
    }

    fn uri() -> Uri {
        Uri::from_static("http://ps0:50051")
    }

    fn add_up(table: &Table<Fake>, connection: &Arc<Fake>) -> u64 {
        let id = table.add(uri());
        table.up(id, connection);
        id
    }

    /// A table of endpoints that are up, and their connections.
    fn up<const COUNT: usize>(loads: [usize; COUNT]) -> (Arc<Table<Fake>>, [Arc<Fake>; COUNT]) {
        let (table, connections) = (Table::new(false), loads.map(connection));
        for connection in &connections {
            add_up(&table, connection);
        }
        (table, connections)
    }

    fn picked(table: &Table<Fake>) -> Arc<Fake> {
        match table.pick(Instant::now()) {
            Ok(Some(connection)) => connection,
            other => panic!("{other:?}"),
        }
    }

    fn failure(table: &Table<Fake>, begun: Instant) -> String {
        match table.pick(begun) {
            Err(status) => status.message().to_string(),
            other => panic!("{other:?}"),
        }
    }

    fn waits(table: &Table<Fake>, begun: Instant) -> bool {
        matches!(table.pick(begun), Ok(None))
    }

    #[test]
    fn a_call_goes_to_the_less_busy_one_of_two() {
        let (table, [busy, idle]) = up([2, 1]);
        assert!((0..100).all(|_| Arc::ptr_eq(&picked(&table), &idle)));
        busy.load.store(0, Ordering::SeqCst);
        assert!((0..100).all(|_| Arc::ptr_eq(&picked(&table), &busy)));
    }

    #[test]
    fn the_busiest_of_three_gets_no_calls_and_the_others_get_some() {
        let (table, connections) = up([1, 0, 0]);
        let mut picks = [0; 3];
        for _ in 0..200 {
            let connection = picked(&table);
            let index = connections.iter().position(|other| Arc::ptr_eq(other, &connection));
            picks[index.unwrap_or_default()] += 1;
        }
        assert!(picks[0] == 0 && picks[1] > 0 && picks[2] > 0, "{picks:?}");
    }

    #[test]
    fn a_call_finds_a_connection_that_takes_no_more_calls() {
        let (table, [ended, other]) = up([0, 1]);
        ended.is_ended.store(true, Ordering::SeqCst);
        let changes = table.changes.subscribe();
        assert!((0..10).all(|_| Arc::ptr_eq(&picked(&table), &other)));
        assert!(changes.has_changed().is_ok_and(|changed| changed), "the endpoint's task is told");
        assert!(matches!(table.status()[0].state, EndpointState::Connecting));
        other.is_ended.store(true, Ordering::SeqCst);
        assert!(waits(&table, Instant::now()));
        table.up(0, &connection(0));
        assert_eq!(picked(&table).load(), 0);
    }

    #[test]
    fn a_call_waits_for_the_first_dial_and_then_fails_with_the_last_reason() {
        let (table, begun) = (Table::new(false), Instant::now());
        assert_eq!(failure(&table, begun), "there is no endpoint to call");
        let (one, other) = (table.add(uri()), table.add(uri()));
        table.down(other, DialError::Closed);
        assert!(waits(&table, begun), "the first dial of one is under way");
        table.down(one, DialError::EndedAtOnce);
        let expected = format!("all 2 endpoints are down, the last one to fail was {}: ", uri());
        assert_eq!(failure(&table, begun), format!("{expected}{}", DialError::EndedAtOnce));
        assert_eq!(failure(&table, Instant::now()), format!("{expected}{}", DialError::EndedAtOnce));
        table.remove(one);
        assert_eq!(failure(&table, begun), format!("{}: {}", uri(), DialError::Closed));
        table.up(one, &connection(0));
        assert_eq!(table.status().len(), 1, "a task that ends late brings no endpoint back");
    }

    #[tokio::test]
    async fn a_waiting_call_finds_the_endpoints_that_were_added_meanwhile() {
        let (table, (sender, changes)) = (Table::<Fake>::new(false), mpsc::channel(1));
        let runtime = Handle::current();
        let keep = move |table: &_, endpoint: Endpoint| {
            KeptEndpoint::new(table, &runtime, endpoint.uri().clone(), std::future::pending)
        };
        let members = Members::new(Arc::clone(&table), Vec::new()).changing(changes, keep);
        let (one, mut context) = (table.add(uri()), Context::from_waker(Waker::noop()));
        let mut call = pin!(members.connection(Instant::now()));
        assert!(call.as_mut().poll(&mut context).is_pending());
        // The task that applies changes has no turn before the call.
        sender.try_send(Change::Insert(2, Endpoint::from_static("http://ps1:50051"))).unwrap();
        table.down(one, DialError::Closed);
        assert!(call.as_mut().poll(&mut context).is_pending(), "the other endpoint is being dialled");
    }

    #[test]
    fn an_endpoint_whose_connection_ended_is_connecting_or_down_if_that_was_soon() {
        let (table, _connections) = up([0]);
        table.ended(0, false);
        assert!(waits(&table, Instant::now()));
        table.up(0, &connection(0));
        table.ended(0, true);
        assert_eq!(failure(&table, Instant::now()), format!("{}: {}", uri(), DialError::EndedAtOnce));
    }

    #[test]
    fn an_endpoint_on_demand_is_dialled_for_each_call_that_needs_it() {
        let (table, begun) = (Table::<Fake>::new(true), Instant::now());
        let id = table.add(uri());
        let is_connecting = || matches!(lock(&table.entries).by_id[&id].state, ConnectionState::Connecting);
        assert!(!is_connecting(), "no call needs it");
        assert!(waits(&table, begun) && is_connecting());
        table.down(id, DialError::Closed);
        assert_eq!(failure(&table, begun), format!("{}: {}", uri(), DialError::Closed));
        assert!(!is_connecting(), "the call has begun before the failure");
        assert!(waits(&table, Instant::now() + Duration::from_secs(1)) && is_connecting());
        table.up(id, &connection(0));
        table.ended(id, true);
        assert!(!is_connecting(), "no call needs it");
        assert!(waits(&table, begun) && is_connecting());
        table.ended(id, true);
        assert!(is_connecting(), "a call waits");
    }

    #[test]
    fn no_call_waits_for_a_task_that_has_ended() {
        for on_demand in [false, true] {
            let table = Table::new(on_demand);
            let id = table.add(uri());
            table.abandon(id);
            let interrupted = format!("{}: {}", uri(), DialError::Interrupted);
            assert_eq!(failure(&table, Instant::now() + Duration::from_secs(1)), interrupted);
            let connection = connection(0);
            let last = add_up(&table, &connection);
            table.abandon(last);
            assert!(Arc::ptr_eq(&picked(&table), &connection), "the connection still takes calls");
            connection.is_ended.store(true, Ordering::SeqCst);
            assert!(failure(&table, Instant::now()).ends_with(&interrupted));
        }
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
