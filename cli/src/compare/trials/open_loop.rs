//! The open loop: operations begin when they are due, even if answers to earlier ones are late.
//!
//! Latency counts from the time when an operation was due, not from the time when it was sent. So the figures
//! include the time that operations spend in the queue behind a slow answer (no coordinated omission).
//!
//! Between two operations the generator sleeps by a timer of the kernel, because tokio's timer ticks in
//! milliseconds. Its wake-ups count as work for the operations, as those of a program's own timers would.
//!
//! A generator with a core of its own polls instead: in gaps of up to 3 ms it yields again and again, which lets
//! answers in, and spins for moments while no answer is expected. So the runtime is never idle then. The CPU
//! time of this waiting belongs to no operation, so it is measured and subtracted. A generator that shares its
//! processors, or has a CPU limit below two CPUs, must not poll: it would take the time of those that work for a
//! call, and under a limit the kernel would stop the whole process for most of each period.
//!
//! Whether a mode fell behind is decided by the tally of its trials (`Tally` in `trials/mod.rs`).

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::{Errno, read, retry_on_intr};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::{JoinError, JoinSet};
use tonic_rdma_commands::cores;
use tonic_rdma_commands::payload::seeded::SplitMix64;
use tonic_rdma_proto::transfer::Check;

use crate::compare::modes::Caller;
use crate::compare::modes::call_error::CallError;
use crate::compare::operations::{Done, Operation, Operations};
use crate::compare::plan::MAX_ARRIVALS;
use crate::compare::trials::TrialOutcome;

/// In a gap from this length on, a generator that polls sleeps, except at the end of the gap, because tokio's timer
/// may be a tick late.
const SLEEP_FROM: Duration = Duration::from_millis(3);
const WAKE_EARLY: Duration = Duration::from_millis(2);

/// Longest spin, while no answer is expected.
const SPIN: Duration = Duration::from_micros(20);

/// The load that is offered in a trial.
#[derive(Debug)]
pub(crate) struct OfferedLoad {
    /// The time when each operation is due, from the start of the trial, in order.
    pub(crate) schedule: Vec<Duration>,
    pub(crate) length: Duration,
    /// Index of the first operation, equal for all modes.
    pub(crate) first: usize,
    /// Largest number of operations in flight. Further operations wait, and the wait counts as latency.
    pub(crate) bound: usize,
    /// Calls that an operation makes at once.
    pub(crate) width: usize,
    /// Whether the generator sleeps while it waits, also in short gaps.
    pub(crate) sleeps: bool,
}

/// Makes a trial in which operations begin at the times of `offer`. Operations without an answer after
/// `limit` count as errors.
pub(crate) async fn open_trial(
    caller: &Caller,
    operations: &Operations,
    offer: &OfferedLoad,
    limit: Duration,
) -> TrialOutcome {
    let mut trial = TrialOutcome::default();
    if tokio::time::timeout(limit, run(caller, operations, offer, &mut trial)).await.is_err() {
        let missing = trial.counts.sent - trial.counts.ops - trial.counts.errors;
        trial.stuck(missing, limit);
    }
    trial
}

/// Sends each operation when it is due, until `offer.length` is over and all answers have arrived. An error
/// ends the sending. Operations that can't be sent within twice the length, because too many are in flight,
/// are given up. If this future is dropped, `trial` has the results so far.
async fn run(caller: &Caller, operations: &Operations, offer: &OfferedLoad, trial: &mut TrialOutcome) {
    let mut generator = Generator::new(trial);
    if let Err(error) = generator.offer(caller, operations, offer).await {
        generator.trial.counts.error(1, format!("the timer of the load generator: {error}"));
    }
    generator.finish(offer.length).await;
}

/// An operation: when it was due, from the start of the trial, and how it ended.
type Ended = Result<(Duration, Done), CallError>;

#[derive(Debug)]
struct Generator<'a> {
    under_way: JoinSet<Ended>,
    trial: &'a mut TrialOutcome,
    /// Time of each answer, from the start of the trial.
    ends: Vec<Duration>,
    /// CPU time of a yield without work for other tasks: an estimate of the median.
    empty_pass: Option<Duration>,
}

