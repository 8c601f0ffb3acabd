//! The trials: calls of one transport for a while, in a closed loop (the next call begins when one has ended)
//! or an open loop (calls begin when they are due, and latency counts from then).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hdrhistogram::Histogram;
use prost_reflect::{DynamicMessage, ReflectMessage as _};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};
use tonic_rdma_commands::cores::Usage;
use tonic_rdma_commands::{Context as _, Failure};

use crate::call::channel::{Connection, Path, Transport, code_name};
use crate::call::load::Cell;
use crate::call::message;
use crate::call::service::describe;
use crate::compare::trials::open_loop::{Timer, poisson_arrivals};

/// The pause of a caller after a call that found no server, so that it doesn't hammer the network.
const PAUSE: Duration = Duration::from_millis(10);

/// The amount of calls of a trial.
#[derive(Clone, Copy, Debug)]
pub(super) enum Amount {
    Time(Duration),
    Calls(u64),
}

/// The calls of a load, encoded.
#[derive(Debug)]
pub(super) struct Load {
    pub(super) path: PathAndQuery,
    pub(super) metadata: MetadataMap,
    pub(super) payloads: Arc<[Bytes]>,
    /// Whether each call sends all payloads. Otherwise calls send them in turn.
    pub(super) together: bool,
    /// The expected answers: of each call if it `streams` answers, of calls in turn otherwise. None if
    /// unchecked.
    pub(super) expected: Vec<Expected>,
    /// Whether a call has any number of answers.
    pub(super) streams: bool,
    pub(super) deadline: Duration,
}

/// An expected answer.
#[derive(Debug)]
pub(super) struct Expected {
    message: DynamicMessage,
    /// The bytes of an answer that was found equal, because equal bytes need not be decoded.
    known: OnceLock<Bytes>,
}

impl Expected {
    pub(super) fn new(message: DynamicMessage) -> Self {
        Self { message, known: OnceLock::new() }
    }

    fn check(&self, answer: &Bytes) -> Result<(), Fault> {
        if self.known.get() == Some(answer) {
            return Ok(());
        }
        let wrong = |what: String| Fault::Wrong(format!("the answer {what}"));
        let answer_is = DynamicMessage::decode(self.message.descriptor(), answer.clone());
        let decoded = answer_is.map_err(|error| wrong(format!("can't be decoded: {error}")))?;
        if decoded != self.message {
            let text = |message| message::to_json(message).unwrap_or_else(|failure| failure.with_causes());
            let text = (text(&decoded), text(&self.message));
            return Err(wrong(match text.0 == text.1 {
                true => format!("has fields that its descriptor lacks: {}", text.0),
                false => format!("differs from --check: {}", text.0),
            }));
        }
        let _ = self.known.set(answer.clone());
        Ok(())
    }
}

/// Why a call is an error.
#[derive(Debug)]
enum Fault {
    Status(Status),
    Wrong(String),
}

impl From<Status> for Fault {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

impl Load {
    /// Returns the bytes that a call sends, on average.
    pub(super) fn bytes(&self) -> u64 {
        let all: usize = self.payloads.iter().map(Bytes::len).sum();
        let calls = if self.together { 1 } else { self.payloads.len().max(1) };
        (all / calls) as u64
    }

    /// Makes the call of this number. It ends within the deadline.
    async fn call(&self, connection: &mut Connection, number: u64) -> Result<(), Fault> {
        match tokio::time::timeout(self.deadline, self.answered(connection, number)).await {
            Ok(answered) => answered,
            Err(_) => Err(Status::deadline_exceeded("no end within the deadline").into()),
        }
    }

