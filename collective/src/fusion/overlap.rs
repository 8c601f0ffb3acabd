//! How much of the communication was hidden behind computation, and the times of an operation.

use std::fmt;
use std::future::Future;
use std::ops::AddAssign;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use tonic_rdma::unstable::lock;

/// How much of the communication of a step, or of several, ran while the caller computed.
///
/// Displays as `communication 12.1ms of 80.0ms (15 %), waited 2.3ms: 81 % hidden`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Overlap {
    /// The number of buckets that were reduced.
    pub buckets: u64,
    /// The bytes of these buckets.
    pub bytes: u64,
    /// The time from the start of the step until its end.
    pub step: Duration,
    /// The time during which at least one bucket was under way.
    pub communication: Duration,
    /// The time that `finish` waited.
    pub waited: Duration,
}

impl Overlap {
    /// Returns the communication that ran while the caller computed: the time of communication, less the time
    /// that `finish` waited.
    pub fn hidden(&self) -> Duration {
        self.communication.saturating_sub(self.waited)
    }

    /// Returns the hidden part of the communication, from 0 to 1, or 0 if there was no communication.
    ///
    /// If the communication takes processor time from the caller's computation, the step gets longer,
    /// although the communication counts as hidden. Compare [`step`](Self::step) too.
    pub fn hidden_fraction(&self) -> f64 {
        fraction(self.hidden(), self.communication)
    }

    /// Returns the communication as a part of the step's time, or 0 if there was no step.
    pub fn communication_fraction(&self) -> f64 {
        fraction(self.communication, self.step)
    }
}

impl AddAssign for Overlap {
    fn add_assign(&mut self, other: Self) {
        self.buckets += other.buckets;
        self.bytes += other.bytes;
        self.step += other.step;
        self.communication += other.communication;
        self.waited += other.waited;
    }
}

impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "communication {:.1?} of {:.1?} ({:.0} %), waited {:.1?}: {:.0} % hidden",
            self.communication,
            self.step,
            100.0 * self.communication_fraction(),
            self.waited,
            100.0 * self.hidden_fraction()
        )
    }
}

fn fraction(part: Duration, whole: Duration) -> f64 {
    if whole.is_zero() { 0.0 } else { part.as_secs_f64() / whole.as_secs_f64() }
}

/// Returns the time that at least one of the intervals covers. They are in the order of their starts.
pub(super) fn covered(intervals: impl IntoIterator<Item = (Instant, Instant)>) -> Duration {
    let mut sum = Duration::ZERO;
    let mut until: Option<Instant> = None;
    for (begin, end) in intervals {
        let begin = until.map_or(begin, |until| begin.max(until));
        sum += end.saturating_duration_since(begin);
        until = Some(until.map_or(end, |until| end.max(until)));
    }
    sum
}

/// A future and its times. Operations end on the progress thread of the communicator, which then wakes this
/// future. The time of the wake-up is the end, also if the caller polls much later.
pub(super) struct Timed<F: Future> {
    flight: F,
    started: Instant,
    ended: Arc<EndWaker>,
}

#[derive(Default)]
struct EndWaker {
    /// The time of the latest wake-up, and the task that waits.
    state: Mutex<(Option<Instant>, Option<Waker>)>,
}

impl<F: Future + Unpin> Timed<F> {
    /// Takes an operation that has just started.
    pub(super) fn new(flight: F, started: Instant) -> Self {
        Self { flight, started, ended: Arc::default() }
    }

    /// Polls the operation. Returns its output, its start and its end.
    pub(super) fn poll(&mut self, task: Option<&Waker>) -> Poll<(F::Output, (Instant, Instant))> {
        let woken = {
            let mut state = lock(&self.ended.state);
            state.1 = task.cloned();
            state.0.take()
        };
        let waker = Waker::from(Arc::clone(&self.ended));
        let poll = Pin::new(&mut self.flight).poll(&mut Context::from_waker(&waker));
        poll.map(|output| (output, (self.started, woken.unwrap_or_else(Instant::now))))
    }
}

impl Wake for EndWaker {
    fn wake(self: Arc<Self>) {
        let task = {
            let mut state = lock(&self.state);
            state.0 = Some(Instant::now());
            state.1.take()
        };
        if let Some(task) = task {
            task.wake();
        }
    }
}
