//! The parts of a run: their processes, the streams to them, and what becomes of the run when one of them
//! ends.

use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;
use tonic_rdma_commands::Failure;
use tonic_rdma_commands::process::{self, Child};

use crate::control::proto::part_client::PartClient;
use crate::control::proto::{self, part_server::SERVICE_NAME};
use crate::control::{Differs, Order, Report, read, text};
use crate::part::LISTENING;

/// The longest time for a process to say where it listens.
const START: Duration = Duration::from_secs(30);
/// The longest time for a process to end after its stream.
const END: Duration = Duration::from_secs(1);
/// How long the other parts may take to report after one has failed. The first to report is not always the
/// one that failed first.
const GRACE: Duration = Duration::from_secs(2);
/// The number of orders that may wait for a part. The chunks of a model are orders too.
const ORDERS: usize = 8;
/// How often the peer is asked whether it lives, and how long it may take to answer. Parts that compute leave
/// little time to others.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
const ALIVE: Duration = Duration::from_secs(30);
/// The longest time for a connection to a part.
const CONNECT: Duration = Duration::from_secs(10);
/// The largest message of a part: a tensor that differs.
const LARGEST: usize = 1 << 30;

/// The parts. Their processes end with this value, and with this process.
#[derive(Debug)]
pub(crate) struct Parts {
    /// Processes of this machine. Without them, the parts are on other hosts.
    children: Vec<Child>,
    orders: Vec<mpsc::Sender<proto::Order>>,
    events: mpsc::UnboundedReceiver<(usize, Event)>,
    /// The longest wait for all parts.
    limit: Duration,
    /// Tensors that differ, as they were reported.
    pub(crate) differing: Vec<(Differs, Bytes)>,
}

/// What a part did.
#[derive(Debug)]
enum Event {
    Report(Report, Bytes),
    /// The stream has ended, and why.
    Ended(String),
}

/// Starts a process for each part: this program again. Returns the addresses at which they listen. The kernel
/// ends the processes with the thread that calls this, so this must be the thread that lives as long as this
/// process.
pub(crate) fn start(parts: usize) -> Result<(Vec<Child>, Vec<String>), Failure> {
    let parent = std::process::id().to_string();
    let start = |part| {
        let mut command = process::again()?;
        command.args(["serve", "--listen", "127.0.0.1:0", "--parent", &parent]);
        Child::with_lines(format!("the process of part {part}"), command)
    };
    let mut children = (0..parts).map(start).collect::<Result<Vec<_>, _>>()?;
    let address = |child: &mut Child| {
        let line = child.line(START)?;
        let address = line.strip_prefix(LISTENING).map(str::to_owned);
        address.ok_or_else(|| Failure::run(format!("{} does not say where it listens: {line}", child.name())))
    };
    let addresses = children.iter_mut().map(address).collect::<Result<_, _>>()?;
    Ok((children, addresses))
}

impl Parts {
    /// Opens the streams to all parts.
    pub(crate) async fn open(
        children: Vec<Child>,
        addresses: &[String],
        limit: Duration,
    ) -> Result<Self, Failure> {
        let (sender, events) = mpsc::unbounded_channel();
        let mut parts = Self { children, orders: Vec::new(), events, limit, differing: Vec::new() };
        for (part, address) in addresses.iter().enumerate() {
            let endpoint = Endpoint::from_shared(format!("http://{address}"))
                .map_err(|error| Failure::usage(format!("part {part}: bad address {address:?}: {error}")))?;
            let orders = open(part, endpoint, &sender).await.map_err(|reason| {
                let hint = parts.fate(part);
                let hint = hint
                    .unwrap_or_else(|| format!("start `tonic-rdma-graph serve --listen {address}` there"));
                Failure::run(format!("can't reach part {part} at {address}: {reason}; {hint}"))
            })?;
            parts.orders.push(orders);
        }
        Ok(parts)
    }

    /// Returns the number of parts.
    pub(crate) fn len(&self) -> usize {
        self.orders.len()
    }

    /// Returns how the process of a part ended, if it is one of this machine.
    fn fate(&self, part: usize) -> Option<String> {
        self.children.get(part).map(|child| format!("its process {}", process::how_ended(child.wait(END))))
    }

    /// Sends an order to a part. If the stream has ended, an event says so.
    pub(crate) async fn send(&mut self, part: usize, order: &Order, content: Bytes) -> Result<(), Failure> {
        let order = proto::Order { json: text(order)?, content };
        let sent = timeout(self.limit, self.orders[part].send(order)).await;
        sent.map(drop).map_err(|_| self.late(&[part], "took an order"))
    }

    /// Sends an order to all parts.
    pub(crate) async fn send_all(&mut self, order: &Order) -> Result<(), Failure> {
        for part in 0..self.len() {
            self.send(part, order, Bytes::new()).await?;
        }
        Ok(())
    }

    /// Waits for the next event until `end`.
    async fn next(&mut self, end: Instant) -> Option<(usize, Event)> {
        let left = end.saturating_duration_since(Instant::now());
        timeout(left, self.events.recv()).await.ok().flatten()
    }