impl<'a> Generator<'a> {
    fn new(trial: &'a mut TrialOutcome) -> Self {
        Self { under_way: JoinSet::new(), trial, ends: Vec::new(), empty_pass: None }
    }

    /// Sends each operation when it is due.
    async fn offer(
        &mut self,
        caller: &Caller,
        operations: &Operations,
        offer: &OfferedLoad,
    ) -> io::Result<()> {
        let OfferedLoad { schedule, length, first, bound, width, sleeps } = offer;
        let timer = sleeps.then(Timer::new).transpose()?;
        let start = Instant::now();
        let give_up = start + 2 * *length;
        for (index, due) in schedule.iter().enumerate() {
            self.wait_until(start + *due, timer.as_ref()).await?;
            if self.trial.counts.errors > 0 {
                break;
            }
            if !self.room(*bound, give_up).await {
                let waits =
                    schedule[index..].iter().map(|due| give_up.saturating_duration_since(start + *due));
                self.trial.unsent.extend(waits);
                break;
            }
            self.send(caller, operations.take(first + index), *width, (start, *due));
        }
        self.wait_until(start + *length, timer.as_ref()).await
    }

    /// Starts an operation that is due `due` after `start`.
    fn send(
        &mut self,
        caller: &Caller,
        operation: Operation,
        width: usize,
        (start, due): (Instant, Duration),
    ) {
        let mut caller = caller.clone();
        self.trial.counts.sent += 1;
        self.under_way.spawn(async move {
            caller.run(&operation, Check::Stamps, width).await?;
            let latency = start.elapsed().saturating_sub(due);
            Ok((due, (latency, operation.bytes(), operation.messages())))
        });
    }

    /// Waits until `due`, and counts answers that arrive. Sleeps if there is a timer, and polls if not.
    async fn wait_until(&mut self, due: Instant, timer: Option<&Timer>) -> io::Result<()> {
        let Some(timer) = timer else {
            self.poll_until(due).await;
            return Ok(());
        };
        loop {
            self.reap();
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            timer.sleep(left).await?;
        }
    }

    async fn poll_until(&mut self, due: Instant) {
        // Measures from one reading of the clock to the next, so that the time of the readings, which is no
        // small part, counts too.
        let mut read = cores::thread_cpu_time();
        let mut since_last = || {
            let before = std::mem::replace(&mut read, cores::thread_cpu_time());
            read.saturating_sub(before)
        };
        loop {
            self.reap();
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            if left > SLEEP_FROM {
                tokio::time::sleep(left - WAKE_EARLY).await;
                since_last();
                continue;
            }
            let idle = self.under_way.is_empty();
            if idle {
                spin(left.min(SPIN));
                self.trial.waiting += since_last();
            }
            // Lets the runtime poll for arrivals once.
            tokio::task::yield_now().await;
            self.count_pass(since_last(), idle);
        }
    }

    /// Counts the time of a yield as waiting. If other tasks worked in it, only the time of an empty yield
    /// counts.
    fn count_pass(&mut self, took: Duration, idle: bool) {
        let empty = self.empty_pass.get_or_insert(took);
        if idle {
            // Longer passes raise the estimate and shorter ones lower it: it settles at the median, where
            // both are equally frequent.
            *empty =
                empty.mul_f64(if took > *empty { 1.05 } else { 1.0 / 1.05 }).max(Duration::from_nanos(50));
        }
        self.trial.waiting += if took <= 2 * *empty { took } else { *empty };
    }