    async fn answered(&self, connection: &mut Connection, number: u64) -> Result<(), Fault> {
        let turn = |count: usize| number as usize % count.max(1);
        let sent = match self.together {
            true => 0..self.payloads.len(),
            false => turn(self.payloads.len())..turn(self.payloads.len()) + 1,
        };
        let payloads = Arc::clone(&self.payloads);
        let messages = tokio_stream::iter(sent.map(move |index| payloads[index].clone()));
        let answers = connection.call(&self.path, &self.metadata, messages).await?;
        let (mut answers, mut count) = (answers.into_inner(), 0);
        while let Some(answer) = answers.message().await? {
            let due = if self.streams { count } else { turn(self.expected.len()) };
            if let Some(expected) = self.expected.get(due) {
                expected.check(&answer)?;
            }
            count += 1;
        }
        match self.expected.len() {
            _ if !self.streams && count == 0 => Err(Status::internal("OK without an answer").into()),
            due if self.streams && due > 0 && due != count => {
                Err(Fault::Wrong(format!("the stream had {count} answers, and --check has {due}")))
            }
            _ => Ok(()),
        }
    }
}

/// What calls have done.
#[derive(Debug, Default)]
struct Outcome {
    latencies: Vec<Duration>,
    /// The number of errors by their gRPC status, or `WRONG_ANSWER`.
    errors: BTreeMap<String, u64>,
    first_error: Option<String>,
    /// Calls of an open loop that were given up before they were sent.
    unsent: u64,
}

impl Outcome {
    fn count(&mut self, ended: Result<Duration, Fault>) {
        let (name, text) = match ended {
            Ok(latency) => return self.latencies.push(latency),
            Err(Fault::Status(status)) => (code_name(status.code()), describe(&status)),
            Err(Fault::Wrong(text)) => ("WRONG_ANSWER".to_owned(), text),
        };
        *self.errors.entry(name).or_default() += 1;
        self.first_error.get_or_insert(text);
    }
}

/// The outcomes of all trials of a transport in a cell.
#[derive(Debug)]
pub(super) struct Tally {
    /// Latencies in nanoseconds.
    pub(super) latencies: Histogram<u64>,
    pub(super) errors: BTreeMap<String, u64>,
    pub(super) first_error: Option<String>,
    pub(super) unsent: u64,
    pub(super) wall: Duration,
    /// CPU time of this process.
    pub(super) cpu: Duration,
    /// The transports that connections really had.
    pub(super) paths: BTreeSet<Path>,
}

impl Tally {
    fn new() -> Result<Self, Failure> {
        // A deadline is an hour at most.
        let latencies =
            Histogram::new_with_max(2 * 3_600_000_000_000, 3).context("can't make a histogram")?;
        let (errors, paths) = (BTreeMap::new(), BTreeSet::new());
        Ok(Self {
            latencies,
            errors,
            first_error: None,
            unsent: 0,
            wall: Duration::ZERO,
            cpu: Duration::ZERO,
            paths,
        })
    }

    fn add(&mut self, outcome: Outcome) {
        for latency in outcome.latencies {
            self.latencies.saturating_record(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX).max(1));
        }
        for (name, count) in outcome.errors {
            *self.errors.entry(name).or_default() += count;
        }
        self.first_error = self.first_error.take().or(outcome.first_error);
        self.unsent += outcome.unsent;
    }
}

/// A transport with its connections.
#[derive(Debug)]
pub(super) struct Participant {
    pub(super) transport: Transport,
    connections: Vec<Connection>,
    tally: Tally,
    /// Number of calls begun in this cell.
    begun: u64,
}

impl Participant {
    pub(super) fn new(transport: Transport, connections: Vec<Connection>) -> Result<Self, Failure> {
        Ok(Self { transport, connections, tally: Tally::new()?, begun: 0 })
    }

    /// Returns what was measured in a cell, and begins the next one.
    pub(super) fn end_cell(&mut self) -> Result<Tally, Failure> {
        self.begun = 0;
        Ok(std::mem::replace(&mut self.tally, Tally::new()?))
    }

    /// Makes a trial, the `index`-th one of its cell.
    pub(super) async fn trial(
        &mut self,
        load: &Arc<Load>,
        cell: Cell,
        (index, amount): (usize, Amount),
    ) -> Result<(), Failure> {
        let (before, start) = (Usage::of_this_process(), Instant::now());
        let outcomes = match cell.rate {
            Some(rate) => vec![self.open_loop(load, cell.inflight, schedule(rate, amount, index)).await?],
            None => self.closed_loop(load, cell.inflight, amount).await?,
        };
        self.tally.wall += start.elapsed();
        self.tally.cpu += (Usage::of_this_process() - before).cpu;
        outcomes.into_iter().for_each(|outcome| self.tally.add(outcome));
        // A connection may have been made again.
        self.tally.paths.extend(self.connections.iter().map(Connection::path));
        Ok(())
    }

    fn connection(&self, number: usize) -> Connection {
        self.connections[number % self.connections.len()].clone()
    }