    /// Waits for a report of each part. `accept` takes it, or gives another report back ([`only!`]). `what`
    /// ends the sentence "part 0 has not …".
    pub(crate) async fn collect_reports<T>(
        &mut self,
        what: &str,
        accept: impl Fn(Report) -> Result<T, Report>,
    ) -> Result<Vec<T>, Failure> {
        let mut found: Vec<Option<T>> = (0..self.len()).map(|_| None).collect();
        let end = Instant::now() + self.limit;
        while found.iter().any(Option::is_none) {
            match self.next(end).await {
                Some((_, Event::Report(Report::Differs(differs), content))) => {
                    self.differing.push((differs, content));
                }
                Some((part, Event::Report(Report::Failed { reason, usage }, _))) => {
                    return Err(self.failed(part, reason, usage).await);
                }
                Some((part, Event::Report(report, _))) => match accept(report) {
                    Ok(value) => found[part] = Some(value),
                    Err(other) => {
                        return Err(Failure::run(format!("part {part} has not {what}: it sent {other:?}")));
                    }
                },
                Some((part, Event::Ended(reason))) => return Err(self.ended(part, &reason)),
                None => {
                    let late: Vec<usize> = (0..found.len()).filter(|part| found[*part].is_none()).collect();
                    return Err(self.late(&late, what));
                }
            }
        }
        Ok(found.into_iter().flatten().collect())
    }

    fn late(&self, parts: &[usize], what: &str) -> Failure {
        let names = parts.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        let seconds = self.limit.as_secs();
        Failure::run(format!("part {names} has not {what} within {seconds} s; --timeout gives it more time"))
    }

    /// Returns the failure of a run in which a part has failed. If the process of another part has ended,
    /// that is the reason.
    async fn failed(&mut self, part: usize, reason: String, usage: bool) -> Failure {
        let end = Instant::now() + GRACE;
        let mut first = (part, reason, usage);
        let mut failed = vec![part];
        while failed.len() < self.len() {
            match self.next(end).await {
                Some((other, _)) if failed.contains(&other) => {}
                Some((other, Event::Ended(reason))) => return self.ended(other, &reason),
                Some((other, Event::Report(Report::Failed { reason, usage }, _))) => {
                    failed.push(other);
                    // A part that lost a peer says less than the peer.
                    if usage && !first.2 || first.1.contains("peer") && !reason.contains("peer") {
                        first = (other, reason, usage);
                    }
                }
                Some(_) => {}
                None => break,
            }
        }
        let (part, reason, usage) = first;
        let message = format!("part {part}: {reason}");
        if usage { Failure::usage(message) } else { Failure::run(message) }
    }

    fn ended(&self, part: usize, reason: &str) -> Failure {
        match self.fate(part) {
            Some(fate) => Failure::run(format!("part {part}: {fate}")),
            None => Failure::run(format!("part {part} is gone: {reason}")),
        }
    }
}

/// Makes a closure for [`Parts::collect_reports`] that takes one kind of report.
macro_rules! only {
    ($report:pat => $value:expr) => {
        |report| match report {
            $report => Ok($value),
            other => Err(other),
        }
    };
}
pub(crate) use only;

/// Opens the stream to a part, whose reports go to `events` until it ends. Fails with the reason.
async fn open(
    part: usize,
    endpoint: Endpoint,
    events: &mpsc::UnboundedSender<(usize, Event)>,
) -> Result<mpsc::Sender<proto::Order>, String> {
    let endpoint = endpoint
        .connect_timeout(CONNECT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(ALIVE)
        .keep_alive_while_idle(true);
    let channel = timeout(CONNECT, endpoint.connect()).await;
    let channel = channel
        .map_err(|_| format!("no connection within {} s", CONNECT.as_secs()))?
        .map_err(|error| Failure::run("no connection").because(error).with_causes())?;
    let (orders, waiting) = mpsc::channel(ORDERS);
    let mut client = PartClient::new(channel).max_decoding_message_size(LARGEST);
    let call = timeout(CONNECT, client.work(ReceiverStream::new(waiting))).await;
    let mut reports = call
        .map_err(|_| format!("no answer within {} s", CONNECT.as_secs()))?
        .map_err(|status| format!("{SERVICE_NAME}: {}", status.message()))?
        .into_inner();
    let events = events.clone();
    tokio::spawn(async move {
        let reason = loop {
            let message = match reports.message().await {
                Ok(Some(message)) => message,
                Ok(None) => break "it closed the stream".to_owned(),
                Err(status) => break status.message().to_owned(),
            };
            let event = match read(&message.json, &format!("part {part}")) {
                Ok(report) => Event::Report(report, message.content),
                Err(failure) => break failure.with_causes(),
            };
            if events.send((part, event)).is_err() {
                return;
            }
        };
        let _ = events.send((part, Event::Ended(reason)));
    });
    Ok(orders)
}