    /// Waits until fewer than `bound` operations are in flight. Returns false if the time `give_up` comes
    /// first.
    async fn room(&mut self, bound: usize, give_up: Instant) -> bool {
        while self.under_way.len() >= bound {
            match tokio::time::timeout_at(give_up.into(), self.under_way.join_next()).await {
                Ok(Some(ended)) => {
                    self.count(ended);
                    // A busy machine may notice the answer and the end of the time together.
                    if Instant::now() >= give_up {
                        return false;
                    }
                }
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
        true
    }

    fn reap(&mut self) {
        while let Some(ended) = self.under_way.try_join_next() {
            self.count(ended);
        }
    }

    fn count(&mut self, ended: Result<Ended, JoinError>) {
        match ended.unwrap_or_else(|crash| Err(crash.into())) {
            Ok((due, (latency, bytes, messages))) => {
                self.ends.push(due + latency);
                self.trial.success(latency, bytes, messages);
            }
            Err(error) => self.trial.counts.fail(&error),
        }
    }

    /// Waits for the remaining answers.
    async fn finish(mut self, length: Duration) {
        while let Some(ended) = self.under_way.join_next().await {
            self.count(ended);
        }
        let late = self.ends.iter().filter(|end| **end > length).count();
        self.trial.counts.backlog = (late + self.trial.unsent.len()) as u64;
    }
}

/// A timer that is as exact as the kernel's.
#[derive(Debug)]
pub(crate) struct Timer(AsyncFd<OwnedFd>);

impl Timer {
    #[allow(deprecated, reason = "sound for a descriptor that is owned; its successor is unsafe to call")]
    pub(crate) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        AsyncFd::with_interest(timer, Interest::READABLE).map(Self)
    }

    pub(crate) async fn sleep(&self, length: Duration) -> io::Result<()> {
        let once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let length = Timespec { tv_sec: length.as_secs() as i64, tv_nsec: length.subsec_nanos().into() };
        let value = Itimerspec { it_interval: once, it_value: length };
        timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &value)?;
        loop {
            let mut ready = self.0.readable().await?;
            let outcome = retry_on_intr(|| read(&self.0, &mut [0_u8; 8]));
            ready.clear_ready();
            if outcome != Err(Errno::AGAIN) {
                return outcome.map(|_| ()).map_err(io::Error::from);
            }
        }
    }
}