    async fn closed_loop(
        &mut self,
        load: &Arc<Load>,
        inflight: usize,
        amount: Amount,
    ) -> Result<Vec<Outcome>, Failure> {
        let (end, last) = match amount {
            Amount::Time(time) => (Some(Instant::now() + time), u64::MAX),
            Amount::Calls(calls) => (None, self.begun + calls),
        };
        let next = Arc::new(AtomicU64::new(self.begun));
        let mut callers = JoinSet::new();
        for caller in 0..inflight {
            let (load, next, mut connection) = (Arc::clone(load), Arc::clone(&next), self.connection(caller));
            callers.spawn(async move {
                let mut outcome = Outcome::default();
                while end.is_none_or(|end| Instant::now() < end) {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= last {
                        break;
                    }
                    let start = Instant::now();
                    let ended = load.call(&mut connection, number).await;
                    let no_server =
                        matches!(&ended, Err(Fault::Status(status)) if status.code() == Code::Unavailable);
                    outcome.count(ended.map(|()| start.elapsed()));
                    if no_server {
                        tokio::time::sleep(PAUSE).await;
                    }
                }
                outcome
            });
        }
        let mut outcomes = Vec::new();
        while let Some(outcome) = callers.join_next().await {
            outcomes.push(outcome.context("a caller crashed")?);
        }
        self.begun = next.load(Ordering::Relaxed).min(last);
        Ok(outcomes)
    }

    /// Begins each call when it is due, and ends when the `length` of the schedule is over and all calls have
    /// ended. Calls that can't begin within the deadline after the end of the schedule, because too many are in
    /// flight, are given up.
    async fn open_loop(
        &mut self,
        load: &Arc<Load>,
        inflight: usize,
        (schedule, length): (Vec<Duration>, Duration),
    ) -> Result<Outcome, Failure> {
        let timer = Timer::new().context("can't make a timer")?;
        let room = Arc::new(Semaphore::new(inflight));
        let mut outcome = Outcome::default();
        let mut calls = JoinSet::new();
        let start = Instant::now();
        let give_up = start + length + load.deadline;
        for (index, due) in schedule.iter().copied().chain([length]).enumerate() {
            let due = start + due;
            loop {
                while let Some(ended) = calls.try_join_next() {
                    outcome.count(ended.context("a call crashed")?);
                }
                let left = due.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                timer.sleep(left).await.context("the timer of the load failed")?;
            }
            if index == schedule.len() {
                break;
            }
            let admitted = tokio::time::timeout_at(give_up.into(), Arc::clone(&room).acquire_owned()).await;
            let Ok(Ok(admitted)) = admitted else {
                outcome.unsent = (schedule.len() - index) as u64;
                break;
            };
            let (load, mut connection, number) = (Arc::clone(load), self.connection(index), self.begun);
            self.begun += 1;
            calls.spawn(async move {
                let ended = load.call(&mut connection, number).await;
                drop(admitted);
                ended.map(|()| due.elapsed())
            });
        }
        while let Some(ended) = calls.join_next().await {
            outcome.count(ended.context("a call crashed")?);
        }
        Ok(outcome)
    }
}

/// Returns the times at which calls are due, Poisson arrivals that are the same for each transport, and the length
/// of the schedule.
fn schedule(rate: f64, amount: Amount, trial: usize) -> (Vec<Duration>, Duration) {
    let length = match amount {
        Amount::Time(time) => time,
        Amount::Calls(calls) => Duration::from_secs_f64(calls as f64 / rate),
    };
    let seed = rate.to_bits() ^ (trial as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (poisson_arrivals(rate, length, seed), length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_has_exactly_the_calls_that_were_asked_for() {
        for (calls, rate) in [(1, 0.1), (7, 1000.0), (333, 7.0), (1_000_000, 1e6)] {
            let (schedule, length) = schedule(rate, Amount::Calls(calls), 3);
            assert_eq!(schedule.len() as u64, calls);
            assert!((length.as_secs_f64() * rate - calls as f64).abs() < 1e-3, "{length:?}");
            assert!(schedule.iter().all(|due| *due <= length));
        }
        let (one, other) = (Amount::Calls(9), Amount::Time(Duration::from_secs(9)));
        assert_eq!(schedule(1.0, one, 2), schedule(1.0, other, 2));
        assert_ne!(schedule(1.0, one, 2), schedule(1.0, one, 1));
    }
}