fn spin(length: Duration) {
    let end = Instant::now() + length;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

/// Draws Poisson arrivals in `length`: as many as `rate` (per second) demands, at least one, at times that
/// `seed` determines.
pub(crate) fn poisson_arrivals(rate: f64, length: Duration, seed: u64) -> Vec<Duration> {
    let count = (rate * length.as_secs_f64()).round().clamp(1.0, MAX_ARRIVALS) as usize;
    let mut draws = SplitMix64::new(seed);
    let mut at = 0.0;
    let times: Vec<f64> = (0..count)
        .map(|_| {
            at += draws.gap();
            at
        })
        .collect();
    // A Poisson process with a known number of arrivals is a Poisson process scaled to its length.
    let end = at + draws.gap();
    times.iter().map(|due| length.mul_f64(due / end)).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use tonic::transport::Server;
    use tonic::{Request, Response, Status};
    use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
    use tonic_rdma_proto::transfer::{PutReply, PutRequest};

    use super::*;
    use crate::compare::modes::grpc::client::{self, CallSettings, GrpcCaller};
    use crate::compare::modes::mode::Mode;
    use crate::measure::settings::Http2;
    use crate::measure::transport::{LOCALHOST, tcp_listener};
    use crate::workload::Workload;

    #[test]
    fn yields_with_work_of_other_tasks_count_as_empty_ones() {
        let micros = Duration::from_micros;
        let mut trial = TrialOutcome::default();
        let mut generator = Generator::new(&mut trial);
        for pass in 0..1000 {
            // One pass in ten is long, even while nothing is in flight.
            generator.count_pass(micros(if pass % 10 == 0 { 50 } else { 1 }), true);
        }
        let before = generator.trial.waiting;
        assert!((micros(950)..micros(1300)).contains(&before), "{before:?}");
        for _ in 0..100 {
            generator.count_pass(micros(1), false);
            generator.count_pass(micros(30), false);
        }
        let counted = generator.trial.waiting - before;
        assert!((micros(180)..micros(230)).contains(&counted), "{counted:?}");
    }

    /// The thread has no more than a tenth of the time in which it waits.
    #[tokio::test]
    async fn a_generator_that_sleeps_leaves_the_processors_to_others() {
        let mut trial = TrialOutcome::default();
        let mut generator = Generator::new(&mut trial);
        let timer = Timer::new().unwrap();
        let before = cores::thread_cpu_time();
        for _ in 0..100 {
            generator.wait_until(Instant::now() + Duration::from_millis(2), Some(&timer)).await.unwrap();
        }
        let used = cores::thread_cpu_time() - before;
        assert!(used < Duration::from_millis(20), "{used:?}");
        assert_eq!(generator.trial.waiting, Duration::ZERO);
    }

    /// A service that answers every payload late.
    #[derive(Debug)]
    struct Slow;

    const SLOW: Duration = Duration::from_millis(10);

    #[tonic::async_trait]
    impl Transfer for Slow {
        async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
            tokio::time::sleep(SLOW).await;
            let bytes = request.into_inner().payload.len() as u64;
            Ok(Response::new(PutReply { bytes, ..PutReply::default() }))
        }
    }

    /// Offers ten operations at once, with one at a time in flight.
    async fn offer_ten(length: Duration) -> TrialOutcome {
        let incoming = tcp_listener(LOCALHOST).unwrap();
        let address = incoming.local_addr().unwrap();
        let server = Server::builder().add_service(TransferServer::new(Slow));
        tokio::spawn(server.serve_with_incoming(incoming));
        let channel = client::tcp(address, Http2::DEFAULT).await.unwrap();
        let caller = Caller::Grpc(GrpcCaller::new(channel, Mode::GrpcTcp, CallSettings::default()));
        let operations = Operations::new(Workload::Size(64), 1, false).unwrap();
        let schedule = vec![Duration::ZERO; 10];
        let offer = OfferedLoad { schedule, length, first: 0, bound: 1, width: 1, sleeps: true };
        open_trial(&caller, &operations, &offer, Duration::from_secs(3600)).await
    }

    #[tokio::test]
    async fn latency_counts_from_the_due_time() {
        let trial = offer_ten(Duration::from_secs(1)).await;
        // A busy machine may not send all of them.
        assert_eq!((trial.latencies.len() as u64, trial.counts.errors), (trial.counts.sent, 0));
        assert!(trial.counts.sent > 1);
        for (before, latency) in trial.latencies.iter().enumerate() {
            assert!(*latency >= SLOW * (before as u32 + 1), "{before}: {latency:?}");
        }
    }

    #[tokio::test]
    async fn operations_that_are_given_up_count_by_their_wait() {
        let length = Duration::from_millis(15);
        let trial = offer_ten(length).await;
        // At most three operations of ten milliseconds each fit into thirty milliseconds, one after the
        // other.
        assert!(trial.counts.sent <= 3 && trial.counts.errors == 0, "{trial:?}");
        assert_eq!(trial.counts.sent, trial.latencies.len() as u64);
        assert_eq!(trial.unsent, vec![length * 2; 10 - trial.counts.sent as usize]);
        assert!(trial.counts.backlog >= 9, "{trial:?}");
    }
}

#[cfg(test)]
mod arrivals_tests {
    use super::*;

    #[test]
    fn arrivals_match_the_rate_and_are_in_order_within_the_trial() {
        let length = Duration::from_millis(500);
        for (rate, count) in [(1000.0, 500), (0.1, 1), (2e6, 1_000_000)] {
            let arrivals = poisson_arrivals(rate, length, 3);
            assert_eq!(arrivals.len(), count);
            assert!(arrivals.is_sorted() && arrivals.iter().all(|due| *due <= length));
        }
    }

    #[test]
    fn arrivals_follow_their_seed_and_a_poisson_process() {
        let length = Duration::from_secs(1);
        let arrivals = poisson_arrivals(10_000.0, length, 3);
        assert_eq!(arrivals, poisson_arrivals(10_000.0, length, 3));
        assert_ne!(arrivals, poisson_arrivals(10_000.0, length, 4));
        // The share of exponential gaps that are shorter than the mean is 1 − 1/e. Of regular gaps it is
        // about one half, or none.
        let short =
            arrivals.windows(2).filter(|pair| (pair[1] - pair[0]) < Duration::from_micros(100)).count();
        assert!((6_100..6_550).contains(&short), "{short} of 9999");
    }
}
